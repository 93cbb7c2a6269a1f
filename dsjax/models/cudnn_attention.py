"""Attention through cuDNN's flash kernels, which never store a score.

cuDNN knows causal masks and sliding windows over a whole sequence.  Any other mask (packed
documents, a rank's part of a sequence) goes to it as a bias, for one section of queries at a time
so that the bias stays small and unseen keys are not visited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from dsjax.models.chunked_attention import Mask, Part, rows, section_seen, sections_of

_MAX_HEAD_DIM = 128


def fits(q: jax.Array, k: jax.Array, v: jax.Array, parts: Sequence[Part] = ()) -> bool:
    """Whether cuDNN's kernels take these arrays (16 bits, head size, even lengths), cut into these parts."""
    head_dim = q.shape[-1]
    return (
        q.dtype in (jnp.bfloat16, jnp.float16)
        and head_dim % 8 == 0
        and head_dim <= _MAX_HEAD_DIM
        and v.shape[-1] == head_dim
        and q.shape[1] % 2 == 0
        and k.shape[1] % 2 == 0
        and all(part.length % 2 == 0 for part in parts)
    )


def _keep_kernel_outputs(primitive: Any, *_: Any, **__: Any) -> bool:
    return "dot_product_attention" in primitive.name


def attend(
    q_bsnh: jax.Array,
    k_blkh: jax.Array,
    v_blkh: jax.Array,
    query_segments_bs: jax.Array | None,
    key_segments_bl: jax.Array | None,
    *,
    parts: Sequence[Part],
    mask: Mask,
    scale: float,
    chunk: int,
    implementation: Any = "cudnn",
) -> jax.Array:
    """Attention of query rows over all keys: [b, s, n, h].

    Args: as `chunked_attention.forward`; `implementation` as in `jax.nn.dot_product_attention`.
    """
    keys = k_blkh.shape[1]
    whole = len(parts) == 1 and parts[0].length == keys
    if query_segments_bs is None and whole and (mask.causal or mask.window is None):
        window = None if mask.window is None else (mask.window - 1, 0)
        return jax.nn.dot_product_attention(
            q_bsnh, k_blkh, v_blkh, scale=scale, is_causal=mask.causal, local_window_size=window,
            implementation=implementation,
        )  # fmt: skip
    outputs = []
    for section in sections_of(parts, keys, mask, chunk, loops=False):
        # cuDNN takes even numbers of keys only; those that are too many are not seen.
        even = (section.first_key // 2 * 2, min(keys, -(-section.end_key // 2) * 2))
        section = replace(section, first_key=even[0], end_key=even[1])

        def part(
            q: jax.Array, k: jax.Array, v: jax.Array, own: Any, others: Any, section: Any = section
        ) -> jax.Array:
            first, width = section.first_key, section.end_key - section.first_key
            own_keys = None if others is None else rows(others, first, width, 1)
            seen = section_seen(section, mask, own, own_keys, 0)
            if seen is not None:
                seen = seen.reshape(-1, 1, section.size, width)
                seen = jnp.broadcast_to(seen, (q.shape[0], *seen.shape[1:]))
            return jax.nn.dot_product_attention(
                rows(q, section.row, section.size, 1), rows(k, first, width, 1), rows(v, first, width, 1),
                scale=scale, mask=seen, implementation=implementation,
            )  # fmt: skip

        # The bias is made again in the backward pass; the kernel is not run again.
        part = jax.checkpoint(part, policy=_keep_kernel_outputs)
        outputs.append(part(q_bsnh, k_blkh, v_blkh, query_segments_bs, key_segments_bl))
    return jnp.concatenate(outputs, 1)

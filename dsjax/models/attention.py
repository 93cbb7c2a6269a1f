"""Attention behind one function: every mask, every backend, every layout.

On a mesh each device attends with its own rows, heads and queries; the keys and values of a sequence
that is cut over `context` are gathered first (all-gather attention: with causal masks in zigzag order
every rank has equal work, and unlike a ring it may stand inside a branch).

Letters of shapes: b batch, s sequence, n query heads, k key/value heads, h head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dsjax.mesh import current_layout, manual
from dsjax.models import chunked_attention, cudnn_attention
from dsjax.models.chunked_attention import Mask, Part
from dsjax.models.layers import cut_axes

# Rows of queries whose scores exist at a time (per head).
_CHUNK = 128
# cuDNN gets what it has no mask for in at most about so many sections.
_CUDNN_SECTIONS = 8


@dataclass(frozen=True)
class _Plan:
    """How the devices along `context` share the queries, and what each query sees under each of the masks."""

    ranks: tuple[tuple[Part, ...], ...]
    masks: tuple[Mask, ...]
    scale: float
    cap: float | None

    def here(self, function: Callable[..., Any], kind: jax.Array | None, *args: Any) -> Any:
        """`function(parts, mask, *args)` with the parts of this device's rank and the mask of this number."""
        branches = [partial(function, parts, mask) for mask in self.masks for parts in self.ranks]
        if len(branches) == 1:
            return branches[0](*args)
        index: Any = lax.axis_index("context") if len(self.ranks) > 1 else 0
        if kind is not None:
            index += kind * len(self.ranks)
        return lax.switch(index, branches, *args)


def attention(
    q_bsnh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    *,
    segment_ids_bs: jax.Array | None = None,
    causal: bool = True,
    window: int | tuple[int | None, ...] | None = None,
    kind: jax.Array | None = None,
    zigzag: bool = False,
    scale: float | None = None,
    cap: float | None = None,
) -> jax.Array:
    """softmax(cap * tanh(q k^T * scale / cap)) v over the keys that each query may see; no tanh without a cap.

    Args:
      q_bsnh, k_bskh, v_bskh: n is a multiple of k (grouped-query attention); global arrays. The last dimension of v
        may be another.
      segment_ids_bs: int32; a query sees only keys of its own segment (packed documents).
      causal: only keys up to the query's own place.
      window: only keys less than so many places away. Several: `kind` tells which of them counts.
      kind: int32 [], the number of a window; the same on all devices that share the sequence.
      zigzag: the sequence lies in `zigzag_order` over the mesh's `context` axis; places are those of
        the sequence that this order stands for.
      scale: of the scores; default 1 / sqrt(h).
      cap: what scores stay below, smoothly (Gemma 2); None: they are not bent.

    Returns:
      [b, s, n, h] in the queries' type. Memory grows with s, not with its square.
    """
    length, head_dim = q_bsnh.shape[1], q_bsnh.shape[3]
    layout = current_layout()
    ranks, names = cut_names(q_bsnh, k_bskh)
    parts = _parts(length, ranks, zigzag)
    windows = window if isinstance(window, tuple) else (window,)
    masks = tuple(Mask(causal, width) for width in windows)
    plan = _Plan(parts, masks, 1 / math.sqrt(head_dim) if scale is None else scale, cap)
    extra = {} if segment_ids_bs is None else {"segments": segment_ids_bs}
    if len(masks) > 1:
        extra["kind"] = jnp.asarray(kind, jnp.int32)
    device = layout.mesh.devices.flat[0] if layout is not None else jax.devices()[0]
    on_gpu = device.platform in ("gpu", "cuda")

    def local(q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array) -> jax.Array:
        more: dict[str, Any] = dict(zip(extra, rest, strict=True))
        own = all_segments = more.get("segments")
        if ranks > 1:
            k, v = _whole_sequence(k, ranks, zigzag), _whole_sequence(v, ranks, zigzag)
            all_segments = None if own is None else _whole_sequence(own, ranks, zigzag)
        form = _cudnn if on_gpu and cap is None and cudnn_attention.fits(q, k, v, parts[0]) else _chunked
        return form(q, k, v, own, all_segments, more.get("kind"), plan)

    batch, sequence, q_heads, kv_heads = names
    in_names: list[tuple[str | None, ...]] = [
        *((batch, sequence, heads, None) for heads in (q_heads, kv_heads, kv_heads)),
        *((batch, sequence) if name == "segments" else () for name in extra),
    ]
    mapped = manual(local, in_names, (batch, sequence, q_heads, None))
    return mapped(q_bsnh, k_bskh, v_bskh, *extra.values())


def cut_names(q_bsnh: jax.Array, k_bskh: jax.Array) -> tuple[int, tuple[str | None, ...]]:
    """Ranks that share a sequence, and the logical names by which batch, sequence, query and key heads are cut."""
    layout = current_layout()
    rows, length, heads, _ = q_bsnh.shape
    batch = "batch" if cut_axes(layout, "batch", rows) else None
    sequence = cut_axes(layout, "sequence", length)
    kv_heads = "kv_heads" if cut_axes(layout, "kv_heads", k_bskh.shape[2]) else None
    # A single key head is every query head's: it is whole where those are cut.
    cut = cut_axes(layout, "heads", heads) and (kv_heads or k_bskh.shape[2] == 1)
    ranks = layout.axis_size("context") if layout is not None and sequence else 1
    return ranks, (batch, "sequence" if sequence else None, *(("heads", kv_heads) if cut else (None, None)))


def _parts(length: int, ranks: int, zigzag: bool) -> tuple[tuple[Part, ...], ...]:
    """Which places of the sequence each rank's rows of queries are."""
    if zigzag and ranks > 1:
        each = length // (2 * ranks)
        return tuple(
            (Part(0, r * each, each), Part(each, (2 * ranks - 1 - r) * each, each)) for r in range(ranks)
        )
    each = length // ranks
    return tuple((Part(0, r * each, each),) for r in range(ranks))


def _whole_sequence(x: jax.Array, ranks: int, zigzag: bool) -> jax.Array:
    """[b, s / ranks, ...] of each rank -> [b, s, ...] in the sequence's order, on every rank."""
    whole = lax.all_gather(x, "context", axis=1, tiled=True)
    if not zigzag:
        return whole
    slots = jnp.split(whole, 2 * ranks, axis=1)
    return jnp.concatenate(slots[0::2] + slots[1::2][::-1], axis=1)


def _cudnn(q: Any, k: Any, v: Any, own: Any, all_segments: Any, kind: Any, plan: _Plan) -> jax.Array:
    chunk = max(_CHUNK, -(-q.shape[1] // _CUDNN_SECTIONS))

    def attend(parts: Sequence[Part], mask: Mask, *arrays: Any) -> jax.Array:
        return cudnn_attention.attend(*arrays, parts=parts, mask=mask, scale=plan.scale, chunk=chunk)

    return plan.here(attend, kind, q, k, v, own, all_segments)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _chunked(q: Any, k: Any, v: Any, own: Any, all_segments: Any, kind: Any, plan: _Plan) -> jax.Array:
    return _chunked_fwd(q, k, v, own, all_segments, kind, plan)[0]


def _chunked_fwd(
    q: Any, k: Any, v: Any, own: Any, all_segments: Any, kind: Any, plan: _Plan
) -> tuple[Any, Any]:
    def forward(parts: Sequence[Part], mask: Mask, *arrays: Any) -> tuple[jax.Array, jax.Array]:
        return chunked_attention.forward(
            *arrays, parts=parts, mask=mask, scale=plan.scale, cap=plan.cap, chunk=_CHUNK
        )

    out, lse = plan.here(forward, kind, q, k, v, own, all_segments)
    return out, (q, k, v, own, all_segments, out, lse, kind)


def _chunked_bwd(plan: _Plan, residuals: tuple[Any, ...], gradient: jax.Array) -> tuple[Any, ...]:
    def backward(parts: Sequence[Part], mask: Mask, *arrays: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        return chunked_attention.backward(
            arrays[:-1], arrays[-1], parts=parts, mask=mask, scale=plan.scale, cap=plan.cap, chunk=_CHUNK
        )

    *arrays, kind = residuals
    dq, dk, dv = plan.here(backward, kind, *arrays, gradient)
    return dq, dk.astype(residuals[1].dtype), dv.astype(residuals[2].dtype), None, None, None


_chunked.defvjp(_chunked_fwd, _chunked_bwd)

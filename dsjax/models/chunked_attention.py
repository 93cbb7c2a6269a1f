"""Attention by chunks of queries: memory of one chunk's scores, whatever the sequence length.

The forward pass keeps the output and each row's log-sum-exp; the backward pass computes a chunk's
probabilities again from them (Dao et al. 2022, without the loop over keys, which a compiler for
matrix products does not need).  Which keys a chunk can see is worked out before tracing, so causal
and sliding-window masks cost only the scores that they keep.

Letters of shapes: b batch, s query rows, l keys, c rows of a chunk, k key/value heads, g query heads
of a key/value head, h head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Score of a key that is not seen: finite, so that a row that sees nothing stays finite too.
_UNSEEN = -1e30
# Chunks are unrolled with the keys each of them needs, up to this many; beyond it, groups of
# chunks share a slice of keys and run in a loop, so that compile time stays bounded.
_MAX_SECTIONS = 8


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees by order alone (segments come on top).

    Attributes:
      causal: only keys up to its own place.
      window: only keys less than this many places away; None for all.
    """

    causal: bool
    window: int | None

    def visible(self, query: jax.Array, key: jax.Array) -> jax.Array | None:
        """bool [c, l] for places in the sequence [c] and [l]; None where all are seen."""
        distance = query[:, None] - key[None, :]
        seen = distance >= 0 if self.causal else None
        if self.window is not None:
            near = distance < self.window
            if not self.causal:
                near &= distance > -self.window
            seen = near if seen is None else seen & near
        return seen


@dataclass(frozen=True)
class Part:
    """A run of query rows: where it lies in the arrays and in the sequence."""

    row: int
    place: int
    length: int


@dataclass(frozen=True)
class Section:
    """Chunks of queries that share one slice of keys."""

    row: int
    place: int
    size: int
    count: int
    first_key: int
    end_key: int


def sections_of(
    parts: Sequence[Part], keys: int, mask: Mask, chunk: int, loops: bool = True
) -> list[Section]:
    """Cuts runs of query rows into sections, each with the keys that it can see.

    Args:
      parts: runs of rows, together all rows of the query array in order.
      keys: length of the key array.
      mask: what is visible.
      chunk: rows of a chunk.
      loops: whether sections may hold several chunks, so that there are few of them.
    """
    chunks = sum(-(-part.length // chunk) for part in parts)
    group = -(-chunks // _MAX_SECTIONS) if loops else 1
    sections = []
    for part in parts:
        whole, rest = divmod(part.length, chunk)
        pieces = [(i * chunk, chunk, min(group, whole - i)) for i in range(0, whole, group)]
        if rest:
            pieces.append((whole * chunk, rest, 1))
        for start, size, count in pieces:
            place, end = part.place + start, part.place + start + size * count
            first_key, end_key = 0, keys
            if mask.causal:
                end_key = min(keys, end)
            if mask.window is not None:
                first_key = max(0, place - mask.window + 1)
                end_key = min(end_key, end + mask.window - 1)
            sections.append(Section(part.row + start, place, size, count, first_key, end_key))
    return sections


def rows(x: jax.Array, start: Any, size: int, axis: int) -> jax.Array:
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + size, axis=axis)
    return lax.dynamic_slice_in_dim(x, start, size, axis=axis)


def _scores(
    q_bkgch: jax.Array, k_bklh: jax.Array, seen: jax.Array | None, scale: float, cap: float | None
) -> tuple[jax.Array, jax.Array | None]:
    """Scores [b, k, g, c, l], and their derivative by what they were before the cap bent them (None: 1)."""
    s_bkgcl = scale * jnp.einsum("bkgch,bklh->bkgcl", q_bkgch, k_bklh, preferred_element_type=jnp.float32)
    slope = None
    if cap is not None:
        bent = jnp.tanh(s_bkgcl / cap)
        s_bkgcl, slope = cap * bent, 1 - bent * bent
    return s_bkgcl if seen is None else jnp.where(seen, s_bkgcl, _UNSEEN), slope


def section_seen(
    section: Section,
    mask: Mask,
    query_segments_bs: jax.Array | None,
    key_segments_bl: jax.Array | None,
    index: Any,
) -> jax.Array | None:
    """Which keys the section's chunk of this index sees.

    Args:
      query_segments_bs: segments of all query rows, or None.
      key_segments_bl: segments of the section's own slice of keys, or None.

    Returns:
      bool, broadcastable to [b, 1, 1, c, l]; None where all are seen.
    """
    place = section.place + index * section.size + jnp.arange(section.size)
    seen = mask.visible(place, jnp.arange(section.first_key, section.end_key))
    if query_segments_bs is None or key_segments_bl is None:
        return seen
    own_bc = rows(query_segments_bs, section.row + index * section.size, section.size, 1)
    same = (own_bc[:, :, None] == key_segments_bl[:, None, :])[:, None, None]
    return same if seen is None else same & seen


@dataclass(frozen=True)
class _Keys:
    """The keys and values of a section, and what tells which of them a chunk sees."""

    k_bklh: jax.Array
    v_bklh: jax.Array
    query_segments_bs: jax.Array | None
    key_segments_bl: jax.Array | None
    section: Section
    mask: Mask

    def seen(self, index: Any) -> jax.Array | None:
        return section_seen(self.section, self.mask, self.query_segments_bs, self.key_segments_bl, index)


def _keys_of(
    section: Section, k: jax.Array, v: jax.Array, query_segments: Any, key_segments: Any, mask: Mask
) -> _Keys:
    width = section.end_key - section.first_key
    own = None if key_segments is None else rows(key_segments, section.first_key, width, 1)
    return _Keys(
        rows(k, section.first_key, width, 2), rows(v, section.first_key, width, 2),
        query_segments, own, section, mask,
    )  # fmt: skip


def _over_chunks(
    section: Section, carry: Any, step: Callable[[Any, Any], tuple[Any, tuple[jax.Array, ...]]]
) -> tuple[Any, tuple[jax.Array, ...]]:
    """Runs a section's chunks in order; the results' chunk axis (3) is put together again."""
    if section.count == 1:
        return step(carry, 0)
    carry, stacked = lax.scan(step, carry, jnp.arange(section.count))

    def joined(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, 3)
        return x.reshape(*x.shape[:3], -1, *x.shape[5:])

    return carry, tuple(joined(x) for x in stacked)


def _split_heads(x_bsnh: jax.Array, kv_heads: int) -> jax.Array:
    b, s, n, h = x_bsnh.shape
    return x_bsnh.reshape(b, s, kv_heads, n // kv_heads, h).transpose(0, 2, 3, 1, 4)


def _join_heads(x_bkgsh: jax.Array) -> jax.Array:
    b, k, g, s, h = x_bkgsh.shape
    return x_bkgsh.transpose(0, 3, 1, 2, 4).reshape(b, s, k * g, h)


def forward(
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
    cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of query rows over all keys; a cap bends scores to cap * tanh(score / cap).

    Returns:
      The output [b, s, n, h] in the queries' type, and the log-sum-exp of each row's scores
      [b, k, g, s] in fp32, which `backward` needs.
    """
    kv_heads = k_blkh.shape[2]
    q, k, v = _split_heads(q_bsnh, kv_heads), k_blkh.swapaxes(1, 2), v_blkh.swapaxes(1, 2)
    outputs, lses = [], []
    for section in sections_of(parts, k.shape[2], mask, chunk):
        keys = _keys_of(section, k, v, query_segments_bs, key_segments_bl, mask)

        def step(_: Any, index: Any, keys: _Keys = keys) -> tuple[Any, tuple[jax.Array, ...]]:
            row = keys.section.row + index * keys.section.size
            s, _ = _scores(rows(q, row, keys.section.size, 3), keys.k_bklh, keys.seen(index), scale, cap)
            top = lax.stop_gradient(s.max(-1, keepdims=True))
            p = jnp.exp(s - top)
            total = p.sum(-1, keepdims=True)
            out = jnp.einsum(
                "bkgcl,bklh->bkgch", p.astype(v.dtype), keys.v_bklh, preferred_element_type=jnp.float32
            )
            return None, ((out / total).astype(q.dtype), (top + jnp.log(total))[..., 0])

        _, (out, lse) = _over_chunks(section, None, step)
        outputs.append(out)
        lses.append(lse)
    return _join_heads(jnp.concatenate(outputs, 3)), jnp.concatenate(lses, 3)


def backward(
    residuals: tuple[Any, ...],
    gradient_bsnh: jax.Array,
    *,
    parts: Sequence[Part],
    mask: Mask,
    scale: float,
    chunk: int,
    cap: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of queries, keys and values.

    Args:
      residuals: queries, keys, values, segments of both, output and log-sum-exp of `forward`.
      gradient_bsnh: gradient of the output.

    Returns:
      Gradients shaped as q, k and v; those of k and v in fp32.
    """
    q_bsnh, k_blkh, v_blkh, query_segments, key_segments, out_bsnh, lse_bkgs = residuals
    kv_heads = k_blkh.shape[2]
    q, do = _split_heads(q_bsnh, kv_heads), _split_heads(gradient_bsnh, kv_heads)
    k, v = k_blkh.swapaxes(1, 2), v_blkh.swapaxes(1, 2)
    product = gradient_bsnh.astype(jnp.float32) * out_bsnh.astype(jnp.float32)
    delta_bkgs = _split_heads(product.sum(-1, keepdims=True), kv_heads)[..., 0]
    dk, dv = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    dqs = []
    for section in sections_of(parts, k.shape[2], mask, chunk):
        keys = _keys_of(section, k, v, query_segments, key_segments, mask)

        def step(sums: Any, index: Any, keys: _Keys = keys) -> tuple[Any, tuple[jax.Array, ...]]:
            row, size = keys.section.row + index * keys.section.size, keys.section.size
            q_c, do_c = rows(q, row, size, 3), rows(do, row, size, 3)
            s, slope = _scores(q_c, keys.k_bklh, keys.seen(index), scale, cap)
            p = jnp.exp(s - rows(lse_bkgs, row, size, 3)[..., None])
            product = {"preferred_element_type": jnp.float32}
            dp = jnp.einsum("bkgch,bklh->bkgcl", do_c, keys.v_bklh, **product)
            ds = p * (dp - rows(delta_bkgs, row, size, 3)[..., None]) * scale
            ds = ds if slope is None else ds * slope
            p, ds = p.astype(q.dtype), ds.astype(q.dtype)
            dq = jnp.einsum("bkgcl,bklh->bkgch", ds, keys.k_bklh, **product).astype(q.dtype)
            dk_l = jnp.einsum("bkgcl,bkgch->bklh", ds, q_c, **product)
            dv_l = jnp.einsum("bkgcl,bkgch->bklh", p, do_c, **product)
            return (sums[0] + dk_l, sums[1] + dv_l), (dq,)

        place = (slice(None), slice(None), slice(section.first_key, section.end_key))
        (dk_l, dv_l), (dq,) = _over_chunks(section, (dk[place], dv[place]), step)
        dk, dv = dk.at[place].set(dk_l), dv.at[place].set(dv_l)
        dqs.append(dq)
    return _join_heads(jnp.concatenate(dqs, 3)), dk.swapaxes(1, 2), dv.swapaxes(1, 2)

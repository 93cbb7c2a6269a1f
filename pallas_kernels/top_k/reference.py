"""The k largest magnitudes in plain JAX: what the kernels must equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def key(x: jax.Array) -> jax.Array:
    """See `api.key`."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) & np.uint32(0x7FFFFFFF)


def threshold(x: jax.Array, k: int) -> jax.Array:
    """See `api.threshold`: the key's bits from the highest, each set where k keys still reach it."""
    keys = key(x)

    def bit(i: jax.Array, found: jax.Array) -> jax.Array:
        tried = found | (np.uint32(1 << 30) >> i.astype(jnp.uint32))
        return jnp.where((keys >= tried).sum() >= k, tried, found)

    # Zero in a form that varies over the mesh axes that x varies over, as shard_map wants of a carry.
    return jax.lax.fori_loop(0, 31, bit, keys[0] & np.uint32(0))


def select(x: jax.Array, residual: jax.Array | None, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.select`."""
    h = x.astype(jnp.float32)
    h = h if residual is None else h + residual
    keys, least = key(h), threshold(h, k)
    above, tie = keys > least, keys == least
    ties, wanted = _running(tie), k - above.sum()
    chosen = above | (tie & (ties <= wanted))
    sent = _running(above) + jnp.minimum(ties, wanted)
    # The place of the i-th that is sent is where their number reaches i.
    indices = jnp.searchsorted(sent, jnp.arange(1, k + 1, dtype=jnp.int32)).astype(jnp.int32)
    return h[indices], indices, jnp.where(chosen, 0.0, h)


def pack_mask(indices: jax.Array, n: int) -> jax.Array:
    """See `api.pack_mask`. The bits of a word are distinct, so that their sum is their union."""
    words = jnp.zeros(-(-n // 32), jnp.uint32)
    bits = np.uint32(1) << (indices & 31).astype(jnp.uint32)
    words = words.at[indices >> 5].add(bits, indices_are_sorted=True)
    return jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)[: -(-n // 8)]


def scatter_from_mask(values: jax.Array, bitmap: jax.Array, n: int) -> jax.Array:
    """See `api.scatter_from_mask`."""
    bits = ((bitmap[:, None] >> jnp.arange(8, dtype=jnp.uint8)) & 1).reshape(-1)[:n] == 1
    rank = _running(bits) - 1
    sent = bits & (rank < values.size)
    return jnp.where(sent, values[jnp.where(sent, rank, 0)], 0.0)


def _running(mask: jax.Array) -> jax.Array:
    """Inclusive prefix sums, int32, of a mask [n].

    Inside rows of 64 they are a product with a triangle, exact in float32 (in TF32 and bf16 too): on a CPU
    about twice as fast as one cumulative sum of all.
    """
    rows = jnp.pad(mask, (0, -mask.size % 64)).reshape(-1, 64).astype(jnp.float32)
    inside = (rows @ jnp.triu(jnp.ones((64, 64), jnp.float32))).astype(jnp.int32)
    ends = inside[:, -1]
    return (inside + (jnp.cumsum(ends) - ends)[:, None]).reshape(-1)[: mask.size]

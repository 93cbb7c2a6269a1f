"""The k largest magnitudes as Triton kernels.

Keys are below 2^31 and are compared as int32; -1 stands for what lies beyond an array's end. The threshold is
found four bits at a time: a pass counts, chunk by chunk, the keys above each of 15 candidates, and the
next pass looks between two of them. Chunks write their own counts, so that nothing is atomic and the result
does not depend on their order. From the counts a chunk knows where its chosen elements go.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import compat

GENERATIONS = range(80, 130)
_CHUNK = 4096
_PARAMS = plt.CompilerParams(num_warps=8, num_stages=1)
_chunk = pl.BlockSpec((_CHUNK,), lambda i: (i,))


def threshold(x: jax.Array, k: int, interpret: bool = False) -> jax.Array:
    """See `api.threshold`. Eight passes over x."""
    return _threshold(x, k, interpret).astype(jnp.uint32)


def select(
    x: jax.Array, residual: jax.Array | None, k: int, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.select`. Ten passes over x + residual, the last of which also writes the new residual."""
    h = x.astype(jnp.float32)
    h = h if residual is None else h + residual
    least = _threshold(h, k, interpret)
    counts = _count(h, jnp.stack([least, least - 1]), interpret)
    above, at_least = counts[:, 0], counts[:, 1]
    ties = at_least - above
    before = jnp.stack([jnp.cumsum(above) - above, jnp.cumsum(ties) - ties], axis=1)
    limits = jnp.stack([least, k - above.sum()])
    whole = pl.BlockSpec((k,), lambda i: (0,))
    outputs = ((k,), jnp.float32), ((k,), jnp.int32), (h.shape, jnp.float32)
    values, indices, left = pl.pallas_call(
        partial(_select, n=h.size, k=k),
        grid=(len(counts),),
        in_specs=[_chunk, pl.BlockSpec((1, 2), lambda i: (i, 0)), pl.BlockSpec((2,), lambda i: (0,))],
        out_specs=[whole, whole, _chunk],
        out_shape=[compat.shape_like(shape, dtype, h) for shape, dtype in outputs],
        # A sum of two arrays is nobody else's: what is left of it may take its place.
        input_output_aliases={} if residual is None else {0: 2},
        compiler_params=_PARAMS,
        interpret=interpret,
        name="top_k_select",
    )(h, before, limits)
    return values, indices, left


def scatter_from_mask(values: jax.Array, bitmap: jax.Array, n: int, interpret: bool = False) -> jax.Array:
    """See `api.scatter_from_mask`. One pass over what is written."""
    chunks = pl.cdiv(n, _CHUNK)
    ones = jax.lax.population_count(bitmap).astype(jnp.int32)
    ones = jnp.pad(ones, (0, chunks * _CHUNK // 8 - ones.size)).reshape(chunks, -1).sum(1)
    return pl.pallas_call(
        partial(_scatter, n=n),
        grid=(chunks,),
        in_specs=[
            pl.BlockSpec(values.shape, lambda i: (0,)),
            pl.BlockSpec((_CHUNK // 8,), lambda i: (i,)),
            pl.BlockSpec((1,), lambda i: (i,)),
        ],
        out_specs=_chunk,
        out_shape=compat.shape_like((n,), jnp.float32, values, bitmap),
        compiler_params=_PARAMS,
        interpret=interpret,
        name="top_k_scatter",
    )(values, bitmap, jnp.cumsum(ones) - ones)


def _threshold(x: jax.Array, k: int, interpret: bool) -> jax.Array:
    def refine(least: jax.Array, shift: Any, candidates: int) -> jax.Array:
        tried = least + (jnp.arange(1, candidates + 1, dtype=jnp.int32) << shift)
        reach = _count(x, tried - 1, interpret).sum(0)
        return least + ((reach >= k).sum(dtype=jnp.int32) << shift)

    # Zero in a form that varies over the mesh axes that x varies over, as shard_map wants of a carry.
    zero = jax.lax.bitcast_convert_type(x[0].astype(jnp.float32), jnp.int32) & 0
    # The 31 bits of a key from the highest, seven times four, then three.
    least = jax.lax.fori_loop(0, 7, lambda i, least: refine(least, 27 - 4 * i, 15), zero)
    return refine(least, 0, 7)


def _count(x: jax.Array, bounds: jax.Array, interpret: bool) -> jax.Array:
    """How many keys of each chunk are above each bound, [chunks, bounds] int32."""
    chunks = pl.cdiv(x.size, _CHUNK)
    return pl.pallas_call(
        partial(_count_kernel, n=x.size),
        grid=(chunks,),
        in_specs=[_chunk, pl.BlockSpec(bounds.shape, lambda i: (0,))],
        out_specs=pl.BlockSpec((1, bounds.size), lambda i: (i, 0)),
        out_shape=compat.shape_like((chunks, bounds.size), jnp.int32, x, bounds),
        compiler_params=_PARAMS,
        interpret=interpret,
        name=f"top_k_count_{bounds.size}",
    )(x, bounds)


def _here(n: int) -> tuple[jax.Array, jax.Array]:
    """Numbers of this program's elements, [chunk], and which exist."""
    index = pl.program_id(0) * _CHUNK + jnp.arange(_CHUNK, dtype=jnp.int32)
    return index, index < n


def _keys(h: jax.Array, here: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(h.astype(jnp.float32), jnp.int32)
    return jnp.where(here, bits & 0x7FFFFFFF, -1)


def _count_kernel(x_ref: Any, bounds_ref: Any, out_ref: Any, *, n: int) -> None:
    _, here = _here(n)
    keys = _keys(plt.load(x_ref.at[...], mask=here, other=0), here)
    for j in range(bounds_ref.shape[0]):
        out_ref[0, j] = (keys > bounds_ref[j]).astype(jnp.int32).sum()


def _select(
    h_ref: Any,
    before_ref: Any,
    limits_ref: Any,
    values_ref: Any,
    indices_ref: Any,
    left_ref: Any,
    *,
    n: int,
    k: int,
) -> None:
    index, here = _here(n)
    h = plt.load(h_ref.at[...], mask=here, other=0)
    keys, least, wanted = _keys(h, here), limits_ref[0], limits_ref[1]
    above, tie = (keys > least).astype(jnp.int32), (keys == least).astype(jnp.int32)
    # One prefix sum for both: a chunk has fewer than 2^15 elements.
    both = above + (tie << 16)
    earlier = jnp.cumsum(both) - both
    above_earlier = before_ref[0, 0] + (earlier & 0xFFFF)
    ties_earlier = before_ref[0, 1] + (earlier >> 16)
    chosen = (above == 1) | ((tie == 1) & (ties_earlier < wanted))
    place = jnp.where(chosen, above_earlier + jnp.minimum(ties_earlier, wanted), k)
    plt.store(values_ref.at[place], h, mask=chosen)
    plt.store(indices_ref.at[place], index, mask=chosen)
    plt.store(left_ref.at[...], jnp.where(chosen, 0.0, h), mask=here)


def _scatter(values_ref: Any, bitmap_ref: Any, before_ref: Any, out_ref: Any, *, n: int) -> None:
    _, here = _here(n)
    local = jnp.arange(_CHUNK, dtype=jnp.int32)
    byte = plt.load(bitmap_ref.at[local >> 3], mask=here, other=0).astype(jnp.int32)
    bit = (byte >> (local & 7)) & 1
    rank = before_ref[0] + jnp.cumsum(bit) - bit
    sent = (bit == 1) & (rank < values_ref.shape[0])
    value = plt.load(values_ref.at[jnp.where(sent, rank, 0)], mask=sent, other=0)
    plt.store(out_ref.at[...], value, mask=here)

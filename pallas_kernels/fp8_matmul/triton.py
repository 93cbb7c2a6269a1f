"""The product of E4M3 operands scaled by blocks for GPUs from Ada on (Triton): a block computes 128 by 128 results.

Legend: m rows, n columns, k contraction.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import compat
from pallas_kernels.matmul.scaling import TILE
from pallas_kernels.matmul.triton import FP8_GENERATIONS, place

GENERATIONS = FP8_GENERATIONS
TILE_M = 128
MULTIPLES = TILE_M, TILE, TILE
"""What m, n and k have to be multiples of."""


def product(
    a: jax.Array,
    a_scales: jax.Array,
    b: jax.Array,
    b_scales: jax.Array,
    out_dtype: Any,
    interpret: bool = False,
) -> jax.Array:
    """As `reference.product`; m, n and k are multiples of MULTIPLES."""
    (m, k), n = a.shape, len(b)
    tiles = m // TILE_M, n // TILE

    def at(shape: tuple[int, ...], index: Any) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda block: index(*place(block, *tiles)))

    # Transposed scales: those that a block needs at a step lie together.
    inputs = a, a_scales.T, b, b_scales
    return pl.pallas_call(
        _kernel,
        grid=(tiles[0] * tiles[1],),
        in_specs=[
            at((TILE_M, k), lambda i, j: (i, 0)),
            at((k // TILE, TILE_M), lambda i, j: (0, i)),
            at((TILE, k), lambda i, j: (j, 0)),
            at((1, k // TILE), lambda i, j: (j, 0)),
        ],
        out_specs=at((TILE_M, TILE), lambda i, j: (i, j)),
        out_shape=compat.shape_like((m, n), out_dtype, *inputs),
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
        name="fp8_matmul",
    )(*inputs)


def _kernel(a_ref: Any, a_scales_ref: Any, b_ref: Any, b_scales_ref: Any, out_ref: Any) -> None:
    def step(s: Any, total: jax.Array) -> jax.Array:
        part = pl.ds(s * TILE, TILE)
        one = plt.dot(a_ref[:, part], b_ref[:, part], trans_b=True)
        return total + one * (a_scales_ref[s, :] * b_scales_ref[0, s])[:, None]

    start = jnp.zeros(out_ref.shape, jnp.float32)
    total = lax.fori_loop(0, a_ref.shape[1] // TILE, step, start)
    out_ref[...] = total.astype(out_ref.dtype)

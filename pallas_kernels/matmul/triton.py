"""The product with its epilogue for GPUs from Ampere on (Triton).

A block computes 128 by 128 results, or gated 64 by 128.

Legend: m rows, n columns, k contraction.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import compat
from pallas_kernels.matmul.epilogue import Epilogue
from pallas_kernels.matmul.scaling import TILE

GENERATIONS = range(80, 130)
FP8_GENERATIONS = range(89, 130)  # before Ada, Triton's conversion to E4M3 ends the process
TILE_M, TILE_N = 128, TILE
TILE_K = 32  # four steps of tiles fit 99 KiB of shared memory, two weights included
MULTIPLES = TILE_M, TILE_N, TILE_K
"""What m, n and k have to be multiples of."""
_SNAKE = 8  # rows of tiles whose blocks run side by side, for the second-level cache


def place(block: Any, rows: int, columns: int) -> tuple[Any, Any]:
    """Row and column of a block among so many tiles: bands of a few rows, a band column by column."""
    band, inside = block // (_SNAKE * columns), block % (_SNAKE * columns)
    first = band * _SNAKE
    height = jnp.minimum(_SNAKE, rows - first)
    return first + inside % height, inside // height


def product(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    bias: jax.Array | None,
    residual: jax.Array | None,
    scale: jax.Array | None,
    epilogue: Epilogue,
    interpret: bool = False,
) -> dict[str, Any]:
    """As `reference.product`; m, n and k are multiples of `multiples`."""
    (m, k), n = x.shape, weights[0].shape[1]
    # Two sums of 128 rows would not fit the registers beside what mma takes.
    tile_m = TILE_M // epilogue.weights
    tiles = m // tile_m, n // TILE_N

    def at(shape: tuple[int, ...], index: Any) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda block: index(*place(block, *tiles)))

    whole = at((tile_m, TILE_N), lambda i, j: (i, j))
    inputs = {"x": x, "weights": list(weights), "bias": bias, "residual": residual, "scale": scale}
    specs = {
        "x": at((tile_m, k), lambda i, j: (i, 0)),
        "weights": [at((k, TILE_N), lambda i, j: (0, j))] * len(weights),
        "bias": None if bias is None else at((TILE_N,), lambda i, j: (j,)),
        "residual": None if residual is None else whole,
        "scale": None if scale is None else at((1,), lambda i, j: (0,)),
    }
    shape = partial(_shape, jax.tree.leaves(inputs))
    saved = epilogue.weights if epilogue.save else 0
    by_tile = epilogue.quantise == "tile"
    outputs = {
        "y": shape((m, n), jnp.float8_e4m3fn if epilogue.quantise else epilogue.dtype),
        # Transposed: a tile's scales lie together.
        "scales": shape((n // TILE_N, m), jnp.float32) if by_tile else None,
        "z": [shape((m, n), x.dtype)] * saved,
    }
    out_specs = {
        "y": whole,
        "scales": at((1, tile_m), lambda i, j: (j, i)) if by_tile else None,
        "z": [whole] * saved,
    }

    def kernel(ins: dict[str, Any], outs: dict[str, Any]) -> None:
        _kernel(ins, outs, epilogue)

    out = pl.pallas_call(
        kernel,
        grid=(tiles[0] * tiles[1],),
        in_specs=[specs],
        out_specs=out_specs,
        out_shape=outputs,
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=4),
        interpret=interpret,
        name="matmul",
    )(inputs)
    if by_tile:
        out["scales"] = out["scales"].T
    return out


def _shape(inputs: list[jax.Array], shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return compat.shape_like(shape, dtype, *inputs)


def _kernel(ins: dict[str, Any], outs: dict[str, Any], epilogue: Epilogue) -> None:
    def step(s: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        part = pl.ds(s * TILE_K, TILE_K)
        x = ins["x"][:, part]
        # "highest" keeps fp32 operands whole; bf16 ones have one way only.
        return tuple(
            total + plt.dot(x, w[part, :], precision=lax.Precision.HIGHEST)
            for total, w in zip(sums, ins["weights"], strict=True)
        )

    zeros = jnp.zeros(outs["y"].shape, jnp.float32)
    sums = lax.fori_loop(0, ins["x"].shape[1] // TILE_K, step, (zeros,) * epilogue.weights)
    bias = None
    if ins["bias"] is not None:
        bias = ins["bias"][...].astype(jnp.float32)[None]
    y, z = epilogue.combine(list(sums), bias)
    for out, part in zip(outs["z"], z, strict=False):
        out[...] = part.astype(out.dtype)
    if ins["residual"] is not None:
        y = y + ins["residual"][...].astype(jnp.float32)
    if epilogue.quantise:
        y, scales = epilogue.encode(y, None if ins["scale"] is None else ins["scale"][0])
        if scales is not None:
            outs["scales"][0, :] = scales
    outs["y"][...] = y.astype(outs["y"].dtype)

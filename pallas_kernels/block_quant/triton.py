"""Quantisation by blocks as Triton kernels.

A program takes `tile` blocks. The parts of a block that share bytes (see `formats.Format.parts`) are read as
separate arrays, since Triton does not slice what is in registers; an array's last program masks the blocks
that are not there. What is read is read once and what is written is written once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import compat
from pallas_kernels.block_quant import formats
from pallas_kernels.block_quant.formats import Format

GENERATIONS = range(80, 130)
_THREADS = 128
_PARAMS = plt.CompilerParams(num_warps=_THREADS // 32, num_stages=1)


def encode(
    x: jax.Array,
    residual: jax.Array | None,
    seed: jax.Array | None,
    fmt: Format,
    block: int,
    beta: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """See `api.encode`. The new residual takes the old one's memory."""
    blocks, tile = x.size // block, _tile(fmt, block)
    row, one = pl.BlockSpec((tile, block), lambda i: (i, 0)), pl.BlockSpec((1,), lambda i: (0,))
    inputs, in_specs = [x.reshape(blocks, block)], [row]
    shapes = [((blocks, fmt.code_bytes(block)), jnp.uint8), ((blocks,), jnp.bfloat16)]
    out_specs = [
        pl.BlockSpec((tile, fmt.code_bytes(block)), lambda i: (i, 0)),
        pl.BlockSpec((tile,), lambda i: (i,)),
    ]
    if residual is not None:
        inputs.append(residual.reshape(blocks, block))
        in_specs.append(row)
        shapes.append(((blocks, block), jnp.float32))
        out_specs.append(row)
    if seed is not None:
        inputs.append(seed.reshape(1))
        in_specs.append(one)
    out = pl.pallas_call(
        partial(
            _encode, fmt=fmt, blocks=blocks, beta=beta, divide=formats.divide if interpret else _divide,
            feedback=residual is not None, draws=seed is not None,
        ),
        grid=(pl.cdiv(blocks, tile),),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=[compat.shape_like(shape, dtype, *inputs) for shape, dtype in shapes],
        input_output_aliases={} if residual is None else {1: 2},
        compiler_params=_PARAMS,
        interpret=interpret,
        name=f"block_quant_encode_{fmt.name}",
    )(*inputs)  # fmt: skip
    lead = (*x.shape[:-1], x.shape[-1] // block)
    codes, scales = out[0].reshape(*lead, -1), out[1].reshape(lead)
    return codes, scales, None if residual is None else out[2].reshape(x.shape)


def decode_sum(
    codes: jax.Array, scales: jax.Array, fmt: Format, block: int, interpret: bool = False
) -> jax.Array:
    """See `api.decode_sum`."""
    shards, *lead, width = codes.shape
    blocks, tile = scales[0].size, _tile(fmt, block)
    inputs = [codes.reshape(shards, blocks, width), scales.reshape(shards, blocks)]
    out = pl.pallas_call(
        partial(_decode_sum, fmt=fmt, blocks=blocks),
        grid=(pl.cdiv(blocks, tile),),
        in_specs=[
            pl.BlockSpec((shards, tile, width), lambda i: (0, i, 0)),
            pl.BlockSpec((shards, tile), lambda i: (0, i)),
        ],
        out_specs=pl.BlockSpec((tile, block), lambda i: (i, 0)),
        out_shape=compat.shape_like((blocks, block), jnp.float32, *inputs),
        compiler_params=_PARAMS,
        interpret=interpret,
        name=f"block_quant_decode_{fmt.name}",
    )(*inputs)
    return out.reshape(*lead[:-1], lead[-1] * block)


def _tile(fmt: Format, block: int) -> int:
    """Blocks of a program: 16 elements a thread, and 4 at least of each part, to be read at once."""
    return max(1, _THREADS * max(16, 4 * fmt.parts) // block)


def _divide(x: jax.Array, y: jax.Array) -> jax.Array:
    """Correctly rounded quotient: Triton's own division may be 2 units in the last place off."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    [out] = plt.elementwise_inline_asm(
        "div.rn.f32 $0, $1, $2;",
        args=[x, jnp.broadcast_to(y, x.shape)],
        constraints="=r,r,r",
        pack=1,
        result_shape_dtypes=[shape],
    )
    return out


def _here(blocks: int, tile: int, width: int) -> tuple[jax.Array, jax.Array]:
    """Numbers of this program's blocks, [tile], and which exist, [tile, width]."""
    row = pl.program_id(0) * tile + jnp.arange(tile, dtype=jnp.int32)
    return row, jnp.broadcast_to((row < blocks)[:, None], (tile, width))


def _encode(
    x_ref: Any,
    *refs: Any,
    fmt: Format,
    blocks: int,
    beta: float,
    divide: Callable,
    feedback: bool,
    draws: bool,
) -> None:
    rest = list(refs)
    e_ref: Any = rest.pop(0) if feedback else None
    seed_ref: Any = rest.pop(0) if draws else None
    codes_ref, scales_ref, *new_ref = rest
    tile, block = x_ref.shape
    width = block // fmt.parts
    row, here = _here(blocks, tile, width)
    parts = [(slice(None), pl.ds(j * width, width)) for j in range(fmt.parts)]
    read = partial(plt.load, mask=here, other=0)
    h = [read(x_ref.at[at]).astype(jnp.float32) for at in parts]
    e = [read(e_ref.at[at]) for at in parts] if feedback else []
    h = [a + b for a, b in zip(h, e, strict=True)] if feedback else h

    largest = formats.magnitude_bits(h[0])
    for part in h[1:]:
        largest = jnp.maximum(largest, formats.magnitude_bits(part))
    scales = formats.scale_of(largest.max(axis=1), fmt, divide)
    plt.store(scales_ref.at[...], scales.astype(jnp.bfloat16), mask=row < blocks)
    scale = jnp.broadcast_to(scales[:, None], (tile, width))

    codes = []
    for j, part in enumerate(h):
        q = jnp.where(scale == jnp.inf, 0.0, divide(part, scale))
        draw = None
        if draws:
            column = jnp.arange(width, dtype=jnp.int32) + j * width
            index = row[:, None] * block + column[None, :]
            draw = formats.uniform(seed_ref[0], index.astype(jnp.uint32))
        codes.append(formats.to_codes(q, fmt, draw))
    for j, byte in enumerate(formats.to_bytes(codes, fmt)):
        plt.store(codes_ref.at[:, pl.ds(j * width, width)], byte.astype(jnp.uint8), mask=here)
    for j, at in enumerate(parts if feedback else []):
        error = h[j] - formats.from_codes(codes[j], fmt) * scale
        error = beta * e[j] + (1 - beta) * error if beta else error
        plt.store(new_ref[0].at[at], error, mask=here)


def _decode_sum(codes_ref: Any, scales_ref: Any, out_ref: Any, *, fmt: Format, blocks: int) -> None:
    shards, tile, _ = codes_ref.shape
    width = out_ref.shape[1] // fmt.parts
    row, here = _here(blocks, tile, width)

    def shard(s: Any) -> list[jax.Array]:
        at = [(s, slice(None), pl.ds(j * width, width)) for j in range(max(fmt.parts - 1, 1))]
        packed = [plt.load(codes_ref.at[a], mask=here, other=0).astype(jnp.int32) for a in at]
        scale = plt.load(scales_ref.at[s, :], mask=row < blocks, other=0).astype(jnp.float32)[:, None]
        return [formats.from_codes(part, fmt) * scale for part in formats.from_bytes(packed, fmt)]

    def add(s: Any, total: list[jax.Array]) -> list[jax.Array]:
        return [a + b for a, b in zip(total, shard(s), strict=True)]

    for j, part in enumerate(jax.lax.fori_loop(1, shards, add, shard(jnp.int32(0)))):
        plt.store(out_ref.at[:, pl.ds(j * width, width)], part, mask=here)

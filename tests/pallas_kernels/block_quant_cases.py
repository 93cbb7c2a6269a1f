"""Quantisation by blocks for the tests of kernels."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from cases import Case, Compiled, bit_equal

from pallas_kernels import block_quant

BLOCKS = 37  # of 128: more than one program's, and not a multiple
TINY = float(np.finfo(np.float32).tiny)


def values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """f32 of magnitudes from 2^-20 to 2^20, one to a block."""
    draw = np.random.default_rng(seed)
    blocks = draw.normal(size=(*shape[:-1], shape[-1] // 16, 16)) * 2.0 ** draw.integers(
        -20, 20, (*shape[:-1], shape[-1] // 16, 1)
    )
    return blocks.reshape(shape).astype(np.float32)


def odd_values() -> np.ndarray:
    """Blocks of 128, each odd in its own way."""
    x = values((12, 128))
    x[0] = 0
    x[1, 5] = np.inf
    x[2, 7] = -np.inf
    x[3, 64] = np.nan
    x[4] = np.float32(3.4028235e38) * np.where(np.arange(128) % 2, 1, -1)
    x[5] = TINY * np.arange(-64, 64) / 128  # subnormal numbers
    x[6] = TINY * np.arange(128)  # the scale is normal in some formats, subnormal in others
    x[7] = np.arange(128) - 63.5  # ties
    x[8] = (np.arange(128) - 64) / 8  # what a scale of 1 and e2m4's largest value leave as it is
    x[8, 0] = 7.75
    x[9] = 0
    x[9, 100] = -1e-30
    x[10] = np.float32(2.0**-133)
    x[11] = np.where(np.arange(128) % 2, -0.0, 1.0)
    return x.reshape(-1)


def inputs(shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(values(shape), dtype), jnp.asarray(values(shape, 1) / 8)


def shards(format: str, block: int, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Random bytes, so that every code is met, and scales."""
    draw = np.random.default_rng(2)
    codes = draw.integers(0, 256, (*shape, block_quant.code_bytes(format, block)), np.uint8)
    return jnp.asarray(codes), jnp.asarray(2.0 ** draw.integers(-20, 20, shape), jnp.bfloat16)


def one_rounding(got: tuple, want: tuple) -> None:
    """Codes and scales bit for bit; with beta the residual has a product that a compiler may contract with
    the sum after it, which rounds once less."""
    bit_equal(got[:2], want[:2])
    a, b = np.asarray(got[2]), np.asarray(want[2])
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    # Terms may cancel: one rounding of the larger term, not of the sum.
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.nanmax(np.abs(b)), equal_nan=True)


def _conformance(format: str) -> list[Case]:
    encode = partial(block_quant.encode, format=format)
    lone = lambda x: block_quant.encode(x, format=format)[:2]  # noqa: E731
    name = f"{format}-encode"
    row = (BLOCKS * 128,)
    cases = [
        Case(
            f"{name}-odd-values", encode, lambda: (jnp.asarray(odd_values()), jnp.zeros(odd_values().shape))
        ),
        Case(f"{name}-odd-values-alone", lone, lambda: (jnp.asarray(odd_values()),)),
        Case(f"{name}-many", encode, lambda: inputs(row)),
        Case(f"{name}-bf16", encode, lambda: inputs(row, jnp.bfloat16)),
        Case(f"{name}-3d", encode, lambda: inputs((3, 5, 256))),
        Case(f"{name}-one-block", encode, lambda: inputs((128,))),
        Case(f"{name}-block-32", partial(encode, block=32), lambda: inputs((5, 96))),
        Case(f"{name}-beta", partial(encode, beta=0.8), lambda: inputs(row), one_rounding),
        Case(f"{name}-vmap", jax.vmap(encode), lambda: inputs((3, 256))),
    ]
    if format.startswith("int"):
        drawn = lambda x, e, seed: encode(x, e, seed=seed)  # noqa: E731
        cases.append(Case(f"{name}-stochastic", drawn, lambda: (*inputs((3, 640)), jnp.uint32(77))))
    decode, total = (partial(f, format=format) for f in (block_quant.decode, block_quant.decode_sum))
    cases += [
        Case(f"{format}-decode", decode, lambda: shards(format, 128, (BLOCKS,))),
        Case(f"{format}-decode-block-32", partial(decode, block=32), lambda: shards(format, 32, (2, 3))),
        Case(f"{format}-decode-sum", total, lambda: shards(format, 128, (5, 3, BLOCKS))),
        Case(f"{format}-decode-sum-of-one", total, lambda: shards(format, 128, (1, BLOCKS))),
    ]
    return cases


def _compiled(format: str) -> list[Compiled]:
    n, blocks, width = 1001 * 128, 1001, block_quant.code_bytes(format, 128)
    f32, bf16, u8 = jnp.float32, jnp.bfloat16, jnp.uint8
    encode = partial(block_quant.encode, format=format)
    total = partial(block_quant.decode_sum, format=format)
    packed = (((blocks, width), u8), ((blocks,), bf16))
    return [
        Compiled(f"{format}-encode", encode, (((n,), f32), ((n,), f32)), donated=(1,)),
        Compiled(f"{format}-encode-bf16", encode, (((n,), bf16), ((n,), f32)), donated=(1,)),
        Compiled(f"{format}-encode-alone", lambda x: encode(x)[:2], (((n,), f32),)),
        Compiled(f"{format}-encode-beta", partial(encode, beta=0.8), (((n,), f32),) * 2, donated=(1,)),
        Compiled(f"{format}-decode", partial(block_quant.decode, format=format), packed),
        Compiled(f"{format}-decode-sum", total, (((8, blocks, width), u8), ((8, blocks), bf16))),
        *(
            Compiled(
                f"{kind}-encode-stochastic",
                lambda x, e, seed: encode(x, e, seed=seed),
                (((n,), f32), ((n,), f32), ((), jnp.uint32)),
                donated=(1,),
            )
            for kind in ("int8", "int4")
            if kind == format
        ),
    ]


CONFORMANCE = [case for format in block_quant.FORMATS for case in _conformance(format)]
COMPILED = [case for format in block_quant.FORMATS for case in _compiled(format)]

"""Quantisation by blocks on whatever is here: the Triton kernel on GPUs, plain JAX elsewhere.

Shapes: n values of a row are n / block blocks; a block has one bf16 scale and `code_bytes` bytes of codes.
  int4: byte i is code i in its low half (two's complement), code i + block/2 in its high half.
  e2m4: the codes of elements j*block/8 + i, j < 8, share bytes: byte [j, i], j < 7, is the 7-bit code j
  with bit j of code 7 on top.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import hardware
from pallas_kernels.block_quant import formats, reference, triton

FORMATS = tuple(formats.FORMATS)
KERNELS = {"triton": triton.GENERATIONS}
# Before Ada no GPU converts to E4M3 itself, and the compiler gives up on the whole program.
_FP8_KERNELS = {"triton": range(89, triton.GENERATIONS.stop)}


def _kernels(format: str) -> dict[str, range]:
    return _FP8_KERNELS if format == "fp8" else KERNELS


def code_bytes(format: str, block: int) -> int:
    """Bytes of a block's codes: 128, 64, 112 and 128 for a block of 128 in int8, int4, e2m4 and fp8.

    Raises:
      ValueError: no such format, or a block that is not a power of two from 16 to 4096.
    """
    return _format(format, block).code_bytes(block)


def encode(
    x: jax.Array,
    residual: jax.Array | None = None,
    *,
    format: str,
    block: int = 128,
    beta: float = 0.0,
    seed: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Quantises h = x + residual by blocks, and keeps what was lost.

    A block's scale is its largest magnitude / top (int8 127, int4 7, e2m4 7.75, fp8 448) rounded to bf16, 1
    where that is zero or subnormal; values are divided by the rounded scale and saturate. A block with a
    value that is not finite has an infinite scale and codes 0: it decodes to NaN.

    Args:
      x: [..., n] f32 or bf16.
      residual: [..., n] f32, what earlier steps lost.
      beta: how much of the old residual stays, in [0, 1).
      seed: uint32 scalar array; int8 and int4 then round stochastically, floor(q + u), u in [0, 1) a hash of
        the seed and the element's number, instead of floor(q + 1/2). Under vmap elements are numbered anew
        for each mapped entry: give each its own seed.

    Returns:
      codes [..., n/block, code_bytes] u8; scales [..., n/block] bf16; the new residual [..., n] f32,
      beta * residual + (1 - beta) * (h - decode(codes, scales)), None where residual is None.

    Raises:
      ValueError: n is no multiple of block, shapes differ, or format, block, beta or seed is not as above.
    """
    fmt = _format(format, block)
    if x.ndim < 1 or x.shape[-1] % block:
        raise ValueError(f"encode: expected x [..., n], n a multiple of block={block}; got {x.shape}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"encode: expected a residual like x, {x.shape}; got {residual.shape}")
    if not 0 <= beta < 1:
        raise ValueError(f"encode: expected beta in [0, 1); got {beta}")
    if seed is not None and fmt.mantissa is not None:
        raise ValueError(f"encode: {format} rounds to nearest and takes no seed; int8 and int4 do")
    if residual is not None:
        residual = residual.astype(jnp.float32)
    if seed is not None:
        seed = jnp.asarray(seed, jnp.uint32)
    chosen = hardware.choose(_kernels(format))
    if chosen == "reference" or not x.size:
        return reference.encode(x, residual, seed, fmt, block, beta)
    return triton.encode(x, residual, seed, fmt, block, beta, interpret=chosen == "interpret")


def decode(codes: jax.Array, scales: jax.Array, *, format: str, block: int = 128) -> jax.Array:
    """Values of packed blocks.

    Args:
      codes: [..., blocks, code_bytes] u8.
      scales: [..., blocks] bf16.

    Returns:
      [..., blocks * block] f32.

    Raises:
      ValueError: shapes do not fit each other, the format or the block.
    """
    fmt = _packed("decode", codes, scales, format, block)
    chosen = hardware.choose(_kernels(format))
    if chosen == "reference" or not codes.size:
        return reference.decode(codes, scales, fmt)
    return triton.decode_sum(codes[None], scales[None], fmt, block, interpret=chosen == "interpret")


def decode_sum(codes: jax.Array, scales: jax.Array, *, format: str, block: int = 128) -> jax.Array:
    """Sum of several packed arrays, in their order and in float32; each is read once.

    Args:
      codes: [shards, ..., blocks, code_bytes] u8.
      scales: [shards, ..., blocks] bf16.

    Returns:
      [..., blocks * block] f32.

    Raises:
      ValueError: as `decode`, or no shards.
    """
    fmt = _packed("decode_sum", codes, scales, format, block)
    if codes.ndim < 3 or not codes.shape[0]:
        raise ValueError(f"decode_sum: expected codes [shards, ..., blocks, code_bytes]; got {codes.shape}")
    chosen = hardware.choose(_kernels(format))
    if chosen == "reference" or not codes.size:
        return reference.decode_sum(codes, scales, fmt)
    return triton.decode_sum(codes, scales, fmt, block, interpret=chosen == "interpret")


def _format(format: str, block: int) -> formats.Format:
    if format not in formats.FORMATS:
        raise ValueError(f"block_quant: expected a format of {', '.join(FORMATS)}; got {format!r}")
    if not 16 <= block <= 4096 or block & (block - 1):
        raise ValueError(f"block_quant: expected a block of a power of two from 16 to 4096; got {block}")
    return formats.FORMATS[format]


def _packed(what: str, codes: jax.Array, scales: jax.Array, format: str, block: int) -> formats.Format:
    fmt = _format(format, block)
    if codes.ndim < 2 or codes.shape[-1] != fmt.code_bytes(block) or codes.shape[:-1] != scales.shape:
        raise ValueError(
            f"{what}: expected codes [..., blocks, {fmt.code_bytes(block)}] and scales [..., blocks] "
            f"for {format} in blocks of {block}; got {codes.shape} and {scales.shape}"
        )
    return fmt

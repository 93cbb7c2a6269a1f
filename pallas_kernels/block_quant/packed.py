"""Codes and scales of blocks in one buffer of bytes, so that an exchange is one collective.

A row of n values, padded with zeros to whole blocks, is `nb * code_bytes` bytes of codes, then `nb` bf16 scales as
bytes; see `api`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.block_quant import api


def packed_bytes(n: int, format: str, block: int = 128) -> int:
    """Bytes of a packed row of n values; in blocks of 128, int4 0.52 a value, e2m4 0.89, int8 and fp8 1.02.

    Raises:
      ValueError: no such format or block.
    """
    return -(-n // block) * (api.code_bytes(format, block) + 2)


def pack(
    x: jax.Array,
    residual: jax.Array | None = None,
    *,
    format: str,
    block: int = 128,
    beta: float = 0.0,
    seed: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Quantises rows by blocks into bytes, with error feedback where a residual is given.

    Args:
      x: [..., n], any n. residual: [..., n] fp32 or None. format, block, beta, seed: as in `encode`.

    Returns:
      [..., packed_bytes(n, format, block)] uint8; the new residual [..., n] fp32 or None.

    Raises:
      ValueError: as `encode`.
    """
    n = x.shape[-1]
    whole = _whole(x, block), None if residual is None else _whole(residual, block)
    codes, scales, left = api.encode(*whole, format=format, block=block, beta=beta, seed=seed)
    lead = codes.shape[:-2]
    codes = codes.reshape(*lead, codes.shape[-2] * codes.shape[-1])
    tail = lax.bitcast_convert_type(scales, jnp.uint8).reshape(*lead, 2 * scales.shape[-1])
    return jnp.concatenate([codes, tail], axis=-1), None if left is None else left[..., :n]


def unpack(packed: jax.Array, n: int, *, format: str, block: int = 128) -> jax.Array:
    """Values [..., n] fp32 of what `pack` gave.

    Raises:
      ValueError: not as many bytes as n values take.
    """
    return api.decode(*_parts(packed, n, format, block), format=format, block=block)[..., :n]


def unpack_sum(packed: jax.Array, n: int, *, format: str, block: int = 128) -> jax.Array:
    """Sum over the first dimension of what `pack` gave, [shards, ..., bytes] -> [..., n], in order and in fp32.

    Raises:
      ValueError: as `unpack`.
    """
    return api.decode_sum(*_parts(packed, n, format, block), format=format, block=block)[..., :n]


def _whole(x: jax.Array, block: int) -> jax.Array:
    more = -x.shape[-1] % block
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, more)]) if more else x


def _parts(packed: jax.Array, n: int, format: str, block: int) -> tuple[jax.Array, jax.Array]:
    """Codes [..., blocks, code_bytes] and scales [..., blocks]."""
    lead, got = packed.shape[:-1], packed.shape[-1]
    if got != packed_bytes(n, format, block):
        raise ValueError(
            f"unpack: {n} values take {packed_bytes(n, format, block)} bytes in {format} by blocks of {block}; "
            f"got {got}"
        )
    blocks = -(-n // block)
    codes, tail = packed[..., : got - 2 * blocks], packed[..., got - 2 * blocks :]
    scales = lax.bitcast_convert_type(tail.reshape(*lead, blocks, 2), jnp.bfloat16)
    return codes.reshape(*lead, blocks, api.code_bytes(format, block)), scales

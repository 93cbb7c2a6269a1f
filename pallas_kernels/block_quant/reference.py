"""Quantisation by blocks in plain JAX: what the kernels must equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.block_quant import formats
from pallas_kernels.block_quant.formats import Format


def encode(
    x: jax.Array, residual: jax.Array | None, seed: jax.Array | None, fmt: Format, block: int, beta: float
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """See `api.encode`."""
    h = x.astype(jnp.float32)
    h = h if residual is None else h + residual
    blocks = h.reshape(*h.shape[:-1], h.shape[-1] // block, block)
    largest = formats.magnitude_bits(blocks).max(-1)
    scales = formats.scale_of(largest, fmt, formats.divide)
    scale = scales[..., None]
    q = jnp.where(scale == jnp.inf, 0.0, formats.divide(blocks, scale))
    draw = None
    if seed is not None:
        draw = formats.uniform(seed, jnp.arange(h.size, dtype=jnp.uint32).reshape(q.shape))
    codes = formats.to_codes(q, fmt, draw)
    scales = scales.astype(jnp.bfloat16)
    packed = jnp.concatenate(formats.to_bytes(jnp.split(codes, fmt.parts, -1), fmt), -1).astype(jnp.uint8)
    if residual is None:
        return packed, scales, None
    error = h - decode(packed, scales, fmt)
    if beta:
        error = beta * residual + (1 - beta) * error
    return packed, scales, error


def decode(codes: jax.Array, scales: jax.Array, fmt: Format) -> jax.Array:
    """See `api.decode`."""
    packed = jnp.split(codes.astype(jnp.int32), max(fmt.parts - 1, 1), -1)
    values = formats.from_codes(jnp.concatenate(formats.from_bytes(packed, fmt), -1), fmt)
    values = values * scales.astype(jnp.float32)[..., None]
    return values.reshape(*values.shape[:-2], -1)


def decode_sum(codes: jax.Array, scales: jax.Array, fmt: Format) -> jax.Array:
    """See `api.decode_sum`."""
    return jax.lax.fori_loop(
        1,
        codes.shape[0],
        lambda i, total: total + decode(codes[i], scales[i], fmt),
        decode(codes[0], scales[0], fmt),
    )

"""Scales and rounding of E4M3 numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp

TOP = 448.0
"""The largest finite E4M3 number."""
TILE = 128
"""Elements that share a scale along the contraction (and, for weights, across it)."""
_LEAST = 1e-4  # of an amax: keeps scales of empty tiles away from zero and from subnormals


def amax_of(values: jax.Array, axis: int | tuple[int, ...] | None) -> jax.Array:
    """The largest magnitude along axes, or of all; infinite where a value is NaN, which a chip's maximum may drop."""
    return jnp.max(jnp.where(values != values, jnp.inf, jnp.abs(values)), axis=axis)


def scale_of(amax: jax.Array, power_of_two: bool = False) -> jax.Array:
    """The fp32 scale of numbers up to amax: max(amax, 1e-4) / 448, optionally rounded up to a power of two.

    An infinite amax gives an infinite scale, and so a tile that decodes to NaN.
    """
    # By an inverse: kernels and compilers that turn a division by a constant into one agree to the bit.
    scale = jnp.maximum(amax, _LEAST) * (1 / TOP)
    return _up_to_power_of_two(scale) if power_of_two else scale


def _up_to_power_of_two(scale: jax.Array) -> jax.Array:
    # A mantissa that is not zero carries into the exponent; infinity and NaN stay as they are.
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
    up = jax.lax.bitcast_convert_type((bits + 0x7FFFFF) & jnp.uint32(0xFF800000), jnp.float32)
    return jnp.where(jnp.isfinite(scale), up, scale)


def to_e4m3(q: jax.Array) -> jax.Array:
    """fp32 -> E4M3, ties to even, saturating at 448; NaN stays NaN."""
    return jnp.where(q != q, q, jnp.clip(q, -TOP, TOP)).astype(jnp.float8_e4m3fn)

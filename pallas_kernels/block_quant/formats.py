"""The formats' arithmetic, on arrays of any shape: what the reference and the kernels have in common.

Only operations that give the same bits in XLA, in Triton and interpreted are used. A code has at most
8 significant bits and so has a bf16 scale: their product is exact in float32, and it makes no difference
whether a compiler contracts it with the sum that follows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
_INFINITY_BITS = 0x7F800000


@dataclass(frozen=True)
class Format:
    """A format of codes.

    Attributes:
      name: as users write it.
      top: the largest magnitude.
      bits: of a code.
      parts: a block is taken as so many equal parts, of which a byte's codes come one each.
      mantissa: bits of mantissa; None for integers.
      bias: of the exponent.
    """

    name: str
    top: float
    bits: int
    parts: int
    mantissa: int | None = None
    bias: int = 0

    @property
    def largest_scale(self) -> float:
        """The largest bf16 number whose product with `top` is finite."""
        bits = np.float32(np.finfo(np.float32).max / self.top).view(np.uint32) & np.uint32(0xFFFF0000)
        return float(bits.view(np.float32))

    def code_bytes(self, block: int) -> int:
        """Bytes of a block's codes."""
        return block * self.bits // 8


_ALL = (
    Format("int8", 127.0, 8, 1),
    Format("int4", 7.0, 4, 2),
    Format("e2m4", 7.75, 7, 8, mantissa=4, bias=1),
    Format("fp8", 448.0, 8, 1, mantissa=3, bias=7),
)
FORMATS = {fmt.name: fmt for fmt in _ALL}


def magnitude_bits(x: jax.Array) -> jax.Array:
    """Bits of |x|, f32, as int32: ordered as the magnitudes are, above them infinity, then NaN."""
    return jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF


def divide(x: jax.Array, y: jax.Array | float) -> jax.Array:
    """x / y, rounded once.

    XLA takes the product with the reciprocal, which rounds twice, where the divisor is a constant or only
    broadcast; not where it depends on x.
    """
    return x / jnp.where(x == 0, 1.0, y)


def scale_of(largest: jax.Array, fmt: Format, divide: Callable) -> jax.Array:
    """Scale of a block, f32 but a bf16 number, from `magnitude_bits` of its largest value.

    1 where the scale would be 0 or subnormal, infinity where a value is not finite.
    """
    amax = jax.lax.bitcast_convert_type(largest, jnp.float32)
    scale = divide(amax, jnp.full_like(amax, fmt.top))
    scale = jnp.where(scale < _SMALLEST_NORMAL, 1.0, jnp.minimum(scale, fmt.largest_scale))
    scale = jnp.where(largest >= _INFINITY_BITS, jnp.inf, scale)
    # Rounded by hand, since XLA may leave out a conversion to bf16 and back.
    bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def to_codes(q: jax.Array, fmt: Format, draw: jax.Array | None = None) -> jax.Array:
    """Codes, int32, of values divided by their scale.

    Integers: floor(q + draw), draw 1/2 where there is none (ties go up). Floats: to nearest, ties to even.
    """
    if fmt.mantissa is None:
        whole = jnp.floor(q + (0.5 if draw is None else draw))
        return jnp.clip(whole, -fmt.top, fmt.top).astype(jnp.int32) & ((1 << fmt.bits) - 1)
    drop = 23 - fmt.mantissa
    clipped = jnp.minimum(jnp.abs(q), fmt.top)
    bits = jax.lax.bitcast_convert_type(clipped, jnp.int32)
    odd = (bits >> drop) & 1
    normal = ((bits + odd + ((1 << (drop - 1)) - 1)) >> drop) - ((127 - fmt.bias) << fmt.mantissa)
    # A float whose unit in the last place is the format's smallest step: the sum rounds to that step.
    unit = 2.0 ** (1 - fmt.bias - fmt.mantissa + 23)
    small = jax.lax.bitcast_convert_type(clipped + unit, jnp.int32) - int(np.float32(unit).view(np.int32))
    code = jnp.where(clipped < 2.0 ** (1 - fmt.bias), small, normal)
    return jnp.where(q < 0, code | (1 << (fmt.bits - 1)), code)


def from_codes(codes: jax.Array, fmt: Format) -> jax.Array:
    """Values, f32, of codes, int32."""
    if fmt.mantissa is None:
        up = 32 - fmt.bits
        return ((codes << up) >> up).astype(jnp.float32)
    size = codes & ((1 << (fmt.bits - 1)) - 1)
    bits = (size + ((127 - fmt.bias) << fmt.mantissa)) << (23 - fmt.mantissa)
    normal = jax.lax.bitcast_convert_type(bits, jnp.float32)
    small = size.astype(jnp.float32) * 2.0 ** (1 - fmt.bias - fmt.mantissa)
    value = jnp.where(size < (1 << fmt.mantissa), small, normal)
    return jnp.where(codes >> (fmt.bits - 1) == 1, -value, value)


def to_bytes(codes: list[jax.Array], fmt: Format) -> list[jax.Array]:
    """Bytes, int32, of the codes of a block's parts: the last part's bits lie above the others'."""
    if fmt.parts == 1:
        return codes
    *own, shared = codes
    spare = 8 - fmt.bits
    rest = ((shared >> (spare * j)) & ((1 << spare) - 1) for j in range(len(own)))
    return [code | (bits << fmt.bits) for code, bits in zip(own, rest, strict=True)]


def from_bytes(packed: list[jax.Array], fmt: Format) -> list[jax.Array]:
    """What `to_bytes` was given."""
    if fmt.parts == 1:
        return packed
    spare = 8 - fmt.bits
    shared = functools.reduce(
        jnp.bitwise_or, [(byte >> fmt.bits) << (spare * j) for j, byte in enumerate(packed)]
    )
    return [*(byte & ((1 << fmt.bits) - 1) for byte in packed), shared]


def uniform(seed: jax.Array, index: jax.Array) -> jax.Array:
    """Uniform draws in [0, 1), f32, one for each index: the upper 24 bits of a hash of seed and index, uint32.

    The hash is two rounds of multiply and xor-shift over the index times the golden ratio, plus the seed.
    """
    mixed = index * np.uint32(0x9E3779B9) + seed
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
    mixed = mixed ^ (mixed >> np.uint32(16))
    return (mixed >> np.uint32(8)).astype(jnp.int32).astype(jnp.float32) * 2.0**-24

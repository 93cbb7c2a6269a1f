"""Products in fp8 with scales by blocks: activations by 1 x 128 tiles, weights by 128 x 128 blocks, both E4M3.

On Hopper the Mosaic kernel, on other GPUs from Ada on the Triton one, elsewhere the reference, which computes the same
with fp32 sums. Sizes that are no multiples of 128 are padded with zeros, which costs a copy of the operand.

The compiler does not cut a kernel over devices: over several, call these on local shards in a `jax.shard_map`.

Legend: m rows, n columns, k contraction.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import compat, hardware
from pallas_kernels.fp8_matmul import mosaic, reference, triton
from pallas_kernels.matmul.reference import dot
from pallas_kernels.matmul.scaling import TILE

KERNELS = {"mosaic": mosaic.GENERATIONS, "triton": triton.GENERATIONS}
_E4M3 = jnp.float8_e4m3fn


def quantise_activations(x: jax.Array, *, power_of_two: bool = False) -> tuple[jax.Array, jax.Array]:
    """A scale for each row's 128 elements: max(largest magnitude, 1e-4) / 448; the last tile may be narrower.

    Args:
      x: [..., k], any float.
      power_of_two: scales are rounded up to powers of two, so that scaling is exact.

    Returns:
      E4M3 [..., k], fp32 scales [..., ceil(k / 128)]; they stand for values * scales. A tile with a value that is
      not finite has an infinite scale and stands for NaN.

    Raises:
      ValueError: x has no dimension.
    """
    if x.ndim < 1:
        raise ValueError(f"quantise_activations: expected x [..., k]; got {x.shape}")
    *lead, k = x.shape
    rows = _padded(x.reshape(math.prod(lead), k), 1, TILE)
    values, scales = reference.quantise_rows(rows, power_of_two)
    return values[:, :k].reshape(x.shape), scales.reshape(*lead, -(-k // TILE))


def quantise_weights(w: jax.Array, *, power_of_two: bool = False) -> tuple[jax.Array, jax.Array]:
    """A scale for each 128 x 128 block, as `quantise_activations`; blocks at the edges may be smaller.

    Args:
      w: [k, n], any float.

    Returns:
      E4M3 [n, k], transposed, as fp8 tensor cores read both operands along k; fp32 scales [ceil(n / 128),
      ceil(k / 128)].

    Raises:
      ValueError: w is no matrix.
    """
    if w.ndim != 2:
        raise ValueError(f"quantise_weights: expected w [k, n]; got {w.shape}")
    k, n = w.shape
    values, scales = reference.quantise_blocks(_padded(w, TILE, TILE), power_of_two)
    return values[:n, :k], scales


def fp8_matmul(
    a: jax.Array, a_scales: jax.Array, b: jax.Array, b_scales: jax.Array, *, out_dtype: Any = jnp.bfloat16
) -> jax.Array:
    """Product of what the two functions above give: each 128 of k summed, scaled and added in fp32. No gradient.

    Hopper's tensor cores keep about 14 bits of a sum of fp8 products, so a GPU's result differs from the
    reference's by up to about 2^-13 of the sum of magnitudes.

    Args:
      a: E4M3 [..., k]. a_scales: fp32 [..., ceil(k / 128)].
      b: E4M3 [n, k]. b_scales: fp32 [ceil(n / 128), ceil(k / 128)].

    Returns:
      [..., n] in out_dtype.

    Raises:
      ValueError: shapes or dtypes that do not fit.
    """
    if a.dtype != _E4M3 or b.dtype != _E4M3:
        raise ValueError(f"fp8_matmul: expected a and b in float8_e4m3fn; got {a.dtype} and {b.dtype}")
    if a.ndim < 1 or b.ndim != 2 or a.shape[-1] != b.shape[1]:
        raise ValueError(f"fp8_matmul: expected a [..., k] and b [n, k]; got {a.shape} and {b.shape}")
    (*lead, k), n = a.shape, len(b)
    wanted = (*lead, -(-k // TILE)), (-(-n // TILE), -(-k // TILE))
    if (a_scales.shape, b_scales.shape) != wanted:
        raise ValueError(f"fp8_matmul: expected scales {wanted}; got {a_scales.shape} and {b_scales.shape}")
    m = math.prod(lead)
    out = _product(a.reshape(m, k), a_scales.reshape(m, wanted[1][1]), b, b_scales, out_dtype)
    return out.reshape(*lead, n)


def _product(a: Any, a_scales: Any, b: Any, b_scales: Any, out_dtype: Any) -> jax.Array:
    (m, _), n = a.shape, len(b)
    chosen = hardware.choose(KERNELS)
    if not a.size * n:
        return jnp.zeros((m, n), out_dtype)
    tile_m = 1 if chosen == "reference" else TILE
    inputs = _padded(a, tile_m, TILE), _padded(a_scales, tile_m, 1), _padded(b, TILE, TILE), b_scales
    if chosen == "reference":
        out = reference.product(*inputs, out_dtype)
    elif chosen == "mosaic":
        out = mosaic.product(*inputs, out_dtype)
    else:
        out = triton.product(*inputs, out_dtype, interpret=chosen == "interpret")
    return out[:m, :n]


def _padded(a: jax.Array, *to: int) -> jax.Array:
    up = [(0, -size % multiple) for size, multiple in zip(a.shape, to, strict=True)]
    return jnp.pad(a, up) if any(more for _, more in up) else a


def fp8_linear(x: jax.Array, w: jax.Array, *, power_of_two: bool = False, out_dtype: Any = None) -> jax.Array:
    """x w with both quantised, differentiable with respect to the unquantised ones (straight through).

    The gradient of x is a product in fp8 too, dy by 1 x 128 tiles along n. The gradient of w sums over rows, where
    tiles along k and n do not help: it takes x and dy as they are, in fp32 sums. Scales end at 1e-4 / 448, so
    a dy whose largest is far below 1e-4 loses bits: differentiate a sum over tokens, not a mean, or scale the loss.

    Args:
      x: [..., k]. w: [k, n]. out_dtype: x's by default. power_of_two: as in `quantise_activations`.

    Returns:
      [..., n].

    Raises:
      ValueError: shapes that do not fit.
    """
    # A weight that is the same on all devices then gets a sum of their gradients.
    return _linear(*compat.vary((x, w), (x, w)), power_of_two, out_dtype or x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _linear(x: jax.Array, w: jax.Array, power_of_two: bool, out_dtype: Any) -> jax.Array:
    return _forward(x, w, power_of_two, out_dtype)[0]


def _forward(x: jax.Array, w: jax.Array, power_of_two: bool, out_dtype: Any) -> tuple[jax.Array, Any]:
    b, b_scales = quantise_weights(w, power_of_two=power_of_two)
    a, a_scales = quantise_activations(x, power_of_two=power_of_two)
    y = fp8_matmul(a, a_scales, b, b_scales, out_dtype=out_dtype)
    return y, (x, b, b_scales, jnp.empty(0, w.dtype))


def _backward(power_of_two: bool, out_dtype: Any, saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, b, b_scales, w = saved
    a, a_scales = quantise_activations(dy, power_of_two=power_of_two)
    dx = fp8_matmul(a, a_scales, b.T, b_scales.T, out_dtype=x.dtype)
    m = math.prod(x.shape[:-1])
    rows, dy = x.reshape(m, x.shape[-1]), dy.astype(x.dtype).reshape(m, dy.shape[-1])
    return dx, dot(rows, dy, (0, 0)).astype(w.dtype)


_linear.defvjp(_forward, _backward)

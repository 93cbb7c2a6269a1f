"""Products of E4M3 operands scaled by blocks, in plain JAX: what the kernels compute.

Legend: m rows, n columns, k contraction; TILE = 128.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import compat
from pallas_kernels.matmul.scaling import TILE, amax_of, scale_of, to_e4m3


def quantise_rows(x: jax.Array, power_of_two: bool) -> tuple[jax.Array, jax.Array]:
    """x [m, k], k a multiple of TILE -> E4M3 [m, k], scales [m, k / TILE] fp32."""
    tiles = x.astype(jnp.float32).reshape(len(x), x.shape[1] // TILE, TILE)
    scales = scale_of(amax_of(tiles, axis=2), power_of_two)
    return to_e4m3(tiles / scales[..., None]).reshape(x.shape), scales


def quantise_blocks(w: jax.Array, power_of_two: bool) -> tuple[jax.Array, jax.Array]:
    """w [k, n], both multiples of TILE -> its transposed E4M3 [n, k], scales [n / TILE, k / TILE] fp32."""
    k, n = w.shape
    blocks = w.T.astype(jnp.float32).reshape(n // TILE, TILE, k // TILE, TILE)
    scales = scale_of(amax_of(blocks, axis=(1, 3)), power_of_two)
    return to_e4m3(blocks / scales[:, None, :, None]).reshape(n, k), scales


def product(
    a: jax.Array, a_scales: jax.Array, b: jax.Array, b_scales: jax.Array, out_dtype: Any
) -> jax.Array:
    """The product of two operands quantised as above.

    Each TILE of k is multiplied and summed in fp32, where products of E4M3 numbers are exact; the sum times
    both scales is added to the result in fp32.

    Args:
      a: E4M3 [m, k]. a_scales: [m, k / TILE]. b: E4M3 [n, k]. b_scales: [n / TILE, k / TILE].
    """

    def tile(total: jax.Array, part: Any) -> tuple[jax.Array, None]:
        a_mk, b_nk, rows, columns = part
        one = lax.dot_general(a_mk, b_nk, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return total + one * (rows[:, None] * jnp.repeat(columns, TILE)[None]), None

    def by_tile(v: jax.Array) -> jax.Array:
        # bf16 holds every E4M3 number, and products of bf16 are exact in fp32 on every chip.
        return v.astype(jnp.bfloat16).reshape(len(v), v.shape[1] // TILE, TILE).swapaxes(0, 1)

    start = compat.vary(jnp.zeros((len(a), len(b)), jnp.float32), (a, a_scales, b, b_scales))
    total, _ = lax.scan(tile, start, (by_tile(a), by_tile(b), a_scales.T, b_scales.T))
    return total.astype(out_dtype)

"""Products with an epilogue in plain JAX: what the kernels compute."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul.epilogue import Epilogue
from pallas_kernels.matmul.scaling import TILE


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """Product of two matrices over one dimension each, summed in fp32; fp32 operands are not rounded to tf32."""
    exact = lax.Precision.HIGHEST if jnp.float32 in (a.dtype, b.dtype) else None
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=exact, preferred_element_type=jnp.float32)


def product(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    bias: jax.Array | None,
    residual: jax.Array | None,
    scale: jax.Array | None,
    epilogue: Epilogue,
) -> dict[str, Any]:
    """activation(x w + bias) + residual, or activation(x w_gate) * (x w_up) + residual.

    Args:
      x: [m, k]. weights: one or (gated) two [k, n]. bias: [n]. residual: [m, n].
      scale: [1] fp32, of the result, where the epilogue quantises by a given one.

    Returns:
      y [m, n]; scales [m, n / TILE] or None; z, the pre-activations [m, n] that the epilogue saves.
    """
    over = None if bias is None else bias.astype(jnp.float32)[None]
    y, z = epilogue.combine([dot(x, w) for w in weights], over)
    if residual is not None:
        y = y + residual.astype(jnp.float32)
    scales = None
    if epilogue.quantise:
        across = y.shape[1] // TILE
        tiles = y.reshape(len(y) * across, TILE)
        codes, scales = epilogue.encode(tiles, None if scale is None else scale[0])
        y, scales = codes.reshape(y.shape), None if scales is None else scales.reshape(len(y), across)
    else:
        y = y.astype(epilogue.dtype)
    return {"y": y, "scales": scales, "z": [part.astype(x.dtype) for part in z] if epilogue.save else []}

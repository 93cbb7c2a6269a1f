"""What is done to a tile of a product before it is written; kernels and reference share these formulas.

Legend: m rows, n columns, k contraction.  All arithmetic here is fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.matmul.scaling import amax_of, scale_of, to_e4m3

_GELU = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def _sigmoid(z: jax.Array) -> jax.Array:
    # Of exp alone: the logistic function has no lowering in every backend, exp and division do.
    return 1 / (1 + jnp.exp(-z))


def _gelu_gate(z: jax.Array) -> jax.Array:
    # (1 + tanh(u)) / 2 = sigmoid(2 u)
    return _sigmoid(_GELU * (z + _CUBIC * z * z * z))


def _gelu_slope(z: jax.Array) -> jax.Array:
    gate = _gelu_gate(z)
    return gate + z * gate * (1 - gate) * _GELU * (1 + 3 * _CUBIC * z * z)


def _silu_slope(z: jax.Array) -> jax.Array:
    gate = _sigmoid(z)
    return gate * (1 + z * (1 - gate))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "none": lambda z: z,
    "relu": lambda z: jnp.where(z <= 0, 0.0, z),  # not a maximum, which on some chips drops NaN
    "silu": lambda z: z * _sigmoid(z),
    "gelu": lambda z: z * _gelu_gate(z),
}
"""Name -> function; gelu is the tanh form (Hendrycks and Gimpel 2016), as `jax.nn.gelu` by default."""

SLOPES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "none": lambda z: jnp.ones_like(z),
    "relu": lambda z: jnp.where(z > 0, 1.0, 0.0),
    "silu": _silu_slope,
    "gelu": _gelu_slope,
}
"""Name -> derivative."""


@dataclass(frozen=True)
class Epilogue:
    """What follows a product.

    Attributes:
      activation: a key of ACTIVATIONS, on the pre-activation z = x w + bias.
      gated: two weights; the result is activation(x w_gate) * (x w_up).
      save: the pre-activations are written too, one or (gated) two, in the operands' dtype.
      quantise: None; "tile": E4M3 with a scale for each row's TILE columns; "given": E4M3 with one scale for all.
      dtype: of the result where it is not quantised.
    """

    activation: str = "none"
    gated: bool = False
    save: bool = False
    quantise: str | None = None
    dtype: Any = jnp.float32

    @property
    def weights(self) -> int:
        """Number of weight matrices."""
        return 2 if self.gated else 1

    def saving(self) -> Epilogue:
        """The same, writing the pre-activations too."""
        return replace(self, save=True)

    def combine(self, products: list[jax.Array], bias: jax.Array | None) -> tuple[jax.Array, list[jax.Array]]:
        """fp32 products [m, n] of each weight, and a bias [m, n] -> the activated [m, n], the pre-activations."""
        z = [products[0] if bias is None else products[0] + bias, *products[1:]]
        activated = ACTIVATIONS[self.activation](z[0])
        return (activated * z[1] if self.gated else activated), z

    def encode(self, y: jax.Array, scale: jax.Array | None = None) -> tuple[jax.Array, jax.Array | None]:
        """fp32 y [m, TILE] -> E4M3 [m, TILE], its scales [m]; with a given scale, a scalar, no scales."""
        if scale is not None:
            return to_e4m3(y / scale), None
        scales = scale_of(amax_of(y, axis=1))
        return to_e4m3(y / jax.lax.broadcast_in_dim(scales, y.shape, (0,))), scales

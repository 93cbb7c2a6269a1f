"""Delayed scaling of fp8: scales from the largest magnitudes of passes before (Micikevicius et al. 2022).

A layer's input and the gradient of its output each have a history of largest magnitudes, one a forward pass
(microbatch).  Their scale is that of the largest in it; where it is empty yet, of the operand itself.  Histories are
variables of the model, so they are part of the state: saved, restored, unchanged by a step that is skipped.
A gradient's magnitude leaves the backward pass as the gradient of a zero that stands by (`Probe`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from dsjax.precision.fp8 import E4M3, E5M2, contracted_of, scale_for, scaled_product
from pallas_kernels.matmul.scaling import amax_of


class Largest(nnx.Variable):
    """Largest magnitudes of passes before, the last one first: float32 [*layers, passes]; 0: none yet."""


class Probe(nnx.Variable):
    """Zeros, float32 [*layers, 2], whose gradient is the largest magnitude of a layer's gradient, and 1.

    Of a layer that is used several times in a pass both are added up: the mean of its magnitudes is what counts.
    """


class DelayedDot(nnx.Module):
    """A `jax.lax.dot_general` in fp8 with the scales of passes before, one for each layer.

    Args:
      layers: leading dimensions of the layer's parameters, if it stands for a stack of them.
      passes: that a history remembers.
      active: False: it multiplies as the layer would without it, and only holds its variables.
    """

    def __init__(self, layers: tuple[int, ...], passes: int, active: bool = True):
        self.active = active
        # As Flax's own layers have it: `model.train()` makes it False, and only then histories change.
        self.deterministic = True
        self.inputs = Largest(jnp.zeros((*layers, passes), jnp.float32))
        self.gradients = Largest(jnp.zeros((*layers, passes), jnp.float32))
        self.probe = Probe(jnp.zeros((*layers, 2), jnp.float32))

    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, precision: Any = None, **more: Any
    ) -> jax.Array:
        """lhs [..., *k] times rhs [*k, ...]; in training the history of inputs is updated.

        Raises:
          ConfigError: other dimensions are contracted, or there are batch dimensions.
        """
        if not self.active:
            return lax.dot_general(lhs, rhs, dimension_numbers, precision, **more)
        contracted = contracted_of(lhs, dimension_numbers)
        dtype = more.get("preferred_element_type") or jnp.result_type(lhs, rhs)
        largest = lax.stop_gradient(amax_of(lhs, None)).astype(jnp.float32)
        before, gradients = jnp.max(self.inputs[...]), jnp.max(self.gradients[...])
        if not self.deterministic:
            self.inputs[...] = pushed(self.inputs[...], largest)
        # A gradient of which nothing is known yet is not rounded by a scale of another's: 0 asks for its own.
        given = (
            scale_for(jnp.where(before > 0, before, largest), E4M3),
            jnp.where(gradients > 0, scale_for(gradients, E5M2), 0.0),
            self.probe[...],
        )
        return scaled_product(contracted, dtype, lhs, rhs, given)


def pushed(history: jax.Array, largest: jax.Array) -> jax.Array:
    """A history [..., passes] with one more pass [...] in front, less the oldest; what is not finite stays out."""
    kept = jnp.where(jnp.isfinite(largest), largest, history[..., 0])
    return jnp.concatenate([kept[..., None], history[..., :-1]], axis=-1)


def is_history(variable: Any) -> bool:
    """Whether a variable keeps largest magnitudes: of replicas the largest counts, not the mean."""
    return isinstance(variable, Largest | Probe)


def histories_of(model_state: nnx.State) -> list[list[Any]]:
    """[path, shape] of what delayed scaling keeps, for a checkpoint's facts."""
    return [[list(path), list(v.shape)] for path, v in model_state.flat_state() if is_history(v)]


def probes(model_state: nnx.State) -> dict[Any, jax.Array]:
    """The zeros whose gradients are magnitudes, by path; empty without delayed scaling."""
    return {path: v[...] for path, v in model_state.flat_state() if isinstance(v, Probe)}


def with_probes(model_state: nnx.State, values: dict[Any, jax.Array]) -> nnx.State:
    """The model's other variables with these values of the probes."""
    if not values:
        return model_state
    return nnx.State.from_flat_path(
        {path: v.replace(values[path]) if path in values else v for path, v in model_state.flat_state()}
    )


def observed(model_state: nnx.State, magnitudes: dict[Any, jax.Array]) -> nnx.State:
    """The model's other variables after a backward pass in which probes had these gradients."""
    if not magnitudes:
        return model_state
    flat = dict(model_state.flat_state())
    for path, summed in magnitudes.items():
        history = (*path[:-1], "gradients")
        largest = summed[..., 0] / jnp.maximum(summed[..., 1], 1.0)
        flat[history] = flat[history].replace(pushed(flat[history][...], largest))
        flat[path] = flat[path].replace(jnp.zeros_like(summed))
    return nnx.State.from_flat_path(flat)

"""What parameters and gradients are held in: matrices in the type that the config says, vectors in fp32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from dsjax.mesh import Layout, is_matrix, map_named
from dsjax.mesh.paths import path_name
from dsjax.models.adapters import is_adapter
from dsjax.precision.rounding import add_stochastic_rounding, in_float32
from dsjax.train.state import Numbers

# Apart from all other keys that are made of step numbers.
_OF_PARAMS, _OF_SUMS = 0x5EED_0001, 0x5EED_0002


def held_params(layout: Layout, numbers: Numbers, variables: nnx.State) -> nnx.State:
    """A model's variables with the matrices among its fp32 parameters, trained or frozen, as they are held."""
    if numbers.params == jnp.float32:
        return variables

    def one(path: Any, variable: Any) -> Any:
        # What adapters learn is small beside what it is added to: they stay in fp32.
        if not isinstance(variable, nnx.Param) or is_adapter(path_name(path)):
            return variable
        return variable.replace(_held(layout, path_name(path), variable[...], numbers.params))

    return jax.tree_util.tree_map_with_path(one, variables, is_leaf=lambda x: isinstance(x, nnx.Variable))


def held_gradients(layout: Layout, numbers: Numbers, grads: Any) -> Any:
    """Gradients as they are held, of any type; vectors' in fp32."""
    grads = jax.tree.map(lambda g: g if g.dtype == numbers.gradients else g.astype(jnp.float32), grads)
    if numbers.gradients == jnp.float32:
        return grads
    return map_named(lambda path, g: _held(layout, path, g, numbers.gradients), grads)


def _held(layout: Layout, path: str, leaf: Any, dtype: Any) -> Any:
    matrix = is_matrix(layout.optimizer_names(path), leaf.ndim)
    if leaf.dtype == dtype:
        return leaf if matrix else leaf.astype(jnp.float32)
    return leaf.astype(dtype) if matrix and leaf.dtype == jnp.float32 else leaf


def summed(numbers: Numbers, grads: Any, more: Any, step: Any, microbatch: Any) -> Any:
    """Gradients of microbatches with one more; rounded otherwise at every step and microbatch."""
    if numbers.gradients == jnp.float32:
        return jax.tree.map(jnp.add, grads, more)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(_OF_SUMS), step), microbatch)
    return add_stochastic_rounding(grads, more, key)


def norm(grads: Any) -> jax.Array:
    """The norm of gradients of any type, float32 []."""
    return optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))


def optimizer_of(numbers: Numbers, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer for parameters and gradients as they are held."""
    narrow = numbers.params != jnp.float32 or numbers.gradients != jnp.float32
    return in_float32(optimizer) if narrow else optimizer


def moved(numbers: Numbers, params: Any, updates: Any, count: Any) -> Any:
    """Parameters after an update.

    Args:
      count: int32 [], updates made before.
    """
    if numbers.params == jnp.float32:
        return optax.apply_updates(params, updates)
    return add_stochastic_rounding(params, updates, jax.random.fold_in(jax.random.key(_OF_PARAMS), count))

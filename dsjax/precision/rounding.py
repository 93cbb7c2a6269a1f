"""Parameters and sums in bf16: rounded at random, so that what is smaller than a step of bf16 is not lost but rare."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def stochastically_rounded(x: jax.Array, key: jax.Array) -> jax.Array:
    """float32 in bf16, up or down with the odds that keep the mean; what is not finite stays so.

    The bits depend on the key and on where a number stands in the array, not on how that is cut over devices.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    cut = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x) & jnp.isfinite(cut), cut, x).astype(jnp.bfloat16)


def add_stochastic_rounding(tree: Any, more: Any, key: jax.Array) -> Any:
    """The sum of two trees, computed in fp32, in the first one's types: bf16 leaves are rounded at random."""
    leaves, structure = jax.tree.flatten(tree)
    added = [
        stochastically_rounded(leaf.astype(jnp.float32) + other, jax.random.fold_in(key, number))
        if leaf.dtype == jnp.bfloat16
        else (leaf + other).astype(leaf.dtype)
        for number, (leaf, other) in enumerate(zip(leaves, jax.tree.leaves(more), strict=True))
    ]
    return jax.tree.unflatten(structure, added)


def apply_updates_stochastic_rounding(params: Any, updates: Any, key: jax.Array) -> Any:
    """Parameters after an update, as `optax.apply_updates`; those in bf16 are rounded at random.

    Args:
      params: a tree of arrays; bf16 ones are added to in fp32 and rounded up or down with the odds that keep their
        mean, others are added to as they are.
      updates: of an optimizer that computes in fp32 (`in_float32`).
      key: another one at every update.
    """
    return add_stochastic_rounding(params, updates, key)


def in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, computing in fp32 and with a state as of fp32, whatever types parameters and gradients have."""

    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tree)

    def init(params: Any) -> Any:
        return optimizer.init(wide(params))

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, Any]:
        return optimizer.update(wide(updates), state, None if params is None else wide(params), **more)

    return optax.GradientTransformationExtraArgs(init, update)

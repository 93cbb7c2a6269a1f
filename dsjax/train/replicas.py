"""Gradients replica by replica: each sums up its own microbatches, and all exchange once.

One shard_map, manual over `data`; all other axes stay with the compiler.  In its body no collective over `data` is
left but those of the exchange.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from dsjax.grad_sync import Exchange, mean, residual_specs, seed_of
from dsjax.mesh import gather_all, use_layout
from dsjax.mesh.inside import inside, manual_specs, shard_map_over
from dsjax.train.gradients import Microbatches, StepParts, Sums, accumulated, at_rest, positions_of
from dsjax.train.grouped import exchanged_in_groups, in_groups
from dsjax.train.state import State

AXIS = "data"


def by_replica(parts: StepParts, exchange: Exchange, state: State, batch: Any) -> tuple[Sums, nnx.State, Any]:
    """Sums over all replicas with the mean gradient, the model's state, and residuals."""
    layout = inside(parts.layout, (AXIS,), state.params, state.model_state)
    parts = replace(parts, layout=layout)
    replicas = layout.axis_size(AXIS)

    def body(params: Any, model_state: Any, residuals: Any, batch: Any, positions: Any, step: Any) -> Any:
        replica = lax.axis_index(AXIS)
        given = Microbatches(batch, positions, step, lambda index: index * replicas + replica)
        with use_layout(layout):
            if layout.fsdp_gather == "step":
                params = gather_all(params)
            work = exchanged_in_groups if in_groups(parts, exchange, model_state) else _exchanged
            return work(parts, exchange, params, model_state, residuals, given)

    kept = residual_specs(exchange, layout)
    manual = [manual_specs(layout, tree) for tree in (state.params, state.model_state)]
    rows = P(None, AXIS)
    found: Any = Sums(P(), P(), P(), manual[0])  # type: ignore[arg-type]
    mapped = shard_map_over(layout, body, (*manual, kept, rows, rows, P()), (found, manual[1], kept))
    return mapped(state.params, state.model_state, state.residuals, batch, positions_of(batch), state.step)


def _exchanged(
    parts: StepParts, exchange: Exchange, params: Any, model_state: Any, residuals: Any, given: Microbatches
) -> tuple[Sums, nnx.State, Any]:
    """All microbatches, then the exchange."""
    sums, model_state = accumulated(parts, params, model_state, given, len(given))
    loss, weight, extras = lax.psum((sums.loss, sums.weight, sums.extras), AXIS)
    grads = mean(at_rest(parts.layout, sums.grads), weight)
    grads, residuals = exchange(parts.layout, grads, residuals, seed_of(given.step))
    return Sums(loss, weight, extras, grads), jax.tree.map(_averaged, model_state), residuals


def _averaged(leaf: jax.Array) -> jax.Array:
    """Statistics that each replica gathered over its own rows; what is no such number is alike everywhere."""
    return lax.pmean(leaf, AXIS) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf

"""Gradients replica by replica: each sums up its own microbatches, and all exchange once, or train apart.

One shard_map, manual over `data`; all other axes stay with the compiler.  In its body no collective over `data` is
left but those of the exchange.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from dsjax.grad_sync import AXIS, Exchange, mean, residual_specs, seed_of
from dsjax.mesh import gather_all, use_layout
from dsjax.mesh.inside import inside, manual_specs, shard_map_over
from dsjax.train.formats import held_gradients
from dsjax.train.gradients import Microbatches, StepParts, Sums, accumulated, at_rest, positions_of
from dsjax.train.grouped import exchanged_in_groups, in_groups
from dsjax.train.state import State, with_statistics


def by_replica(
    parts: StepParts, exchange: Exchange, state: State, batch: Any, seed: Any = None
) -> tuple[Sums, nnx.State, Any]:
    """Sums over all replicas with the mean gradient, the model's state, and residuals.

    The gradient of a loss starts from the seed (`Microbatches`).
    Where replicas train apart the gradients are each one's own, [replicas, ...], and there are no residuals.
    """
    layout = inside(parts.layout, (AXIS,), state.params, state.model_state)
    parts, replicas = replace(parts, layout=layout), layout.axis_size(AXIS)
    if parts.apart:
        work, params, residuals = _apart, state.workers["params"], {}
    else:
        grouped = in_groups(parts, exchange, state.model_state)
        work = exchanged_in_groups if grouped else _exchanged
        params, residuals = state.params, state.residuals

    def body(params: Any, model_state: Any, residuals: Any, batch: Any, positions: Any, now: Any) -> Any:
        replica = lax.axis_index(AXIS)
        given = Microbatches(batch, positions, now[0], lambda index: index * replicas + replica, *now[1:])
        if parts.apart:
            params = jax.tree.map(lambda leaf: leaf[0], params)
        with use_layout(layout):
            if layout.fsdp_gather == "step":
                params = gather_all(params)
            sums, model_state, residuals = work(parts, exchange, params, model_state, residuals, given)
        if parts.apart:
            sums = replace(sums, grads=jax.tree.map(lambda g: g[None], sums.grads))
        # Statistics that each replica gathered over its own rows.
        mean, largest = (partial(of, axis_name=AXIS) for of in (lax.pmean, lax.pmax))
        return sums, with_statistics(model_state, mean, largest), residuals

    kept = {} if parts.apart else residual_specs(exchange, layout)
    own, states = (manual_specs(layout, tree) for tree in (state.params, state.model_state))
    if parts.apart:
        own = each_its_own_spec(own)
    rows = P(None, AXIS)
    found: Any = Sums(P(), P(), P(), own)  # type: ignore[arg-type]
    mapped = shard_map_over(layout, body, (own, states, kept, rows, rows, P()), (found, states, kept))
    now = (state.step, seed, state.data_step)
    return mapped(params, state.model_state, residuals, batch, positions_of(batch), now)


def each_its_own_spec(specs: Any) -> Any:
    """The specs of a tree of which every replica has its own."""
    return jax.tree.map(lambda spec: P(AXIS, *spec), specs, is_leaf=lambda x: isinstance(x, P))


def _exchanged(
    parts: StepParts, exchange: Exchange, params: Any, model_state: Any, residuals: Any, given: Microbatches
) -> tuple[Sums, nnx.State, Any]:
    """All microbatches, then the exchange."""
    sums, model_state = accumulated(parts, params, model_state, given, len(given))
    loss, weight, extras = lax.psum((sums.loss, sums.weight, sums.extras), AXIS)
    grads = mean(at_rest(parts.layout, sums.grads), given.unit(weight))
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    grads, residuals = exchange(parts.layout, grads, residuals, seed_of(given.step))
    grads = held_gradients(parts.layout, parts.numbers, grads)
    return Sums(loss, weight, extras, grads), model_state, residuals


def _apart(
    parts: StepParts, exchange: Exchange, params: Any, model_state: Any, residuals: Any, given: Microbatches
) -> tuple[Sums, nnx.State, Any]:
    """All microbatches; gradients are added up over near replicas only, which train as one."""
    sums, model_state = accumulated(parts, params, model_state, given, len(given))
    weight = exchange.near_sum(sums.weight)
    grads = mean(exchange.near(parts.layout, at_rest(parts.layout, sums.grads)), given.unit(weight))
    loss, total, extras = lax.psum((sums.loss, sums.weight, sums.extras), AXIS)
    return Sums(loss, total, extras, grads), model_state, residuals

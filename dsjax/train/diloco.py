"""Local steps between exchanges: DiLoCo (Douillard et al. 2023).

Every worker (a replica of `data`, or the near ones that a route joins) trains parameters of its own with an
optimizer of its own.  Every `inner_steps` steps all of them send how far they have moved, through the codec, and an
outer Nesterov step of the mean move makes the parameters that all go on from.  Those are evaluated and generated with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from dsjax.config.exchange import DilocoConfig
from dsjax.grad_sync import Exchange, mean, residual_specs, seed_of
from dsjax.mesh import Layout, gather_all, use_layout
from dsjax.mesh.inside import inside, manual_specs, shard_map_over
from dsjax.train.gradients import Microbatches, StepParts, Sums, accumulated, at_rest, positions_of
from dsjax.train.state import State, each_its_own

AXIS = "data"


def by_worker(parts: StepParts, exchange: Exchange, state: State, batch: Any) -> tuple[Sums, nnx.State]:
    """Sums over all replicas, with each one's own mean gradient [replicas, ...], and the model's state."""
    layout = inside(parts.layout, (AXIS,), state.params, state.model_state)
    parts = replace(parts, layout=layout)
    replicas = layout.axis_size(AXIS)

    def body(own: Any, model_state: Any, batch: Any, positions: Any, step: Any) -> Any:
        params = jax.tree.map(lambda leaf: leaf[0], own)
        replica = lax.axis_index(AXIS)
        given = Microbatches(batch, positions, step, lambda index: index * replicas + replica)
        with use_layout(layout):
            if layout.fsdp_gather == "step":
                params = gather_all(params)
            sums, model_state = accumulated(parts, params, model_state, given, len(given))
            weight = exchange.near_sum(sums.weight)
            grads = mean(exchange.near(layout, at_rest(layout, sums.grads)), weight)
        loss, total, extras = lax.psum((sums.loss, sums.weight, sums.extras), AXIS)
        return Sums(loss, total, extras, jax.tree.map(lambda g: g[None], grads)), model_state

    own_specs = manual_specs(layout, state.params)
    each = jax.tree.map(lambda spec: P(AXIS, *spec), own_specs, is_leaf=lambda x: isinstance(x, P))
    states, rows = manual_specs(layout, state.model_state), P(None, AXIS)
    found: Any = Sums(P(), P(), P(), each)  # type: ignore[arg-type]
    mapped = shard_map_over(layout, body, (each, states, rows, rows, P()), (found, states))
    return mapped(state.workers["params"], state.model_state, batch, positions_of(batch), state.step)


def outer_step(parts: StepParts, exchange: Exchange, config: DilocoConfig, state: State) -> State:
    """The state after the workers have met."""
    layout = inside(parts.layout, (AXIS,), state.params, state.model_state)

    def body(params: Any, own: Any, residuals: Any, step: Any) -> Any:
        with use_layout(layout):
            moved = jax.tree.map(lambda p, o: p.astype(jnp.float32) - o[0], params, own)
            sums, residuals = exchange(
                layout, mean(moved, jnp.float32(exchange.route.replicas)), residuals, seed_of(step)
            )
        return sums, residuals

    kept, specs = residual_specs(exchange, layout), manual_specs(layout, state.params)
    each = jax.tree.map(lambda spec: P(AXIS, *spec), specs, is_leaf=lambda x: isinstance(x, P))
    mapped = shard_map_over(layout, body, (specs, each, kept, P()), (specs, kept))
    move, residuals = mapped(state.params, state.workers["params"], state.residuals, state.step)
    momentum = jax.tree.map(lambda m, d: config.outer_momentum * m + d, state.workers["momentum"], move)
    rate = config.outer_learning_rate
    params = jax.tree.map(
        lambda p, m, d: p - (rate * (d + config.outer_momentum * m)).astype(p.dtype),
        state.params,
        momentum,
        move,
    )
    params = at_rest(parts.layout, params)
    own = _pinned(parts.layout, each_its_own(params, exchange.route.replicas), params)
    return replace(
        state,
        params=params,
        residuals=residuals,
        workers={**state.workers, "params": own, "momentum": momentum},
    )


def _pinned(layout: Layout, own: Any, params: Any) -> Any:
    places = layout.param_shardings(params)
    return jax.tree.map(
        lambda leaf, place: lax.with_sharding_constraint(leaf, jax.NamedSharding(layout.mesh, P(AXIS, *place.spec))),
        own, places,
    )  # fmt: skip

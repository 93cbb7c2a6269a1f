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
from jax import lax
from jax.sharding import PartitionSpec as P

from dsjax.config.exchange import DilocoConfig
from dsjax.grad_sync import AXIS, Exchange, mean, residual_specs, seed_of
from dsjax.mesh import Layout, use_layout
from dsjax.mesh.inside import inside, manual_specs, shard_map_over
from dsjax.train.gradients import StepParts, at_rest
from dsjax.train.replicas import each_its_own_spec
from dsjax.train.state import State, each_its_own


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
    mapped = shard_map_over(layout, body, (specs, each_its_own_spec(specs), kept, P()), (specs, kept))
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

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
from dsjax.errors import ConfigError
from dsjax.grad_sync import AXIS, Exchange, mean, residual_specs, seed_of
from dsjax.mesh import Layout, use_layout
from dsjax.mesh.inside import inside, manual_specs, shard_map_over
from dsjax.train.gradients import StepParts, at_rest
from dsjax.train.replicas import each_its_own_spec
from dsjax.train.state import State, each_its_own

# The name in compiled programs of what happens at a meeting only.
MEETING = "workers_meet"


def refuse_pipeline(config: DilocoConfig, stages: int) -> None:
    """Refuses workers that train apart where there are stages.

    Raises:
      ConfigError: naming both settings.
    """
    if config.inner_steps and stages > 1:
        raise ConfigError(
            "diloco.inner_steps: workers that train apart do not take part in a pipeline; set mesh.pipeline=1 or "
            "diloco.inner_steps=0"
        )


def apart_notes(diloco: DilocoConfig, exchange: Exchange | None) -> list[str]:
    """How workers train apart, for people; none where they do not."""
    if not diloco.inner_steps:
        return []
    if exchange is None:
        return ["diloco.inner_steps: there is one replica (mesh.data is 1), so there is nobody to meet"]
    return [f"diloco: {exchange.route.outer} workers train apart and meet every {diloco.inner_steps} steps"]


def refuse_last_step(config: DilocoConfig, steps: int) -> None:
    """Refuses a run that ends between two meetings: its parameters would be those of the last one.

    Raises:
      ConfigError: naming the nearest numbers of steps that end with a meeting.
    """
    below = steps // config.inner_steps * config.inner_steps
    if below == steps:
        return
    if not below:
        raise ConfigError(
            f"diloco.inner_steps: {config.inner_steps} is more than train.steps {steps}, so workers would never meet; "
            f"use train.steps={config.inner_steps}, or diloco.inner_steps={steps}"
        )
    raise ConfigError(
        f"train.steps: {steps} is no multiple of diloco.inner_steps {config.inner_steps}, and what workers learn after "
        f"their last meeting would be lost; use {below} or {below + config.inner_steps}"
    )


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

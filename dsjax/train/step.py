"""One training step as a pure function:

    loss -> gradients (accumulated over microbatches) -> exchange -> finite? clip -> update

Everything here is traced once and compiled once; sums and weights are added over microbatches and
devices in fp32 and divided once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from dsjax.grad_sync import AXIS, mean
from dsjax.mesh import gather_all, use_layout
from dsjax.train.diloco import MEETING, outer_step
from dsjax.train.gradients import (
    Batch,
    Microbatches,
    StepParts,
    Sums,
    accumulated,
    at_rest,
    positions_of,
)
from dsjax.train.losses import normalised
from dsjax.train.pipelined import evaluated, pipelined
from dsjax.train.replicas import by_replica
from dsjax.train.state import State, add_exactly
from dsjax.train.votes import counted

Metrics = dict[str, jax.Array]


def _summed(parts: StepParts, state: State, batch: Batch) -> tuple[Sums, nnx.State, Any]:
    """Sums over the whole batch with the mean gradient, the model's state, and residuals.

    Over a pipeline, replica by replica, or one microbatch after the other.
    """
    layout = parts.layout
    if parts.pipelining is not None:
        (loss, weight, extras), grads, residuals = pipelined(
            parts.graph, layout, parts.pipelining, parts.exchange, state, batch
        )
        return Sums(loss, weight, extras, grads), state.model_state, residuals
    if parts.exchange is not None:
        return by_replica(parts, parts.exchange, state, batch)
    params = gather_all(state.params) if layout.fsdp_gather == "step" else state.params
    given = Microbatches(batch, positions_of(batch), state.step)
    sums, model_state = accumulated(parts, params, state.model_state, given, len(given))
    grads = mean(at_rest(layout, sums.grads), sums.weight)
    return replace(sums, grads=grads), model_state, state.residuals


def _updated(parts: StepParts, params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any, jax.Array]:
    """(parameters, optimizer state, norm of the gradient before it is clipped)."""
    norm = optax.tree.norm(grads)
    if parts.max_grad_norm is not None:
        scale = jnp.minimum(1.0, parts.max_grad_norm / jnp.maximum(norm, 1e-12))
        grads = jax.tree.map(lambda g: g * scale, grads)
    updates, opt_state = parts.optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, norm


def train_step(parts: StepParts, state: State, batch: Batch, votes: jax.Array) -> tuple[State, Metrics]:
    """One optimizer step.

    Args:
      batch: arrays [A, B / A, ...]: A microbatches of the global batch.
      votes: int32 [devices], what each device's process asks for (`votes`).

    Returns:
      The next state and the step's metrics (scalars, the same on every device). A step whose loss
      or gradient is not finite, or in which no example has weight, changes nothing but the step
      number, the data position and the count of skipped steps.
    """
    with use_layout(parts.layout):
        if parts.apart:
            sums, after, norm = _apart(parts, state, batch)
        else:
            sums, after, norm = _together(parts, state, batch)
    weight = jnp.maximum(sums.weight, jnp.finfo(jnp.float32).tiny)
    applied = jnp.isfinite(sums.loss) & jnp.isfinite(norm) & (sums.weight > 0)
    after = jax.tree.map(
        lambda new, old: jnp.where(applied, new, old) if new is not old else old, after, state
    )
    metrics = {
        "loss": sums.loss / weight,
        "tokens": sums.weight,
        "grad_norm": norm,
        "applied": applied,
        "asked": counted(votes),
        **{f"extra/{name}": s / jnp.maximum(w, 1e-30) for name, (s, w) in sums.extras.items()},
    }
    if parts.schedule is not None:
        metrics["learning_rate"] = jnp.asarray(parts.schedule(state.updates), jnp.float32)
    after = replace(
        after,
        step=state.step + 1,
        updates=state.updates + applied,
        skipped=jnp.where(applied, 0, state.skipped + 1),
        data_step=state.data_step + 1,
        tokens_seen=add_exactly(state.tokens_seen, sums.weight),
    )
    if parts.apart:
        after = _met(parts, after)
    metrics["skipped"], metrics["tokens_seen"] = after.skipped, after.tokens_seen
    return after, metrics


def _together(parts: StepParts, state: State, batch: Batch) -> tuple[Sums, State, jax.Array]:
    """One update of the mean gradient: (sums, the state after it, the gradient's norm)."""
    sums, model_state, residuals = _summed(parts, state, batch)
    grads = at_rest(parts.layout, sums.grads)
    params, opt_state, norm = _updated(parts, state.params, state.opt_state, grads)
    changed = {"params": params, "model_state": model_state, "opt_state": opt_state, "residuals": residuals}
    return sums, replace(state, **changed), norm


def _apart(parts: StepParts, state: State, batch: Batch) -> tuple[Sums, State, jax.Array]:
    """An update of each worker's own: (sums, the state after it, the largest of their gradients' norms)."""
    assert parts.exchange is not None
    sums, model_state, _ = by_replica(parts, parts.exchange, state, batch)
    each = jax.vmap(partial(_updated, parts), spmd_axis_name=AXIS)
    params, opt_state, norms = each(state.workers["params"], state.opt_state, sums.grads)
    changed = {
        "model_state": model_state,
        "opt_state": opt_state,
        "workers": {**state.workers, "params": params},
    }
    return sums, replace(state, **changed), jnp.max(norms)


def _met(parts: StepParts, state: State) -> State:
    """After every so many steps the workers meet."""
    assert parts.exchange is not None and parts.apart is not None
    meet = partial(outer_step, parts, parts.exchange, parts.apart)
    with use_layout(parts.layout), jax.named_scope(MEETING):
        return jax.lax.cond(state.step % parts.apart.inner_steps == 0, meet, lambda state: state, state)


def eval_step(parts: StepParts, params: nnx.State, model_state: nnx.State, batch: Batch) -> Metrics:
    """Sums of loss, weight and extras over a batch of [B, ...] arrays, without dropout."""
    with use_layout(parts.layout):
        if parts.pipelining is not None:
            loss, weight, extras = evaluated(
                parts.graph, parts.layout, parts.pipelining, params, model_state, batch
            )
        else:
            model = nnx.merge(parts.graph, params, model_state, copy=True)
            model.eval()
            loss, weight, extras = normalised(parts.loss(model, batch))
    result = {"loss": loss, "weight": weight}
    for name, (total, count) in extras.items():
        result[f"extra/{name}/sum"], result[f"extra/{name}/weight"] = total, count
    return result

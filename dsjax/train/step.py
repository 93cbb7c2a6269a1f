"""One training step as a pure function:

    loss -> gradients (accumulated over microbatches) -> exchange -> finite? clip -> update

Everything here is traced once and compiled once; sums and weights are added over microbatches and
devices in fp32 (gradients as `precision.gradients` says) and divided once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.grad_sync import AXIS, mean
from dsjax.mesh import Layout, gather_all, use_layout
from dsjax.models.spec import Tally
from dsjax.precision.loss_scale import next_scale, nominal_weight
from dsjax.stability.clip import clipped
from dsjax.train.diloco import MEETING, outer_step
from dsjax.train.formats import moved
from dsjax.train.formats import norm as norm_of
from dsjax.train.gradients import (
    Batch,
    Microbatches,
    StepParts,
    Sums,
    accumulated,
    at_rest,
    positions_of,
)
from dsjax.train.injected import refuse_idle
from dsjax.train.losses import Extras, normalised
from dsjax.train.pipelined import evaluated, pipelined
from dsjax.train.replicas import by_replica
from dsjax.train.state import State, add_exactly
from dsjax.train.votes import counted

Metrics = dict[str, jax.Array]


def _summed(parts: StepParts, state: State, batch: Batch, seed: Any) -> tuple[Sums, nnx.State, Any]:
    """Sums over the whole batch with the mean gradient, the model's state, and residuals.

    Over a pipeline, replica by replica, or one microbatch after the other.
    """
    layout = parts.layout
    if parts.pipelining is not None:
        (loss, weight, extras), grads, residuals = pipelined(
            parts.graph, layout, parts.pipelining, parts.exchange, state, batch, seed, parts.injected
        )
        return Sums(loss, weight, extras, grads), state.model_state, residuals
    if parts.exchange is not None:
        return by_replica(parts, parts.exchange, state, batch, seed)
    params = gather_all(state.params) if layout.fsdp_gather == "step" else state.params
    given = Microbatches(batch, positions_of(batch), state.step, seed=seed, data_step=state.data_step)
    sums, model_state = accumulated(parts, params, state.model_state, given, len(given))
    grads = mean(at_rest(layout, sums.grads), given.unit(sums.weight))
    return replace(sums, grads=grads), model_state, state.residuals


def _gone_wrong(parts: StepParts, state: State, sums: Sums) -> Sums:
    """The sums with the faults that were asked for of them."""
    for wrong in parts.numbers.wrong:
        if wrong.inside:
            continue
        strikes = (state.data_step >= wrong.first) & (state.data_step <= wrong.last)
        factor = jnp.where(strikes, wrong.factor, 1.0)
        grads = jax.tree.map(lambda g: g * factor.astype(g.dtype), sums.grads)  # noqa: B023
        sums = replace(sums, loss=sums.loss * factor, grads=grads)
    return sums


def loss_seed(state: State, batch: Batch) -> jax.Array | None:
    """What the gradient of a loss starts from, for it to stay in fp16's range; None: 1."""
    scaling = state.guards.get("scaling")
    return None if scaling is None else scaling.scale / nominal_weight(batch)


def _bounded(parts: StepParts, grads: Any, norm: jax.Array) -> Any:
    """Gradients, scaled down where their norm is over the fixed bound."""
    if parts.max_grad_norm is None:
        return grads
    scale = jnp.minimum(1.0, parts.max_grad_norm / jnp.maximum(norm, 1e-12))
    return jax.tree.map(lambda g: g * scale, grads)


def _updated(parts: StepParts, state: State, params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
    """(parameters, optimizer state) after an update."""
    updates, opt_state = parts.optimizer.update(grads, opt_state, params)
    if parts.numbers.cooled is not None:
        factor = _cooled(parts, state)
        updates = jax.tree.map(lambda u: u * factor.astype(u.dtype), updates)
    return moved(parts.numbers, params, updates, state.updates), opt_state


def _cooled(parts: StepParts, state: State) -> Any:
    """Factor of the learning rate: below 1 for a while after a rollback."""
    if parts.numbers.cooled is None:
        return 1.0
    return jnp.where(state.updates < state.guards["cooling"].until, parts.numbers.cooled, 1.0)


def train_step(parts: StepParts, state: State, batch: Batch, votes: jax.Array) -> tuple[State, Metrics]:
    """One optimizer step.

    Args:
      batch: arrays [A, B / A, ...]: A microbatches of the global batch.
      votes: int32 [devices], what each device's process asks for (`votes`).

    Returns:
      The next state and the step's metrics (scalars, the same on every device). A step whose loss
      or gradient is not finite, or in which no example has weight, changes nothing but the step
      number, the data position, the count of skipped steps and the loss scale. Overflows that a
      lower loss scale will end are not counted as skipped in a row.
    """
    with use_layout(parts.layout):
        found = _apart(parts, state, batch) if parts.apart else _together(parts, state, batch)
        sums, norm, again = found.sums, found.norm, found.again

        def update(state: State) -> State:
            after = found.update(state)
            if parts.after_step is None:
                return after
            return replace(after, model_state=parts.after_step(after.model_state, sums.extras))

        applied = jnp.isfinite(sums.loss) & jnp.isfinite(norm) & (sums.weight > 0)
        after = guarded(parts.layout, applied, update, state)
    refuse_idle(parts.injected)
    weight = jnp.maximum(sums.weight, jnp.finfo(jnp.float32).tiny)
    metrics = {
        "loss": sums.loss / weight,
        "tokens": sums.weight,
        "grad_norm": norm,
        "applied": applied,
        "asked": counted(votes),
        **told(sums.extras),
    }
    overflow = jnp.isfinite(sums.loss) & ~jnp.isfinite(norm)
    if again is not None:
        metrics["recomputed"] = again & applied
        overflow = again & applied  # what is not finite in fp32 either is no matter of scale
    guards, excused = _scaled(parts, after, overflow)
    if again is not None:
        excused = jnp.bool_(False)  # fp32 was no better
    if "scaling" in guards:
        metrics |= {
            "loss_scale": state.guards["scaling"].scale,
            "overflows": guards["scaling"].overflows,
            "overflow": excused,
        }
    if parts.schedule is not None:
        rate = jnp.asarray(parts.schedule(state.updates), jnp.float32)
        metrics["learning_rate"] = rate * _cooled(parts, state)
    after = replace(
        after,
        step=state.step + 1,
        updates=state.updates + applied,
        skipped=jnp.where(applied, 0, state.skipped + ~excused),
        guards=guards,
        data_step=state.data_step + 1,
        tokens_seen=add_exactly(state.tokens_seen, sums.weight),
    )
    if parts.apart:
        after = _met(parts, after)
    metrics["skipped"], metrics["tokens_seen"] = after.skipped, after.tokens_seen
    return after, metrics


def told(extras: Extras) -> Metrics:
    """What metrics say of extras: the mean of a number; how uneven a `Tally` is."""
    found = {}
    for name, value in extras.items():
        if isinstance(value, Tally):
            uneven = jnp.max(value.sum, -1) / jnp.maximum(jnp.mean(value.sum, -1), 1e-30)
            found[f"extra/{name}_max_over_mean"] = jnp.max(uneven)
        else:
            found[f"extra/{name}"] = value[0] / jnp.maximum(value[1], 1e-30)
    return found


def guarded(layout: Layout, applied: jax.Array, update: Callable[[State], State], state: State) -> State:
    """The updated state if the step counts, else as it was, to the bit."""
    if layout.on_cpu and layout.alone:
        # In place: what a matrix product reads (muon's momentum) would be written once more to be chosen from. Other
        # devices would wait for the host to learn the number of turns; on several, the update's collectives would
        # run beside others, which a CPU's may not.
        return jax.lax.fori_loop(0, applied.astype(jnp.int32), lambda _, state: update(state), state)
    return jax.tree.map(
        lambda new, old: jnp.where(applied, new, old) if new is not old else old, update(state), state
    )


def _scaled(parts: StepParts, state: State, overflow: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    """The guards with the loss scale after a step, and whether a lower scale may be all that the step wanted."""
    config = parts.numbers.loss_scale
    if config is None:
        return state.guards, jnp.bool_(False)
    now = state.guards["scaling"]
    scaling = next_scale(config, now, overflow)
    return {**state.guards, "scaling": scaling}, overflow & (now.scale > config.minimum)


@dataclass(frozen=True)
class _Found:
    """What a step has computed before anything is changed.

    Attributes:
      sums: over the whole batch.
      norm: the gradient's; the largest of those of workers that train apart.
      update: the state -> the state with it.
      again: whether all was computed again; None: it never is.
    """

    sums: Sums
    norm: jax.Array
    update: Callable[[State], State]
    again: jax.Array | None = None


def _together(parts: StepParts, state: State, batch: Batch) -> _Found:
    """The mean gradient of all, for one update."""
    sums, model_state, residuals = _summed(parts, state, batch, loss_seed(state, batch))
    sums = _gone_wrong(parts, state, sums)
    norm, again = norm_of(at_rest(parts.layout, sums.grads)), None
    if parts.exact is not None:
        exact = parts.exact
        again = ~(jnp.isfinite(sums.loss) & jnp.isfinite(norm)) & (sums.weight > 0)

        def anew(_: Any) -> Any:
            found = _summed(exact, state, batch, None)
            return *found, norm_of(at_rest(exact.layout, found[0].grads))

        # All devices see the same loss and norm, so all take the same branch.
        given = (sums, model_state, residuals, norm)
        sums, model_state, residuals, norm = jax.lax.cond(again, anew, lambda given: given, given)

    def update(state: State) -> State:
        grads = at_rest(parts.layout, sums.grads)
        clip, guards = parts.numbers.clip, dict(state.guards)
        if clip is not None:
            grads, guards["clipping"] = clipped(clip, parts.max_grad_norm, guards["clipping"], grads)
        else:
            grads = _bounded(parts, grads, norm)
        params, opt_state = _updated(parts, state, state.params, state.opt_state, grads)
        kept = {"model_state": model_state, "residuals": residuals, "guards": guards}
        return replace(state, params=params, opt_state=opt_state, **kept)

    return _Found(sums, norm, update, again)


def _apart(parts: StepParts, state: State, batch: Batch) -> _Found:
    """Each worker's own gradient, for an update of its own."""
    assert parts.exchange is not None
    sums, model_state, _ = by_replica(parts, parts.exchange, state, batch, loss_seed(state, batch))
    sums = _gone_wrong(parts, state, sums)

    norms = jax.vmap(norm_of, spmd_axis_name=AXIS)(sums.grads)

    def update(state: State) -> State:
        def one(params: Any, opt_state: Any, grads: Any, norm: jax.Array) -> tuple[Any, Any]:
            return _updated(parts, state, params, opt_state, _bounded(parts, grads, norm))

        each = jax.vmap(one, spmd_axis_name=AXIS)
        params, opt_state = each(state.workers["params"], state.opt_state, sums.grads, norms)
        workers = {**state.workers, "params": params}
        return replace(state, model_state=model_state, opt_state=opt_state, workers=workers)

    return _Found(sums, jnp.max(norms), update)


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
        if jnp.ndim(total):
            continue  # how uneven several batches are together does not follow from each
        result[f"extra/{name}/sum"], result[f"extra/{name}/weight"] = total, count
    return result

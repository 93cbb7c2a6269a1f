"""One training step as a pure function:

    loss -> gradients (accumulated over microbatches) -> finite? clip -> update

Everything here is traced once and compiled once; sums and weights are added over microbatches and
devices in fp32 and divided once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from dsjax.mesh import Layout, gather_all, use_layout
from dsjax.train.losses import Extras, normalised
from dsjax.train.pipelined import Pipelining, evaluated, pipelined
from dsjax.train.randomness import ExampleContext, at_step, examples
from dsjax.train.state import State, add_exactly

Batch = Mapping[str, Any]
Loss = Callable[[nnx.Module, Any], Any]
Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class StepParts:
    """What a step is made of.

    Attributes:
      graph: the model's structure, from `nnx.split`.
      loss: ``loss(model, batch) -> (sum, weight[, extras])``.
      optimizer: an optax transformation over the trainable parameters.
      schedule: number of updates -> learning rate, for the record; None where it is not known.
      layout: mesh and rules.
      max_grad_norm: global gradient norm above which gradients are scaled down; None: never.
      remat: "none", or "full" or "dots" around a loss whose model does not do it by layer.
      pipelining: the stages and schedule of a mesh with `pipeline`; the loss is then theirs.
    """

    graph: nnx.GraphDef
    loss: Loss
    optimizer: optax.GradientTransformation
    schedule: Callable[[jax.Array], jax.Array] | None
    layout: Layout
    max_grad_norm: float | None = None
    remat: str = "none"
    pipelining: Pipelining | None = None


@dataclass
class Sums:
    """Sums over examples: loss, weight, extras, and the gradient of the loss's sum."""

    loss: jax.Array
    weight: jax.Array
    extras: Extras
    grads: Any


jax.tree_util.register_dataclass(Sums, ["loss", "weight", "extras", "grads"], [])


def microbatch_gradients(
    parts: StepParts, params: nnx.State, model_state: nnx.State, batch: Batch, place: tuple[Any, Any, Any]
) -> tuple[Sums, nnx.State]:
    """Sums and gradient of one microbatch, and the model's state after it.

    Args:
      place: (step, index of the microbatch, int32 [B] each example's place in the global batch).
    """
    step, index, positions = place

    def total(params: nnx.State, model_state: nnx.State) -> tuple[jax.Array, Any]:
        model = nnx.merge(parts.graph, params, at_step(model_state, step, index), copy=True)
        model.train()
        with examples(ExampleContext(positions)):
            loss, weight, extras = normalised(parts.loss(model, batch))
        return loss, (weight, extras, _kept_state(model, model_state))

    if parts.remat == "full":
        total = jax.checkpoint(total)
    elif parts.remat == "dots":
        total = jax.checkpoint(total, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    (loss, (weight, extras, new_state)), grads = jax.value_and_grad(total, has_aux=True)(params, model_state)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    return Sums(loss, weight, extras, grads), new_state


def _kept_state(model: nnx.Module, before: nnx.State) -> nnx.State:
    """The model's non-trainable variables after the loss; random streams go back to their start.

    A stream's position is a function of the step (`randomness.at_step`), not something to carry.
    """
    after = dict(nnx.state(model).flat_state())

    def kept(path: tuple[Any, ...], variable: Any) -> Any:
        if isinstance(variable, nnx.RngState):
            return variable
        return variable.replace(jax.lax.stop_gradient(after[path][...]).astype(variable[...].dtype))

    return nnx.State.from_flat_path({path: kept(path, v) for path, v in before.flat_state()})


def accumulated(parts: StepParts, state: State, batch: Batch, params: nnx.State) -> tuple[Sums, nnx.State]:
    """Sums and gradients over the microbatches of a batch whose leaves are [A, B / A, ...]."""
    leading = jax.tree.leaves(batch)[0].shape[:2]
    positions = jnp.arange(leading[0] * leading[1], dtype=jnp.int32).reshape(leading)
    if leading[0] == 1:
        first = jax.tree.map(lambda x: x[0], batch)
        return microbatch_gradients(parts, params, state.model_state, first, (state.step, 0, positions[0]))

    def one(index: Any, carry: tuple[Sums, nnx.State]) -> tuple[Sums, nnx.State]:
        microbatch, places = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), (batch, positions)
        )
        more, model_state = microbatch_gradients(
            parts, params, carry[1], microbatch, (state.step, index, places)
        )
        return jax.tree.map(jnp.add, carry[0], more), model_state

    shapes = jax.eval_shape(
        lambda p, s, b: microbatch_gradients(parts, p, s, b, (state.step, 0, positions[0]))[0],
        params, state.model_state, jax.tree.map(lambda x: x[0], batch),
    )  # fmt: skip
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    zeros.grads = _at_rest(parts.layout, zeros.grads)
    # To XLA the number of turns is unknown: it would write two of them out, or peel one off, and then hold the
    # activations of both.
    first = jax.lax.optimization_barrier(jnp.int32(0))
    return jax.lax.fori_loop(first, leading[0], one, (zeros, state.model_state))


def _summed(parts: StepParts, state: State, batch: Batch) -> tuple[Sums, nnx.State]:
    """Sums and gradients of the whole batch, over a pipeline or one microbatch after the other."""
    layout = parts.layout
    if parts.pipelining is not None:
        (loss, weight, extras), grads = pipelined(parts.graph, layout, parts.pipelining, state, batch)
        return Sums(loss, weight, extras, grads), state.model_state
    params = gather_all(state.params) if layout.fsdp_gather == "step" else state.params
    return accumulated(parts, state, batch, params)


def _at_rest(layout: Layout, tree: Any) -> Any:
    """Pins gradients to the places of their parameters."""
    if layout.mesh.size == 1:
        return tree
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, layout.param_shardings(tree))


def train_step(parts: StepParts, state: State, batch: Batch, votes: jax.Array) -> tuple[State, Metrics]:
    """One optimizer step.

    Args:
      batch: arrays [A, B / A, ...]: A microbatches of the global batch.
      votes: int32 [devices], not 0 where a process was asked to stop.

    Returns:
      The next state and the step's metrics (scalars, the same on every device). A step whose loss
      or gradient is not finite, or in which no example has weight, changes nothing but the step
      number, the data position and the count of skipped steps.
    """
    layout = parts.layout
    with use_layout(layout):
        sums, model_state = _summed(parts, state, batch)
    grads = _at_rest(layout, sums.grads)
    weight = jnp.maximum(sums.weight, jnp.finfo(jnp.float32).tiny)
    grads = jax.tree.map(lambda g: g / weight, grads)
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(sums.loss) & jnp.isfinite(norm)
    applied = finite & (sums.weight > 0)
    if parts.max_grad_norm is not None:
        scale = jnp.minimum(1.0, parts.max_grad_norm / jnp.maximum(norm, 1e-12))
        grads = jax.tree.map(lambda g: g * scale, grads)
    updates, opt_state = parts.optimizer.update(grads, state.opt_state, state.params)
    new_params = optax.apply_updates(state.params, updates)

    def choose(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda n, o: jnp.where(applied, n, o) if n is not o else o, new, old)

    metrics = {
        "loss": sums.loss / weight,
        "tokens": sums.weight,
        "grad_norm": norm,
        "applied": applied,
        "stop": jnp.sum(votes) > 0,
        **{f"extra/{name}": s / jnp.maximum(w, 1e-30) for name, (s, w) in sums.extras.items()},
    }
    if parts.schedule is not None:
        metrics["learning_rate"] = jnp.asarray(parts.schedule(state.updates), jnp.float32)
    next_state = State(
        step=state.step + 1,
        updates=state.updates + applied,
        skipped=jnp.where(applied, 0, state.skipped + 1),
        data_step=state.data_step + 1,
        tokens_seen=add_exactly(state.tokens_seen, sums.weight),
        params=choose(new_params, state.params),
        model_state=choose(model_state, state.model_state),
        opt_state=choose(opt_state, state.opt_state),
    )
    metrics["skipped"] = next_state.skipped
    metrics["tokens_seen"] = next_state.tokens_seen
    return next_state, metrics


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

"""The last microbatch of a step, its layers in groups: a group's gradients travel while the next is computed.

The backward pass of a stack of layers is one loop, which yields its gradients when it ends, so nothing could travel
beside it.  Here it is a loop a group.  What was summed over the microbatches before is added group by group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from dsjax.grad_sync import AXIS, Exchange, mean, seed_of
from dsjax.grad_sync.residuals import part
from dsjax.mesh import Layout, map_named, named_leaves
from dsjax.models.calls import LOSS, passing
from dsjax.train.formats import held_gradients
from dsjax.train.gradients import Microbatches, StepParts, Sums, accumulated, computing, started
from dsjax.train.losses import Extras, merged, normalised, split_stack, stack_of, through_layers, whole_stack
from dsjax.train.randomness import at_step
from dsjax.train.state import statistics


def in_groups(parts: StepParts, exchange: Exchange, model_state: nnx.State) -> bool:
    """Whether there are several groups, and the model keeps nothing that its layers would have to hand on."""
    return parts.stages is not None and exchange.groups is not None and not statistics(model_state)


def exchanged_in_groups(
    parts: StepParts, exchange: Exchange, params: Any, model_state: Any, residuals: Any, given: Microbatches
) -> tuple[Sums, nnx.State, Any]:
    """Sums over all replicas with the mean gradient, the model's state, and residuals."""
    before = None
    if len(given) > 1:
        before, model_state = accumulated(parts, params, model_state, given, len(given) - 1)
        # Not before the others are through: its activations would be held beside theirs.
        after, rows = (before.loss, before.weight), (given.batch, given.positions)
        (before.loss, before.weight), rows = lax.optimization_barrier((after, rows))
        before, (batch, positions) = _all_there(parts.layout, (before, rows))
        given = replace(given, batch=batch, positions=positions)
    last = _Microbatch(parts, params, model_state, given, len(given) - 1)
    assert exchange.groups is not None
    ends = [sum(exchange.groups[: k + 1]) for k in range(len(exchange.groups))]
    windows = [(end - depth, end) for end, depth in zip(ends, exchange.groups, strict=True)]

    # Forward.
    x, back_to_embed = jax.vjp(last.embed, last.rest)
    added, back = jnp.zeros(()), []
    extras: Extras = {}
    for start, end in windows:
        (x, more), back_through, named = jax.vjp(
            last.group(start, end), last.handles(start, end), x, has_aux=True
        )
        added, extras = added + more, jax.tree.map(jnp.add, extras, named) if extras else named
        back.append(back_through)
    loss, back_from_head, (weight, named) = jax.vjp(last.head, last.rest, x, has_aux=True)
    sums = (loss + added, weight, merged(extras, named))
    if before is not None:
        sums = jax.tree.map(jnp.add, sums, (before.loss, before.weight, before.extras))
    sums, seed = _all_there(parts.layout, (lax.psum(sums, AXIS), started(loss, given.seed)))

    # Backward; what is complete leaves at once.
    leaving = _Leaving(parts, exchange, residuals, before, given.unit(sums[1]), seed_of(given.step))
    d_rest, dx = back_from_head(seed)
    of_embed = _used(last.embed, last.rest)
    d_rest = named_leaves(d_rest)
    dx = leaving.whole({path: g for path, g in d_rest.items() if path not in of_embed}, dx)
    for index, (start, end) in [*enumerate(windows)][::-1]:
        grads, dx = back[index]((dx, started(added, given.seed)))
        stacked = {f"{last.stages.layers}/{path}": g for path, g in named_leaves(grads).items()}
        dx = leaving.window(stacked, index, start, end, dx)
    (d_embed,) = back_to_embed(dx)
    leaving.whole(
        {path: _wide_sum(d_rest[path], g) for path, g in named_leaves(d_embed).items() if path in of_embed},
        dx,
    )
    grads = map_named(lambda path, _: leaving.done[path], params)
    loss, weight, extras = sums
    return Sums(loss, weight, extras, grads), model_state, leaving.residuals()


def _wide_sum(a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum in fp32, as it is sent: of bf16 ones nothing is lost to rounding."""
    return a.astype(jnp.float32) + b.astype(jnp.float32)


class _Microbatch:
    """One microbatch of a model in stages: what comes before its layers, groups of them, what comes after."""

    def __init__(self, parts: StepParts, params: Any, model_state: Any, given: Microbatches, index: int):
        assert parts.stages is not None
        self.stages, self._graph = parts.stages, parts.graph
        batch, positions, number = given.at(index)
        self._batch = self.stages.prepare(batch)
        self._now = partial(computing, parts, given, positions)
        self._states = split_stack(self.stages, at_step(model_state, given.step, number))
        self._layers, self.rest = split_stack(self.stages, params)
        self._layer_graph = nnx.split(stack_of(self._model(self.rest), self.stages))[0]
        frozen, self._others = nnx.split_state(self._states[0], nnx.Param, ...)
        self._whole = nnx.merge_state(self._layers, frozen)

    def _model(self, rest: Any) -> nnx.Module:
        variables = (
            whole_stack(self.stages, stack, others)
            for stack, others in zip((self._layers, self._states[0]), (rest, self._states[1]), strict=True)
        )
        model = nnx.merge(self._graph, *variables, copy=True)
        model.train()
        return model

    def embed(self, rest: Any) -> Any:
        """The input of the first layer."""
        with self._now():
            return self.stages.embed(self._model(rest), self._batch)

    def head(self, rest: Any, x: Any) -> tuple[jax.Array, Any]:
        """The loss, and (weight, extras)."""
        with self._now():
            loss, weight, extras = normalised(self.stages.head(self._model(rest), x, self._batch))
            loss = passing(LOSS, loss)
        return loss, (weight, extras)

    def handles(self, start: int, end: int) -> Any:
        """What takes the gradients of layers: nothing is computed with its numbers."""
        return _handles(self._layers, start, end)

    def group(self, start: int, end: int) -> Any:
        """A function of (handles, x) through layers [start, end): ((x, what they add to the loss), extras)."""
        others = jax.tree.map(lambda leaf: leaf[start:end], self._others)
        whole = _handles(self._whole, start, end)

        def run(handles: Any, x: Any) -> Any:
            variables = nnx.merge_state(whole, handles)
            module = nnx.merge(self._layer_graph, variables, others, copy=True)
            module.train()
            with self._now():
                x, added, extras = through_layers(
                    self.stages, module, x, self._batch, source=(self._whole, start)
                )
            return (x, added), extras

        return run


def _handles(layers: Any, start: int, end: int) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros((end - start, *leaf.shape[1:]), leaf.dtype), layers)


class _Leaving:
    """Gradients on their way.

    Attributes:
      done: path -> the mean gradient, of what has come back.
    """

    def __init__(
        self,
        parts: StepParts,
        exchange: Exchange,
        residuals: Any,
        before: Sums | None,
        weight: Any,
        seed: Any,
    ):
        self._layout, self._exchange, self._old = parts.layout, exchange, residuals
        self._numbers = parts.numbers
        self._weight, self._seed = weight, seed
        self.done: dict[str, Any] = {} if before is None else named_leaves(before.grads)
        self._summed = before is not None
        self._kept: dict[str, list[Any]] = {}
        self._before: jax.Array | None = None

    def whole(self, grads: Mapping[str, Any], x: Any) -> Any:
        """Sends whole tensors. Returns x, for what is computed next."""
        if self._summed:
            grads = {path: _wide_sum(self.done[path], g) for path, g in grads.items()}
        sent, x = self._send(grads, 0, x)
        self.done |= sent
        return x

    def window(self, grads: Mapping[str, Any], index: int, start: int, end: int, x: Any) -> Any:
        """Sends layers [start, end) of stacked tensors, the last ones first."""
        if self._summed:
            grads = {path: _wide_sum(self.done[path][start:end], g) for path, g in grads.items()}
        sent, x = self._send(grads, index, x)
        for path, gradient in sent.items():
            if path not in self.done:
                self.done[path] = jnp.zeros((end, *gradient.shape[1:]), gradient.dtype)
            gradient = gradient.astype(self.done[path].dtype)
            # In place: a list of windows would be there twice when it is joined.
            self.done[path] = lax.dynamic_update_slice_in_dim(self.done[path], gradient, start, 0)
        return x

    def _send(self, grads: Mapping[str, Any], window: int, x: Any) -> tuple[dict[str, Any], Any]:
        if not grads:
            return {}, x
        grads = {path: g.astype(jnp.float32) for path, g in grads.items()}
        grads, x = _all_there(self._layout, (grads, x))
        mine = part(self._exchange, self._old, list(grads), window)
        if self._before is not None:
            # One after the other: XLA would join small ones, and wait for the last before it sends the first.
            grads, _ = lax.optimization_barrier((grads, self._before))
        seed = self._seed + jnp.uint32(window << 20)
        sent, new = self._exchange(self._layout, mean(grads, self._weight), mine, seed)
        self._before = next(iter(sent.values())).ravel()[0]
        sent = held_gradients(self._layout, self._numbers, sent)
        for path in grads:
            self._kept.setdefault(path, []).insert(
                0, {name: held[path] for name, held in new.items() if path in held}
            )
        return _all_there(self._layout, (sent, x))

    def residuals(self) -> Any:
        """The residuals after all has been sent."""
        return {
            name: {path: _joined([window[name] for window in self._kept[path]]) for path in held}
            for name, held in self._old.items()
        }


def _all_there(layout: Layout, values: Any) -> Any:
    """The values, on a CPU none before all are there.

    A device of a CPU waits in a collective, so all have to come to their collectives in one order: nothing may run
    beside an exchange.  Of barriers a CPU's compiler keeps nothing; a loop starts once all that it changes is there.
    """
    if not layout.on_cpu:
        return values

    def turn(i: Any, values: Any) -> Any:
        return jax.tree.map(lambda v: jnp.where(i < 0, jnp.zeros_like(v), v), values)

    # To XLA the number of turns is unknown: a loop of one it would write out.
    return lax.fori_loop(lax.optimization_barrier(jnp.int32(0)), 1, turn, values)


def _joined(windows: Sequence[jax.Array]) -> jax.Array:
    return windows[0] if len(windows) == 1 else jnp.concatenate(windows, axis=-1)


def _used(function: Any, variables: Any) -> set[str]:
    """Names of the variables that a function of them computes with."""
    jaxpr = jax.make_jaxpr(function)(variables).jaxpr
    read = {id(v) for equation in jaxpr.eqns for v in equation.invars} | {id(v) for v in jaxpr.outvars}
    return {name for name, v in zip(named_leaves(variables), jaxpr.invars, strict=True) if id(v) in read}

"""Gradients over a pipeline: a model declared in stages, as the pure functions that the executor runs.

One shard_map, manual over `pipeline` and the batch's axes: gradients of all microbatches add up on their device
and cross the data axes once, at the end.  `tensor` and `context` stay with the compiler.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from dsjax.errors import ConfigError
from dsjax.grad_sync import Exchange, mean, residual_specs, seed_of
from dsjax.mesh import (
    BATCH_AXES,
    Layout,
    batch_shards,
    gather_all,
    gathered,
    map_named,
    use_layout,
)
from dsjax.mesh.axes import SHARD_AXES
from dsjax.mesh.gather import gather_local, on_own_part
from dsjax.mesh.inside import inside, left_spec, manual_specs, shard_map_over
from dsjax.mesh.layout import axes_of_entry
from dsjax.mesh.remat import PRODUCTS
from dsjax.models import Stages
from dsjax.models.calls import LOSS, in_layer, passing
from dsjax.pipelining.executor import AXIS, UNITS, Parts, Pipeline, Work
from dsjax.pipelining.partition import Partition
from dsjax.pipelining.schedule import forward_only
from dsjax.pipelining.slots import allot
from dsjax.train.injected import Injected, injecting
from dsjax.train.losses import layer_result, normalised, split_stack, stack_of, whole_stack
from dsjax.train.randomness import ExampleContext, at_step, examples

# The axes that the shard_map is manual over.
_LOCAL = (AXIS, *BATCH_AXES)


@dataclass(frozen=True)
class Pipelining:
    """How a step is pipelined: the model's stages, and the schedule laid out for it."""

    stages: Stages
    work: Work


@dataclass(frozen=True)
class _Call:
    """What the functions below share: a model's structure, its layout inside the shard_map, train or eval, faults."""

    graph: Any
    stages: Stages
    layout: Layout
    training: bool
    injected: tuple[Injected, ...] = ()

    def split(self, state: Any) -> tuple[Any, Any]:
        """A state as (the stack's own variables, the rest)."""
        return split_stack(self.stages, state)

    def whole(self, stacked: Any, rest: Any) -> Any:
        """The opposite of `split`."""
        return whole_stack(self.stages, stacked, rest)


def pipelined(
    graph: Any,
    layout: Layout,
    pipelining: Pipelining,
    exchange: Exchange | None,
    state: Any,
    batch: Any,
    seed: Any = None,
    injected: tuple[Injected, ...] = (),
) -> tuple[tuple[Any, Any, Any], Any, Any]:
    """Sums (loss, weight, extras), the mean gradient in its parameters' places, fp32, and residuals.

    Args:
      exchange: of gradients between the replicas of `data`; None: there is one.
      batch: arrays [A * M, rows, ...]: M microbatches a pass of the pipeline, A passes.
      seed: float32 [], what the gradient of a loss starts from; None: 1.
      injected: faults inside the model.
    """
    call, body, specs, arguments = _set_up(graph, layout, pipelining, state, batch, seed, injected)

    def gradients(residuals: Any, *arguments: Any) -> Any:
        return body(lambda stages: stages.gradients(exchange, residuals), *arguments)

    kept = residual_specs(exchange, call.layout)
    mapped = shard_map_over(call.layout, gradients, (kept, *specs), (P(), specs[0], kept))
    return mapped(state.residuals, *arguments)


def probed(
    graph: Any, layout: Layout, pipelining: Pipelining, state: Any, batch: Any, after: Any
) -> tuple[Any, Any]:
    """Every device computes its stage of one microbatch, alone.

    Args:
      after: int32 [devices], zeros: a device begins when its own number is there.

    Returns:
      Numbers that mean nothing, and int32 [devices], zeros: each there when its device is done.
    """
    call, body, specs, arguments = _set_up(graph, layout, pipelining, state, batch)
    probe = partial(body, lambda stages: stages.probe())
    return shard_map_over(call.layout, probe, specs, P((AXIS, *BATCH_AXES)))(*arguments), after * 2


def _set_up(
    graph: Any,
    layout: Layout,
    pipelining: Pipelining,
    state: Any,
    batch: Any,
    seed: Any = None,
    injected: tuple[Injected, ...] = (),
) -> Any:
    """What stands around the body: (call, a function of a task and the arguments, their specs, the arguments)."""
    within = inside(layout, _LOCAL, state.params, state.model_state)
    call = _Call(graph, pipelining.stages, within, True, injected)
    count = pipelining.work.schedule.microbatches
    lead = jax.tree.leaves(batch)[0].shape[:2]
    places = jnp.arange(lead[0] * lead[1], dtype=jnp.int32).reshape(lead)
    batch, places = jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]), (batch, places))

    def body(task: Any, params: Any, model_state: Any, batch: Any, places: Any, now: Any) -> Any:
        with use_layout(call.layout):
            return task(_Body(call, pipelining.work, params, model_state, batch, places, *now))

    specs = [manual_specs(call.layout, tree) for tree in (state.params, state.model_state)]
    rows = P(None, None, BATCH_AXES)
    given = (state.params, state.model_state, batch, places, (state.step, seed, state.data_step))
    return call, body, (*specs, rows, rows, P()), given


class _Body:
    """The stages of one device, set up inside the shard_map."""

    def __init__(
        self,
        call: _Call,
        work: Work,
        params: Any,
        model_state: Any,
        batch: Any,
        places: Any,
        step: Any,
        seed: Any = None,
        data_step: Any = None,
    ):
        self.call, self.work, self.step, self.seed = call, work, step, seed
        self.data_step = data_step
        self.batch, self.places = batch, places
        params, model_state = (_over_stages(call.layout, tree) for tree in (params, model_state))
        if call.layout.fsdp_gather == "step":
            params, model_state = gather_all(params), gather_all(model_state)
        self.params = params
        self.layers, self.rest = call.split(params)
        self.states, self.others = call.split(model_state)

    def pipeline(self, index: Any) -> Pipeline:
        """The pipeline over the microbatches of one pass."""
        data = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), (self.batch, self.places)
        )
        first, shards = index * self.work.schedule.microbatches, batch_shards(self.call.layout.mesh)
        # Each shard of the batch draws its own random numbers (dropout's depend on the example alone).
        shard = lax.axis_index(BATCH_AXES)
        stack, rest = (self.layers, self.states), (self.rest, self.others)
        when = lambda m: (self.step, (first + m) * shards + shard)  # noqa: E731
        parts = _parts(self.call, stack, rest, data, when, self.data_step, sum(self.work.counts))
        states = (self._numbers(), self.states)
        ordered = self.call.layout.on_cpu
        return Pipeline(parts, self.work, self.layers, states, self.rest, ordered=ordered, seed=self.seed)

    def _numbers(self) -> jax.Array | None:
        """int32 [slots of this stage], the layer in each; None where nobody asks."""
        if not self.call.injected:
            return None
        schedule = self.work.schedule
        slots = Partition(schedule.stages, schedule.virtual, self.work.counts).slots
        return jnp.asarray(slots.reshape(schedule.stages, -1))[lax.axis_index(AXIS)]

    def start(self) -> tuple[Pipeline, tuple[Any, Any, Any]]:
        """The first pass's pipeline, and sums and gradients before its first microbatch."""
        first = self.pipeline(0)
        zeros = map_named(partial(_accumulator, self.call.layout), self.params)
        return first, (first.sums, *self.call.split(zeros))

    def gradients(self, exchange: Exchange | None, residuals: Any) -> tuple[Any, Any, Any]:
        """Sums over all devices, mean gradients as their parameters lie, and residuals."""
        first, carry = self.start()
        if (passes := self.places.shape[0]) == 1:
            carry = first.gradients(*carry)
        else:
            carry = lax.fori_loop(0, passes, lambda i, carry: self.pipeline(i).gradients(*carry), carry)
        layout = self.call.layout
        sums = lax.psum(carry[0], layout.local)
        unit = sums[1] if self.seed is None else sums[1] * self.seed
        grads = map_named(partial(_reduced, layout), mean(self.call.whole(*carry[1:]), unit))
        if exchange is not None:
            grads, residuals = exchange(layout, grads, residuals, seed_of(self.step))
        return sums, grads, residuals

    def probe(self) -> jax.Array:
        """float32 [1], made of all that a forward and a backward of this device's stage give."""
        first, start = self.start()
        carry = first.one_of_each(*start)
        return jnp.stack([jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(carry)]).sum()[None]


def _parts(call: _Call, stack: Any, rest: Any, data: Any, when: Any, data_step: Any, depth: int) -> Parts:
    """The executor's functions: `stack` and `rest` are pairs (parameters, other variables).

    To the executor the other variables of a layer are (its number or None, the variables).
    """
    stages, (batch, places) = call.stages, data
    model = nnx.merge(call.graph, call.whole(stack[0], rest[0]), call.whole(stack[1], rest[1]), copy=True)
    layer_graph = nnx.split(stack_of(model, stages))[0]

    def microbatch(m: Any) -> tuple[Any, ExampleContext]:
        now, here = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, m, keepdims=False), (batch, places))
        return stages.prepare(now), ExampleContext(here)

    @contextlib.contextmanager
    def computing(context: ExampleContext) -> Iterator[None]:
        rows = context.examples.shape[0]
        with examples(context), injecting(call.injected, call.layout, data_step, rows):
            yield

    def mode(module: Any) -> Any:
        module.train() if call.training else module.eval()
        return module

    def model_of(params: Any, m: Any) -> Any:
        others = at_step(rest[1], *when(m))
        if not stages.gathers:
            params, others = gathered(params), gathered(others)
        variables = call.whole(stack[0], params), call.whole(stack[1], others)
        return mode(nnx.merge(call.graph, *variables, copy=True))

    def embed(params: Any, m: Any) -> Any:
        prepared, context = microbatch(m)
        with computing(context):
            return stages.embed(model_of(params, m), prepared)

    def layer(own: Any, state: Any, x: Any, m: Any) -> Any:
        prepared, context = microbatch(m)
        number, state = state
        own, state = gathered(own, stages.layers), gathered(at_step(state, *when(m)), stages.layers)
        with computing(context), in_layer(stages.layers, number, depth):
            y, loss, extras = layer_result(
                stages.layer(mode(nnx.merge(layer_graph, own, state, copy=True)), x, prepared)
            )
        return (y, loss), extras

    def head(params: Any, x: Any, m: Any) -> Any:
        prepared, context = microbatch(m)
        with computing(context):
            loss, weight, extras = normalised(stages.head(model_of(params, m), x, prepared))
            loss = passing(LOSS, loss)
        return loss, (weight, extras)

    return Parts(embed, _recomputed(layer, stages.remat) if call.training else layer, head)


def _recomputed(layer: Any, remat: str) -> Any:
    if remat == "none":
        return layer
    policy = PRODUCTS if remat == "dots" else None
    # Forward and backward stand in different loops, so the compiler cannot merge the two computations.
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def evaluated(
    graph: Any, layout: Layout, pipelining: Pipelining, params: Any, model_state: Any, batch: Any
) -> Any:
    """Sums (loss, weight, extras) of a batch [B, ...], forward only.

    A batch that does not divide over the data axes is computed by all of them.
    """
    call = _Call(graph, pipelining.stages, inside(layout, _LOCAL, params, model_state), False)
    schedule, rows = pipelining.work.schedule, jax.tree.leaves(batch)[0].shape[0]
    shards = batch_shards(layout.mesh)
    shared = rows % shards == 0
    each = rows // shards if shared else rows
    count = next(n for n in range(min(schedule.microbatches, each), 0, -1) if each % n == 0)
    table = forward_only(schedule.stages, count, schedule.virtual)
    work = replace(pipelining.work, schedule=table, slots=allot(table, "inputs"))

    def body(params: Any, model_state: Any, batch: Any) -> Any:
        batch = jax.tree.map(lambda x: x.reshape(1, count, -1, *x.shape[1:]), batch)
        places = jnp.zeros(jax.tree.leaves(batch)[0].shape[:3], jnp.int32)
        with use_layout(call.layout):
            stages = _Body(call, work, params, model_state, batch, places, jnp.int32(0))
            sums = stages.pipeline(0).evaluation()
        return lax.psum(sums, call.layout.local if shared else AXIS)

    specs = [manual_specs(call.layout, tree) for tree in (params, model_state)]
    rows_spec = P(BATCH_AXES) if shared else P()
    return shard_map_over(call.layout, body, (*specs, rows_spec), P())(params, model_state, batch)


def refuse_permutes(program: str) -> None:
    """Refuses a compiled program in which a stage's own work needs a permutation.

    A collective permute waits for all devices, also where it moves data along another axis; inside a stage's
    work, which others skip in that tick, it would wait for ever.

    Raises:
      ConfigError: naming the operation and its place in the code.
    """
    for line in program.splitlines():
        if " collective-permute" not in line or not any(f"/{scope}/" in line for scope in UNITS):
            continue
        name = re.search(r'op_name="[^"]*/([^"/]+)"', line)
        file = re.search(r'source_file="([^"]*)"(?: source_line=(\d+))?', line)
        place = f" at {file[1]}:{file[2]}" if file and file[2] else ""
        raise ConfigError(
            f"mesh.pipeline: the compiler moves {name[1] if name else 'data'}{place} between devices by a permutation "
            "inside a stage, which the other stages would not take part in; lay the model out without it "
            "(mesh.context=1 or mesh.tensor=1), or set mesh.pipeline=1"
        )


# ---- places --------------------------------------------------------------------------------------


def _over_stages(layout: Layout, tree: Any) -> Any:
    """What lies before and after the layers, gathered over the stages; matrices in the type that they are used in."""

    def one(path: str, leaf: Any) -> Any:
        if layout.in_stack(path):
            return leaf
        matrix = len(layout.names_of(path) or ()) >= 2 and jnp.issubdtype(leaf.dtype, jnp.floating)
        if matrix:
            leaf = leaf.astype(layout.gathered_as(path, leaf.dtype))
        return gather_local(layout, path, leaf, (AXIS,), left_spec(layout, path))

    return map_named(one, tree)


def _accumulated(layout: Layout, path: str) -> P:
    """The same of its gradient while it adds up: of a parameter that was gathered once a step, the whole."""
    return left_spec(layout, path, SHARD_AXES if layout.fsdp_gather == "step" else ())


def _accumulator(layout: Layout, path: str, leaf: Any) -> jax.Array:
    zeros = jnp.zeros(leaf.shape, jnp.float32)
    if layout.alone:
        return zeros
    return lax.with_sharding_constraint(zeros, layout.place(_accumulated(layout, path)))


def _reduced(layout: Layout, path: str, grad: jax.Array) -> jax.Array:
    """The sum of a gradient over the devices that hold its parameter, scattered as the parameter lies.

    Where parameters are gathered by layer their gradients were scattered over `fsdp` there.
    """
    cuts = [(i, axis) for i, entry in enumerate(layout.places[path]) for axis in axes_of_entry(entry)]
    cuts = [(i, axis) for i, axis in cuts if axis in layout.local]
    scattered = (
        *(() if layout.in_stack(path) else (AXIS,)),
        *(layout.gathered_over(path) if layout.fsdp_gather == "step" else ()),
    )
    steps = [(i, axis) for i, axis in cuts if axis in scattered]
    cut = {axis for _, axis in cuts}
    # Over `data` they are exchanged.
    left = tuple(a for a in layout.local if a not in (*cut, "data") and layout.axis_size(a) > 1)

    def reduced(grad: jax.Array) -> jax.Array:
        for dimension, axis in steps:
            grad = lax.psum_scatter(grad, axis, scatter_dimension=dimension, tiled=True)
        return lax.psum(grad, left) if left else grad

    return on_own_part(layout, reduced, _accumulated(layout, path), {i for i, _ in steps})(grad)

"""Gradients over a pipeline: a model declared in stages, as the pure functions that the executor runs.

One shard_map, manual over `pipeline` and the batch's axes: gradients of all microbatches add up on their device
and cross the data axes once, at the end.  `tensor` and `context` stay with the compiler.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from dsjax.errors import ConfigError
from dsjax.mesh import (
    BATCH_AXES,
    Layout,
    batch_shards,
    gather_all,
    gathered,
    map_named,
    named_leaves,
    use_layout,
)
from dsjax.mesh.axes import SHARD_AXES
from dsjax.mesh.layout import axes_of_entry, gather_local, on_own_part
from dsjax.models import Stages
from dsjax.pipelining.executor import AXIS, UNITS, Parts, Pipeline, Work
from dsjax.pipelining.schedule import forward_only
from dsjax.pipelining.slots import allot
from dsjax.train.losses import layer_result, normalised, stack_of
from dsjax.train.randomness import ExampleContext, at_step, examples


def local_axes(layout: Layout) -> tuple[str, ...]:
    """The mesh axes that the shard_map is manual over: `pipeline`, the batch's, and all of one device.

    Where those are all there are, layers may call back to the host, which jax does not allow otherwise.
    """
    sizes = layout.mesh.shape
    return tuple(axis for axis, size in sizes.items() if size == 1 or axis in (AXIS, *BATCH_AXES))


@dataclass(frozen=True)
class Pipelining:
    """How a step is pipelined: the model's stages, and the schedule laid out for it."""

    stages: Stages
    work: Work


@dataclass(frozen=True)
class _Call:
    """What the functions below share: a model's structure, its layout inside the shard_map, train or eval."""

    graph: Any
    stages: Stages
    layout: Layout
    training: bool

    def split(self, state: Any) -> tuple[Any, Any]:
        """A state as (the stack's own variables, the rest)."""
        names = tuple(self.stages.layers.split("/"))
        stacked, rest = nnx.split_state(
            state, lambda path, _: tuple(map(str, path[: len(names)])) == names, ...
        )
        for name in names:
            stacked = stacked[name] if name in stacked else nnx.State({})
        return stacked, rest

    def whole(self, stacked: Any, rest: Any) -> Any:
        """The opposite of `split`."""
        for name in reversed(self.stages.layers.split("/")):
            stacked = nnx.State({name: stacked})
        return nnx.merge_state(stacked, rest)


def pipelined(
    graph: Any, layout: Layout, pipelining: Pipelining, state: Any, batch: Any
) -> tuple[tuple[Any, Any, Any], Any]:
    """Sums (loss, weight, extras) over the microbatches, and gradients in their parameters' places, fp32.

    Args:
      batch: arrays [A * M, rows, ...]: M microbatches a pass of the pipeline, A passes.
    """
    body, specs, arguments = _set_up(graph, layout, pipelining, state, batch)
    gradients = partial(body, lambda stages: stages.gradients())
    return _mapped(layout, gradients, specs, (P(), specs[0]))(*arguments)


def probed(
    graph: Any, layout: Layout, pipelining: Pipelining, state: Any, batch: Any, after: Any
) -> tuple[Any, Any]:
    """Every device computes its stage of one microbatch, alone.

    Args:
      after: int32 [devices], zeros: a device begins when its own number is there.

    Returns:
      Numbers that mean nothing, and int32 [devices], zeros: each there when its device is done.
    """
    body, specs, arguments = _set_up(graph, layout, pipelining, state, batch)
    probe = partial(body, lambda stages: stages.probe())
    return _mapped(layout, probe, specs, P((AXIS, *BATCH_AXES)))(*arguments), after * 2


def _mapped(layout: Layout, function: Any, in_specs: Any, out_specs: Any) -> Any:
    """`function` inside the shard_map that all of this runs in."""
    return jax.shard_map(
        function,
        mesh=layout.mesh,
        axis_names=set(local_axes(layout)),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


def _set_up(
    graph: Any, layout: Layout, pipelining: Pipelining, state: Any, batch: Any
) -> tuple[Any, Any, Any]:
    """What stands around the body: (a function of a task and the arguments, their specs, the arguments)."""
    call = _Call(graph, pipelining.stages, _inside(layout, state.params, state.model_state), True)
    count = pipelining.work.schedule.microbatches
    lead = jax.tree.leaves(batch)[0].shape[:2]
    places = jnp.arange(lead[0] * lead[1], dtype=jnp.int32).reshape(lead)
    batch, places = jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]), (batch, places))

    def body(task: Any, params: Any, model_state: Any, batch: Any, places: Any, step: Any) -> Any:
        with use_layout(call.layout):
            return task(_Body(call, pipelining.work, params, model_state, batch, places, step))

    specs = [_manual_specs(call.layout, tree) for tree in (state.params, state.model_state)]
    rows = P(None, None, BATCH_AXES)
    return body, (*specs, rows, rows, P()), (state.params, state.model_state, batch, places, state.step)


class _Body:
    """The stages of one device, set up inside the shard_map."""

    def __init__(
        self, call: _Call, work: Work, params: Any, model_state: Any, batch: Any, places: Any, step: Any
    ):
        self.call, self.work, self.step = call, work, step
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
        parts = _parts(self.call, stack, rest, data, lambda m: (self.step, (first + m) * shards + shard))
        on_cpu = self.call.layout.mesh.devices.flat[0].platform == "cpu"
        return Pipeline(parts, self.work, self.layers, self.states, self.rest, ordered=on_cpu)

    def start(self) -> tuple[Pipeline, tuple[Any, Any, Any]]:
        """The first pass's pipeline, and sums and gradients before its first microbatch."""
        first = self.pipeline(0)
        zeros = map_named(partial(_accumulator, self.call.layout), self.params)
        return first, (first.sums, *self.call.split(zeros))

    def gradients(self) -> tuple[Any, Any]:
        """Sums over all devices, and gradients as their parameters lie."""
        first, carry = self.start()
        if (passes := self.places.shape[0]) == 1:
            carry = first.gradients(*carry)
        else:
            carry = lax.fori_loop(0, passes, lambda i, carry: self.pipeline(i).gradients(*carry), carry)
        grads = map_named(partial(_reduced, self.call.layout), self.call.whole(*carry[1:]))
        return lax.psum(carry[0], self.call.layout.local), grads

    def probe(self) -> jax.Array:
        """float32 [1], made of all that a forward and a backward of this device's stage give."""
        first, start = self.start()
        carry = first.one_of_each(*start)
        return jnp.stack([jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(carry)]).sum()[None]


def _parts(call: _Call, stack: Any, rest: Any, data: Any, when: Any) -> Parts:
    """The executor's functions: `stack` and `rest` are pairs (parameters, other variables)."""
    stages, (batch, places) = call.stages, data
    model = nnx.merge(call.graph, call.whole(stack[0], rest[0]), call.whole(stack[1], rest[1]), copy=True)
    layer_graph = nnx.split(stack_of(model, stages))[0]

    def microbatch(m: Any) -> tuple[Any, ExampleContext]:
        now, here = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, m, keepdims=False), (batch, places))
        return stages.prepare(now), ExampleContext(here)

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
        with examples(context):
            return stages.embed(model_of(params, m), prepared)

    def layer(own: Any, state: Any, x: Any, m: Any) -> Any:
        prepared, context = microbatch(m)
        own, state = gathered(own, stages.layers), gathered(at_step(state, *when(m)), stages.layers)
        with examples(context):
            y, loss, extras = layer_result(
                stages.layer(mode(nnx.merge(layer_graph, own, state, copy=True)), x, prepared)
            )
        return (y, loss), extras

    def head(params: Any, x: Any, m: Any) -> Any:
        prepared, context = microbatch(m)
        with examples(context):
            loss, weight, extras = normalised(stages.head(model_of(params, m), x, prepared))
        return loss, (weight, extras)

    return Parts(embed, _recomputed(layer, stages.remat) if call.training else layer, head)


def _recomputed(layer: Any, remat: str) -> Any:
    if remat == "none":
        return layer
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "dots" else None
    # Forward and backward stand in different loops, so the compiler cannot merge the two computations.
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def evaluated(
    graph: Any, layout: Layout, pipelining: Pipelining, params: Any, model_state: Any, batch: Any
) -> Any:
    """Sums (loss, weight, extras) of a batch [B, ...], forward only.

    A batch that does not divide over the data axes is computed by all of them.
    """
    call = _Call(graph, pipelining.stages, _inside(layout, params, model_state), False)
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

    specs = [_manual_specs(call.layout, tree) for tree in (params, model_state)]
    rows_spec = P(BATCH_AXES) if shared else P()
    return _mapped(layout, body, (*specs, rows_spec), P())(params, model_state, batch)


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


def _inside(layout: Layout, *trees: Any) -> Layout:
    """The layout as it is seen in the body of the shard_map."""
    places = {}
    for tree in trees:
        for path, leaf in named_leaves(tree).items():
            spec = _place(layout, path, leaf)
            places[path] = P(*spec, *(None,) * (leaf.ndim - len(spec)))
    return replace(layout, local=local_axes(layout), places=places)


def _place(layout: Layout, path: str, leaf: Any) -> P:
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return layout.param_spec(path, leaf.shape)
    return P(AXIS) if layout.in_stack(path) else P()


def _manual_specs(layout: Layout, tree: Any) -> Any:
    return map_named(lambda path, leaf: _only(layout.places[path], lambda axis: axis in layout.local), tree)


def _only(spec: P, wanted: Any) -> P:
    return P(*(tuple(a for a in axes_of_entry(entry) if wanted(a)) or None for entry in spec))


def _over_stages(layout: Layout, tree: Any) -> Any:
    """What lies before and after the layers, gathered over the stages; matrices in the type that they are used in."""

    def one(path: str, leaf: Any) -> Any:
        if layout.in_stack(path):
            return leaf
        matrix = len(layout.names_of(path) or ()) >= 2 and jnp.issubdtype(leaf.dtype, jnp.floating)
        if matrix and layout.gather_dtype is not None:
            leaf = leaf.astype(layout.gather_dtype)
        return gather_local(layout, path, leaf, (AXIS,), _left(layout, path))

    return map_named(one, tree)


def _left(layout: Layout, path: str, without: Sequence[str] = ()) -> P:
    """How the axes that are left to the compiler cut a parameter."""
    return _only(layout.places[path], lambda axis: axis not in layout.local and axis not in without)


def _accumulated(layout: Layout, path: str) -> P:
    """The same of its gradient while it adds up: of a parameter that was gathered once a step, the whole."""
    return _left(layout, path, SHARD_AXES if layout.fsdp_gather == "step" else ())


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
        *(SHARD_AXES if layout.fsdp_gather == "step" else ()),
    )
    steps = [(i, axis) for i, axis in cuts if axis in scattered]
    cut = {axis for _, axis in cuts}
    left = tuple(a for a in layout.local if a not in cut and layout.axis_size(a) > 1)

    def reduced(grad: jax.Array) -> jax.Array:
        for dimension, axis in steps:
            grad = lax.psum_scatter(grad, axis, scatter_dimension=dimension, tiled=True)
        return lax.psum(grad, left) if left else grad

    return on_own_part(layout, reduced, _accumulated(layout, path), {i for i, _ in steps})(grad)

"""Time and traffic of a pipelined step by formulas: its units, its schedule run with them, what it sends."""

from __future__ import annotations

import numpy as np

from dsjax.mesh.axes import SHARD_AXES
from dsjax.pipelining.simulate import simulate
from dsjax.plan import analytic_stages, cost, experts
from dsjax.plan.cost import Reached
from dsjax.plan.laid import Laid
from dsjax.plan.result import Forecast, Pipelined, Traffic
from dsjax.plan.timetable import Units, pipelined
from dsjax.plan.wire import exchanged, sent, waited_for

# Passes over a layer's residual and feed-forward activations outside of matrix products, of a forward.
_PASSES = 13

# kind, axes, times in a step, bytes each time
Sent = tuple[str, tuple[str, ...], int, float]


def units(laid: Laid, reached: Reached) -> Units:
    """Seconds of a forward, a backward and a weight gradient of each [virtual, stages], with what they wait for."""
    work = analytic_stages.work_of(laid)
    layer, head = _forward(laid, reached), _head(laid, reached)
    layer *= 1 + _waiting(laid, reached, layer)
    kept, summed = (
        _moving(laid, reached, size) for size in (_kept(laid), 12 * laid.layer_used / laid.tensor)
    )
    counts = np.array(work.counts, float)
    end = np.arange(len(counts)) == len(counts) - 1
    learning = laid.trained.layers
    summed *= learning
    weights = min(1.0, learning) * layer
    forward, backward = counts * layer, counts * (layer + weights + kept + summed) + head * end
    weight = np.zeros(len(counts))
    if work.schedule.weight is not None:
        # What a backward's first half makes passes through memory to the second, as what is kept does.
        weight = counts * (weights + kept + summed)
        backward = counts * (layer + 2 * kept) + head * end
    if work.slots.keep == "inputs":
        backward = backward + counts * (layer + kept)
        forward = forward * ~end
    else:
        forward = forward + counts * kept
    if laid.config.train.remat == "full":
        backward = backward + counts * layer
    shape = (work.schedule.virtual, work.schedule.stages)
    return forward.reshape(shape), backward.reshape(shape), weight.reshape(shape)


def _forward(laid: Laid, reached: Reached) -> float:
    """Seconds of a microbatch's forward through one layer on one device."""
    sizes, tokens = laid.sizes, laid.tokens_a_device / laid.tensor
    flops = tokens * (laid.forward_flops - 2.0 * sizes.hidden * sizes.vocabulary) / sizes.layers
    moved = _PASSES * laid.item * tokens * (sizes.hidden + sizes.feed_forward) + _used(laid, laid.layer_used)
    moved += experts.moved(laid) / 3  # of a forward and a backward
    return flops / reached.flops(laid.target.chip, laid.dtype) + _moving(laid, reached, moved)


def _head(laid: Laid, reached: Reached) -> float:
    """Seconds of a microbatch's head and loss, forward and backward."""
    sizes, tokens = laid.sizes, laid.tokens_a_device / laid.tensor
    flops = (2 + laid.trained.ends) * 2.0 * tokens * sizes.hidden * sizes.vocabulary
    head = sizes.hidden * sizes.vocabulary
    # Logits and their gradient in fp32 and in the type of products; the head's gradient through its chunks.
    moved = 3 * (4 + laid.item) * tokens * sizes.vocabulary + _used(laid, head) + 20 * head / laid.tensor
    return flops / reached.flops(laid.target.chip, laid.dtype) + _moving(laid, reached, moved)


def _used(laid: Laid, elements: float) -> float:
    """Bytes that parameters move where they are used: read and cast as they lie, then read whole."""
    return ((4 + laid.item) / laid.shards + laid.item) * elements / laid.tensor


def _kept(laid: Laid) -> float:
    """Bytes that a layer puts away for its backward beyond its input."""
    return analytic_stages.kept_of_a_layer(laid) - analytic_stages.activation(laid)


def _moving(laid: Laid, reached: Reached, size: float) -> float:
    """Seconds of so many bytes of memory traffic."""
    return size / laid.target.chip.memory.bandwidth / reached.memory


def _waiting(laid: Laid, reached: Reached, layer: float) -> float:
    """Seconds that a layer waits for links, over those that it computes."""
    work = analytic_stages.work_of(laid)
    computed = 3 * layer * laid.microbatches * sum(work.counts) / work.schedule.stages
    beside = waited = 0.0
    for one in _in_units(laid):
        seconds = one.seconds / reached.link(one.crosses)
        if waited_for(one):
            waited += seconds
        else:
            beside += seconds
    return (waited + max(0.0, beside - computed)) / computed


def traffic(laid: Laid) -> tuple[Traffic, ...]:
    """What a device of a stage in the middle sends in a step."""
    return (*_in_units(laid), *_handed_on(laid), *_once(laid))


def _in_units(laid: Laid) -> list[Traffic]:
    """In the layers: gathers of parameters and sums of their gradients, activations between products, keys."""
    sizes, mesh, work = laid.sizes, laid.mesh, analytic_stages.work_of(laid)
    runs = laid.microbatches * sum(work.counts) // work.schedule.stages
    again = 1 if work.slots.keep == "inputs" or laid.config.train.remat != "none" else 0
    layer = laid.item * sizes.layer / laid.tensor
    between = laid.item * laid.tokens_a_device * sizes.hidden / mesh["tensor_rows"]
    keys = 2 * laid.item * laid.tokens_a_device * sizes.key / laid.tensor * mesh["context"]
    found: list[Sent] = []
    learning = laid.trained
    if laid.config.train.fsdp_gather == "layer":
        found.append(("all-gather", SHARD_AXES, runs * (2 + again), layer))
        found.append(("reduce-scatter", SHARD_AXES, runs, layer * learning.layers))
        found.append(("all-gather", experts.SHARDS, runs * (2 + again), experts.used(laid)))
        found.append(("reduce-scatter", experts.SHARDS, runs, experts.used(laid) * learning.layers))
    found.append(("all-to-all", ("expert",), runs * experts.TIMES_SENT, experts.rows_sent(laid)))
    found.append(("all-gather", ("tensor",), runs * (4 + 2 * again), between))
    found.append(("reduce-scatter", ("tensor",), runs * (4 + 2 * again), between))
    found.append(("all-gather", ("context",), runs * (1 + again), keys))
    found.append(("reduce-scatter", ("context",), runs, keys))
    return _those_sent(laid, found)


def _those_sent(laid: Laid, found: list[Sent], dtype: str = "") -> list[Traffic]:
    cut = [
        (kind, tuple(a for a in axes if laid.mesh[a] > 1), times, size) for kind, axes, times, size in found
    ]
    return [sent(laid, kind, axes, times, size, dtype) for kind, axes, times, size in cut if axes and size]


def _handed_on(laid: Laid) -> list[Traffic]:
    """Activations to the next stage and gradients to the one before, once a tick each."""
    times = 2 * analytic_stages.work_of(laid).schedule.ticks * laid.config.train.gradient_accumulation_steps
    return _those_sent(laid, [("collective-permute", ("pipeline",), times, analytic_stages.activation(laid))])


def _once(laid: Laid) -> list[Traffic]:
    """Before and after the ticks: embedding and head over the stages, parameters gathered at once, sums over data."""
    sizes, held = laid.sizes, analytic_stages.layers_held(laid) * laid.layer_used
    ends = (1 if sizes.tied else 2) * sizes.hidden * sizes.vocabulary
    learning = laid.trained
    found: list[Sent] = [
        ("all-gather", ("pipeline",), 1, 4 * ends / laid.tensor),
        ("reduce-scatter", ("pipeline",), 1, 4 * ends * learning.ends / laid.tensor),
    ]
    if laid.config.train.fsdp_gather == "step":
        summed = held * learning.layers + ends * learning.ends
        found.append(("reduce-scatter", SHARD_AXES, 1, 4 * summed / laid.tensor))
    sums = _those_sent(laid, found, "f32")
    if laid.config.train.fsdp_gather == "step":
        sums += _those_sent(laid, [("all-gather", SHARD_AXES, 1, laid.item * (held + ends) / laid.tensor)])
    return [*sums, *exchanged(laid)]


def between(laid: Laid, reached: Reached) -> float:
    """Seconds of a tick beside its units: one of its two hand-overs is waited for, and what came is put away."""
    handed = sum(t.seconds / reached.link(t.crosses) / t.times for t in _handed_on(laid))
    return handed + _moving(laid, reached, 8 * analytic_stages.activation(laid))


def told(laid: Laid, reached: Reached) -> Pipelined:
    """What a plan says of the pipeline."""
    work, passes = analytic_stages.work_of(laid), laid.config.train.gradient_accumulation_steps
    stash = int(analytic_stages.stash(laid))
    return pipelined(work, passes, units(laid, reached), between(laid, reached), stash, reached.step)


def forecast(laid: Laid, reached: Reached) -> Forecast:
    """The predicted time of a step: the passes as simulated, and what comes before and after."""
    work, passes = analytic_stages.work_of(laid), laid.config.train.gradient_accumulation_steps
    link, times = between(laid, reached), units(laid, reached)
    one = simulate(work.schedule, *times, link)
    once = sum(t.seconds / reached.link(t.crosses) for t in _once(laid))
    updated = _moving(laid, reached, laid.updated)
    busy = float(one.busy.max())
    idle = passes * max(0.0, one.total - busy - link * work.schedule.ticks)
    compute = passes * busy / (1 + _waiting(laid, reached, _forward(laid, reached))) + updated
    return cost.corrected(passes * one.total + once + updated, compute, reached, idle)

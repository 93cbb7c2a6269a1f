"""Time and traffic of a Llama's step by formulas, and the plan made of them where nothing is compiled."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from dsjax.aot import Target
from dsjax.aot.collectives import ring_bytes
from dsjax.config import Config
from dsjax.mesh import AXES
from dsjax.mesh.axes import SHARD_AXES
from dsjax.plan.analytic import Laid, lay_out, memory
from dsjax.plan.compiled import vocabulary_notes
from dsjax.plan.cost import PEAK, Reached, corrected, link_seconds, unit_notes
from dsjax.plan.measured import correction
from dsjax.plan.result import Flops, Forecast, Plan, Roofline, Traffic
from dsjax.plan.settings import settings_of, with_money
from dsjax.plan.words import target_notes

# Passes over a layer's residual and feed-forward activations outside of matrix products.
_PASSES = 38
# Their sums stand between products that need them; everything else runs beside the layers.
_WAITED_FOR = {"tensor", "tensor_rows"}


def dtype_of(laid: Laid) -> str:
    """The type of most products, as HLO names it."""
    return {2: "bf16", 4: "f32"}[laid.item]


def compute_seconds(laid: Laid, reached: Reached) -> tuple[float, float]:
    """Seconds of products and of memory traffic of a step on one device."""
    sizes, chip = laid.sizes, laid.target.chip
    again = {"none": 1.0, "dots": 1.05}.get(laid.config.train.remat, 4 / 3)
    each = laid.model.flops_per_token(laid.config.train.sequence_length) or 0.0
    flops = each * laid.tokens * again / laid.target.size
    passes = _PASSES * sizes.layers * laid.item * laid.tokens_a_device * laid.microbatches
    moved = passes * (sizes.hidden + sizes.feed_forward) / laid.tensor + 2 * sum(laid.state)
    return flops / reached.flops(chip, dtype_of(laid)), moved / chip.memory.bandwidth / reached.memory


def traffic(laid: Laid) -> tuple[Traffic, ...]:
    """What is sent in a step: gathers of parameters, sums of gradients, of activations, of keys.

    Of every product some device holds a part of its input (gathered before) and of its result (summed and
    scattered after); the backward pass does the reverse.  `full` and `dots` do the forward pass's again.
    """
    sizes, mesh, micro = laid.sizes, laid.mesh, laid.microbatches
    runs = micro * sizes.layers
    again = 0 if laid.config.train.remat == "none" else 1
    layer = laid.item * sizes.layer / laid.tensor
    ends = laid.item * sizes.hidden * sizes.vocabulary * (1 if sizes.tied else 2) / laid.tensor
    a_feature = laid.item * laid.tokens_a_device
    between = a_feature * sizes.hidden / mesh["tensor_rows"]
    made = a_feature * (sizes.query + 2 * sizes.key + 2 * sizes.feed_forward) / mesh["tensor"]
    used = a_feature * (sizes.query + sizes.feed_forward) / mesh["tensor"]
    keys = 2 * a_feature * sizes.key / laid.tensor * mesh["context"]
    found = []

    def add(kind: str, axes: tuple[str, ...], times: int, size: float) -> None:
        axes = tuple(axis for axis in axes if mesh[axis] > 1)
        if axes:
            found.append(_sent(laid, kind, axes, times, size))

    add("all-gather", SHARD_AXES, runs * (1 + again), layer)
    add("all-gather", SHARD_AXES, micro, ends)
    add("reduce-scatter", SHARD_AXES, runs, layer)
    add("reduce-scatter", SHARD_AXES, micro, ends)
    add("all-reduce", ("data",), runs, layer / laid.shards)
    add("all-reduce", ("data",), micro, ends / laid.shards)
    add("all-gather", ("tensor",), runs * (4 + 2 * again), between)
    add("reduce-scatter", ("tensor",), runs * (4 + again), between)
    add("all-gather", ("tensor_rows",), runs, (1 + again) * used + made)
    add("reduce-scatter", ("tensor_rows",), runs, (1 + again) * made + used)
    add("all-gather", ("context",), runs * (1 + again), keys)
    add("reduce-scatter", ("context",), runs, keys)
    return tuple(found)


def _sent(laid: Laid, kind: str, axes: tuple[str, ...], times: int, size: float) -> Traffic:
    members = math.prod(laid.mesh[axis] for axis in axes)
    together = _together(laid.target, laid.mesh, axes)
    crosses = together < members
    wire = ring_bytes(kind, members, int(size), int(size))
    chip = laid.target.chip
    return Traffic(
        kind=kind,
        axes=axes,
        link=(chip.network if crosses else chip.node).name,
        crosses=crosses,
        dtype=dtype_of(laid),
        sent=times * wire,
        times=times,
        loop=(),
        seconds=times * link_seconds(laid.target, kind, wire, members, together),
        hidden=0.0,
    )


def _together(target: Target, mesh: Mapping[str, int], axes: tuple[str, ...]) -> int:
    """The most devices of a group along some axes that one node holds."""
    places = np.arange(target.size).reshape([mesh[a] for a in AXES])
    group = places[tuple(slice(None) if a in axes else 0 for a in AXES)].reshape(-1)
    return int(np.bincount(group // target.domain).max())


def forecast(laid: Laid) -> Forecast:
    """The predicted time of a step: sums over `tensor` wait, everything else runs beside the layers."""
    reached = correction(laid.target).reached
    compute = sum(compute_seconds(laid, reached))
    seconds = {True: 0.0, False: 0.0}
    for t in traffic(laid):
        seconds[bool(_WAITED_FOR & set(t.axes))] += t.seconds / reached.link(t.crosses)
    return corrected(compute + seconds[True] + max(0.0, seconds[False] - compute), compute, reached)


def estimate(
    config: Config, target: Target, vocab_size: int | None, tokens: float | None, reason: str
) -> Plan:
    """A plan without compiling.

    Args:
      reason: why nothing was compiled, for the notes.

    Raises:
      ConfigError: a mesh that does not fit the target, or a model that there are no formulas for.
    """
    return plan_of(lay_out(config, target, vocab_size), tokens, reason)


def plan_of(laid: Laid, tokens: float | None, reason: str) -> Plan:
    """The plan of a run that was laid out, by formulas."""
    products, moved = compute_seconds(laid, PEAK)
    sent = traffic(laid)
    each = laid.model.flops_per_token(laid.config.train.sequence_length)
    flops = each * laid.tokens if each else None
    return Plan(
        target=laid.target.name,
        devices=laid.target.size,
        compiled=False,
        mesh={axis: size for axis, size in laid.mesh.items() if size > 1},
        settings=settings_of(laid.config),
        memory=memory(laid),
        traffic=tuple(sorted(sent, key=lambda t: -t.seconds)),
        hidden_share=None,
        flops=Flops(flops, None),
        roofline=Roofline(
            compute=products,
            memory=moved,
            node=sum(t.seconds for t in sent if not t.crosses),
            network=sum(t.seconds for t in sent if t.crosses),
        ),
        forecast=with_money(forecast(laid), laid.target, dtype_of(laid), flops, laid.tokens, tokens),
        compile_seconds=0.0,
        notes=(
            f"NOT COMPILED, estimated by formulas: {reason}",
            *target_notes(laid.target),
            *correction(laid.target).notes,
            *unit_notes(laid.target.chip, dtype_of(laid)),
            *vocabulary_notes(laid.config),
        ),
    )

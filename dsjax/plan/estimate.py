"""Time and traffic of a step by formulas, and the plan made of them where nothing is compiled."""

from __future__ import annotations

from dsjax.aot import Target
from dsjax.config import Config
from dsjax.mesh.axes import SHARD_AXES
from dsjax.plan import estimate_stages, experts
from dsjax.plan.analytic import Laid, lay_out, memory
from dsjax.plan.compiled import vocabulary_notes
from dsjax.plan.cost import PEAK, Reached, corrected, unit_notes
from dsjax.plan.measured import correction
from dsjax.plan.result import Flops, Forecast, Plan, Roofline, Traffic
from dsjax.plan.settings import settings_of, with_money
from dsjax.plan.wire import exchanged, sent, waited_for
from dsjax.plan.words import target_notes

# Passes over a layer's residual and feed-forward activations outside of matrix products.
_PASSES = 38


def compute_seconds(laid: Laid, reached: Reached) -> tuple[float, float]:
    """Seconds of products and of memory traffic of a step on one device."""
    sizes, chip = laid.sizes, laid.target.chip
    # Forward passes over layers that run again; those of experts do whatever `remat` says.
    again = {"none": 0.0, "dots": 0.15}.get(laid.config.train.remat, 1.0)
    each = laid.model.flops_per_token(laid.config.train.sequence_length) or 0.0
    of_experts = experts.flops_per_token(sizes)
    more = again * (laid.forward_flops - of_experts / 3) + of_experts * (experts.AGAIN - 1)
    flops = (each + more) * laid.tokens / laid.target.size
    passes = _PASSES * sizes.layers * laid.item * laid.tokens_a_device * laid.microbatches
    moved = passes * (sizes.hidden + sizes.feed_forward) / laid.tensor + laid.updated
    moved += laid.microbatches * sizes.layers * experts.moved(laid)
    return flops / reached.flops(chip, laid.dtype), moved / chip.memory.bandwidth / reached.memory


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
        if axes and size:
            found.append(sent(laid, kind, axes, times, size))

    add("all-gather", SHARD_AXES, runs * (1 + again), layer)
    add("all-gather", experts.SHARDS, runs * (1 + again), experts.used(laid))
    learning = laid.trained
    add("reduce-scatter", experts.SHARDS, runs, experts.used(laid) * learning.layers)
    add("all-gather", SHARD_AXES, micro, ends)
    add("reduce-scatter", SHARD_AXES, runs, layer * learning.layers)
    add("reduce-scatter", SHARD_AXES, micro, ends * learning.ends)
    add("all-gather", ("tensor",), runs * (4 + 2 * again), between)
    add("reduce-scatter", ("tensor",), runs * (4 + again), between)
    add("all-gather", ("tensor_rows",), runs, (1 + again) * used + made)
    add("reduce-scatter", ("tensor_rows",), runs, (1 + again) * made + used)
    add("all-gather", ("context",), runs * (1 + again), keys)
    add("reduce-scatter", ("context",), runs, keys)
    add("all-to-all", ("expert",), runs * experts.TIMES_SENT, experts.rows_sent(laid))
    return (*found, *exchanged(laid))


def forecast(laid: Laid) -> Forecast:
    """The predicted time of a step: sums over `tensor` wait, everything else runs beside the layers."""
    reached = correction(laid.target).reached
    if laid.stacking:
        return estimate_stages.forecast(laid, reached)
    compute = sum(compute_seconds(laid, reached))
    seconds = {True: 0.0, False: 0.0}
    for t in traffic(laid):
        seconds[waited_for(t)] += t.seconds / reached.link(t.crosses)
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
    wired = estimate_stages.traffic(laid) if laid.stacking else traffic(laid)
    each = laid.model.flops_per_token(laid.config.train.sequence_length)
    flops = each * laid.tokens if each else None
    return Plan(
        target=laid.target.name,
        devices=laid.target.size,
        compiled=False,
        mesh={axis: size for axis, size in laid.mesh.items() if size > 1},
        settings=settings_of(laid.config),
        memory=memory(laid),
        traffic=tuple(sorted(wired, key=lambda t: -t.seconds)),
        hidden_share=None,
        flops=Flops(flops, None),
        roofline=Roofline(
            compute=products,
            memory=moved,
            node=sum(t.seconds for t in wired if not t.crosses),
            network=sum(t.seconds for t in wired if t.crosses),
        ),
        forecast=with_money(forecast(laid), laid.target, laid.dtype, flops, laid.tokens, tokens),
        compile_seconds=0.0,
        notes=(
            f"NOT COMPILED, estimated by formulas: {reason}",
            *target_notes(laid.target),
            *correction(laid.target).notes,
            *unit_notes(laid.target.chip, laid.dtype),
            *vocabulary_notes(laid.config),
        ),
        pipeline=estimate_stages.told(laid, correction(laid.target).reached) if laid.stacking else None,
    )

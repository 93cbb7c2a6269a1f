"""What a step is made of, what could be fused and what the compiler fuses, and what memory is freed.

`explain` does it for any jitted step; `explain_run` for a run's own, with its plan, from one compilation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsjax import aot
from dsjax.config import Config
from dsjax.errors import OutOfDeviceMemory
from dsjax.plan.compiled import CompiledStep, Described, check_mesh, compile_jitted, describe, vocabulary
from dsjax.plan.cost import Reached
from dsjax.plan.estimate import estimate
from dsjax.plan.explanation.fused import Compiled
from dsjax.plan.explanation.fusion import FORMULA, THRESHOLD, candidates
from dsjax.plan.explanation.jaxpr import Step, walk
from dsjax.plan.explanation.judged import Judged, judge
from dsjax.plan.explanation.kept import Kept, kept
from dsjax.plan.explanation.retrace import Traced, trace
from dsjax.plan.explanation.tallies import Excess, LayerTypes, Tally, by_kind, by_layer, excess, layer_types
from dsjax.plan.measured import correction
from dsjax.plan.planner import lay_out_recipe, recipe_summary, summary, target_of, with_changes
from dsjax.plan.result import Plan
from dsjax.plan.settings import run_tokens
from dsjax.precision import POLICIES, compute_dtype
from dsjax.train.program import Program, Recipe


@dataclass(frozen=True)
class Freed:
    """Bytes of one device.

    Attributes:
      donated: of arguments that are given away; aliased: of them, what XLA lets results lie in; None
        where nothing was compiled.
      kept, without_remat, alive: see `kept.Kept`; freed: what recomputation saves of it.
      recomputed_flops: what that costs.
    """

    donated: float
    aliased: int | None
    kept: float
    without_remat: float
    alive: float
    freed: float
    recomputed_flops: float


@dataclass(frozen=True)
class Explanation:
    """A step taken apart. All figures are of one device and one step.

    Attributes:
      compiled: decisions were read from compiled HLO.
      kinds, layers: what is computed and moved, by kind of operation and by layer.
      types: element types of the layers' products and parameters.
      candidates: what could be fused, largest gain first.
      product_flops: of products, by the jaxpr; compiled_flops: by the compiled program.
      ridge: type of `Chip.peak` -> FLOPs a byte from which on arithmetic bounds, not memory.
      excess: products that the compiled program computes more of than that.
      bytes: moved if every operation stood alone; compiled_bytes: by the compiled program.
    """

    target: str
    devices: int
    compiled: bool
    kinds: tuple[Tally, ...]
    layers: tuple[Tally, ...]
    types: tuple[LayerTypes, ...]
    candidates: tuple[Judged, ...]
    freed: Freed
    product_flops: float
    compiled_flops: float | None
    excess: tuple[Excess, ...]
    bytes: float
    compiled_bytes: float | None
    ridge: Mapping[str, float]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON's types: bytes, seconds, FLOPs."""
        values = dataclasses.asdict(self)
        for name in ("kinds", "layers"):
            rows = getattr(self, name)
            values[name] = [
                dataclasses.asdict(row) | {"intensity": row.intensity, "bound": row.bound} for row in rows
            ]
        return {**values, "threshold": THRESHOLD, "formula": FORMULA}


def explain(
    jitted: Any,
    args: tuple[Any, ...],
    on: str | aot.Target,
    *,
    chips: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    reached: Reached | None = None,
) -> Explanation:
    """What any jitted step is made of, of dsjax or not.

    Args:
      jitted: from `jax.jit`.
      args: its arguments: trees of `jax.ShapeDtypeStruct` with shardings over a mesh of
        `dsjax.aot.parse_target(on).devices()`. Where nothing can be compiled for the target, only their
        shapes count.
      reached: shares of the chip's peaks, for the predictions; those that a plan uses by default.

    Raises:
      ConfigError: an unknown chip, or arguments on other devices.
      OutOfDeviceMemory: XLA finds no way to place the program in the chip's memory.
    """
    target = target_of(on, chips)
    traced = trace(jitted, args, target)
    step = walk(traced.closed, target.size, traced.names, traced.shares)
    missing = aot.missing_for(target.chip.kind)
    if missing:
        return _explained(target, traced, step, None, reached, missing)
    compiled = _compile(target, traced, step, options, None)
    return _explained(target, traced, step, compiled.inspection, reached, "")


def explain_run(
    config: Config,
    target: aot.Target,
    *,
    tokens: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[Plan, Explanation]:
    """The plan of a run (`planner.plan`) and what its step is made of, from one compilation.

    Raises:
      ConfigError: a mesh or a batch that does not fit the cluster.
    """
    tokens = tokens or run_tokens(config)
    check_mesh(config, target)
    missing = aot.missing_for(target.chip.kind)
    if missing:
        here = _stand_in(config, target)
        traced, step = _take_apart(here.program, here.batch, target)
        planned = estimate(config, target, vocabulary(config), tokens, missing)
        return planned, _explained(
            target,
            traced,
            step,
            None,
            None,
            f"{missing}; the step was traced as CPUs would run it, attention included",
        )
    described = describe(config, target, vocabulary(config))
    traced, step = _take_apart(described.program, described.batch, target)
    try:
        compiled = _compile(target, traced, step, options, described.program.mesh)
    except OutOfDeviceMemory as error:
        planned = estimate(config, target, vocabulary(config), tokens, str(error))
        planned = with_changes(planned, described, tokens, options)
        return planned, _explained(target, traced, step, None, None, str(error))
    planned = with_changes(summary(described, compiled, tokens), described, tokens, options)
    return planned, _explained(target, traced, step, compiled.inspection, None, "")


def explain_recipe(
    recipe: Recipe,
    config: Config,
    batch: Any,
    on: str | aot.Target,
    *,
    flops_per_step: float | None = None,
    tokens_per_step: float | None = None,
    tokens: float | None = None,
    chips: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[Plan, Explanation]:
    """The plan of a trainer's own model (`planner.plan_recipe`) and what its step is made of, from one compilation.

    Raises:
      ConfigError: an unknown chip, a mesh or a batch that does not fit the cluster, no wheels to compile with.
      OutOfDeviceMemory: XLA finds no way to place the program in the chip's memory.
    """
    target = target_of(on, chips)
    program, abstract = lay_out_recipe(recipe, config, batch, target)
    traced, step = _take_apart(program, abstract, target)
    compiled = _compile(target, traced, step, options, program.mesh)
    planned = recipe_summary(
        program, abstract, config, target, compiled, flops_per_step, tokens_per_step, tokens
    )
    return planned, _explained(target, traced, step, compiled.inspection, None, "")


def _take_apart(program: Program, batch: Any, target: aot.Target) -> tuple[Traced, Step]:
    """The jaxpr of a step, walked; `batch` is abstract."""
    traced = trace(*program.jitted_step(batch), target)
    return traced, walk(traced.closed, target.size, traced.names, traced.shares)


def _stand_in(config: Config, target: aot.Target) -> Described:
    """The run on as many simulated CPU devices, computing in the target's type.

    Raises:
      ConfigError: jax has started with fewer of them.
    """
    wanted = compute_dtype(config.precision.policy, target.chip.kind)
    policy = next(name for name, dtype in POLICIES.items() if dtype == wanted)
    if config.precision.policy != "auto":
        policy = config.precision.policy
    precision = config.precision.model_copy(update={"policy": policy})
    here = aot.parse_target(f"cpu:{target.size}")
    return describe(config.model_copy(update={"precision": precision}), here, vocabulary(config))


def _compile(
    target: aot.Target, traced: Traced, step: Step, options: Mapping[str, Any] | None, mesh: Any
) -> CompiledStep:
    return compile_jitted(traced.rejitted(step.tagged), traced.leaves, target, options, mesh)


def _explained(
    target: aot.Target,
    traced: Traced,
    step: Step,
    inspection: aot.Inspection | None,
    reached: Reached | None,
    uncompiled: str,
) -> Explanation:
    chip, found = target.chip, kept(step)
    read = Compiled(inspection.module) if inspection is not None else None
    memory = inspection.memory if inspection is not None else None
    return Explanation(
        target=target.name,
        devices=target.size,
        compiled=inspection is not None,
        kinds=by_kind(step, chip),
        layers=by_layer(step, chip),
        types=layer_types(step),
        candidates=judge(candidates(step, chip, reached or correction(target).reached), chip, read),
        freed=_freed(traced, found, memory.alias if memory is not None else None, target.size),
        product_flops=step.product_flops,
        compiled_flops=None if inspection is None else inspection.flops,
        excess=() if read is None else excess(step, read.product_flops()),
        bytes=sum(o.bytes * o.times for o in step.operations),
        compiled_bytes=None if inspection is None else inspection.work.bytes,
        ridge={
            name: chip.flops(name) / chip.memory.bandwidth
            for name in ("bf16", "fp16", "tf32", "fp32")
            if name in chip.peak
        },
        notes=tuple(_notes(target, step, inspection, uncompiled)),
    )


def _freed(traced: Traced, found: Kept, aliased: int | None, devices: int) -> Freed:
    donated = 0.0
    for leaf, given, share in zip(traced.leaves, traced.donated, traced.shares, strict=True):
        if given:
            size = math.prod(leaf.shape) * leaf.dtype.itemsize
            donated += size * (1 / devices if share is None else share)
    return Freed(
        donated, aliased, found.kept, found.without, found.alive, found.freed, found.recomputed_flops
    )


def _notes(
    target: aot.Target, step: Step, inspection: aot.Inspection | None, uncompiled: str
) -> Sequence[str]:
    notes = []
    if inspection is None:
        notes.append(f"decisions were NOT READ from compiled HLO: {uncompiled}")
    elif target.chip.kind == "gpu":
        notes.append(
            "compiled without a device, so without autotuning: on the cluster XLA may choose a library's product "
            "for some of them, and then runs apart what a Triton fusion holds here"
        )
    if step.unknown_loops:
        notes.append(f"the turns of {step.unknown_loops} loops depend on data: each counts as one")
    silent = sum(o.kind == "kernel" and not o.flops for o in step.operations)
    if silent:
        notes.append(f"{silent} kernels and library calls tell no FLOPs: they count as none")
    notes.append(
        "figures are of one device: what it holds of arguments, pinned arrays and in a shard_map is known, the rest "
        "is taken as cut evenly over all devices; bytes are those of each operation alone, before any fusion"
    )
    return notes

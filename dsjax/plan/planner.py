"""From a run and a cluster to a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsjax import aot
from dsjax.config import Config
from dsjax.errors import OutOfDeviceMemory
from dsjax.mesh import make_mesh
from dsjax.mesh.turns import usual_turns
from dsjax.plan import cost
from dsjax.plan.compiled import (
    CompiledStep,
    Described,
    batch_like,
    check_mesh,
    compile_jitted,
    compile_program,
    compile_step,
    describe,
    memory_limit,
    parts_of,
    vocabulary,
    vocabulary_notes,
)
from dsjax.plan.estimate import estimate
from dsjax.plan.fit import changes_that_fit
from dsjax.plan.measured import correction
from dsjax.plan.placement import placement
from dsjax.plan.result import Flops, MemoryUse, Plan
from dsjax.plan.settings import run_tokens, settings_of, with_money
from dsjax.plan.stages import PipelinedStep
from dsjax.plan.words import target_notes
from dsjax.train.diloco import MEETING
from dsjax.train.lay_out import lay_out
from dsjax.train.program import Program, Recipe

_MOST = 0.95  # of a GPU's memory that can be given to jax beside CUDA's and NCCL's own
NO_CHANGE = (
    "no change of microbatches, recomputation and mesh axes that was looked at makes it fit: use more or larger "
    "devices"
)
EVEN = (
    "experts are counted as if routers spread rows evenly over them; uneven rows take longer, not more memory"
)
CAUSAL = (
    "model FLOPs count causal attention once: only the scores that the mask keeps; hardware FLOPs are of "
    "every product in the program, with what is recomputed and what a mask throws away"
)


def plan(
    config: Config,
    on: str | aot.Target,
    *,
    tokens: float | None = None,
    chips: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    suggest: bool = True,
) -> Plan:
    """What a run's training step takes on a cluster that is not here; no device is touched.

    Args:
      config: of the run.
      on: the cluster, as `8xH100` or `2x8xH100`.
      tokens: to train on, for days and money; the run's own by default.
      chips: a file that describes further chips or changes known ones.
      options: the user's own XLA options.
      suggest: where it does not fit, compile other settings until some do.

    Raises:
      ConfigError: an unknown chip, a mesh or a batch that does not fit the cluster.
    """
    target = target_of(on, chips)
    tokens = tokens or run_tokens(config)
    check_mesh(config, target)
    missing = aot.missing_for(target.chip.kind)
    if missing:
        return estimate(config, target, vocabulary(config), tokens, missing)
    described = describe(config, target, vocabulary(config))
    try:
        found = summary(described, compile_step(described, options), tokens)
    except OutOfDeviceMemory as error:
        found = estimate(config, target, vocabulary(config), tokens, str(error))
    return with_changes(found, described, tokens, options) if suggest else found


def with_changes(
    found: Plan, described: Described, tokens: float, options: Mapping[str, Any] | None = None
) -> Plan:
    """The plan with what would make the step fit, each compiled, where it does not; itself where it does."""
    if found.fits:
        return found
    changes = changes_that_fit(described, lambda other: _tried(other, tokens, options))
    return replace(found, changes=changes, notes=found.notes if changes else (*found.notes, NO_CHANGE))


def report(
    jitted: Any,
    args: tuple[Any, ...],
    on: str | aot.Target,
    *,
    model_flops: float | None = None,
    tokens_per_step: float | None = None,
    tokens: float | None = None,
    chips: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
) -> Plan:
    """The same of any jitted step, of dsjax or not.

    Args:
      jitted: from `jax.jit`.
      args: its arguments: trees of `jax.ShapeDtypeStruct` with shardings over a mesh of
        `dsjax.aot.parse_target(on).devices()`.
      model_flops: of a step on all devices, for the MFU; tokens_per_step, tokens: for days and money.

    Raises:
      ConfigError: an unknown chip, arguments on other devices, or no wheels to compile with.
      OutOfDeviceMemory: XLA finds no way to place the program in the chip's memory.
    """
    target = target_of(on, chips)
    step = compile_jitted(jitted, args, target, options)
    return _plan(target, step, None, {}, {}, model_flops, tokens_per_step, tokens)


def plan_recipe(
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
) -> Plan:
    """The plan of a trainer's own model and loss (`Trainer.plan`).

    Args:
      recipe, config: the trainer's.
      batch: a tree of arrays, or of `jax.ShapeDtypeStruct`, with all rows of a step as their first dimension.
      flops_per_step: model FLOPs on all devices, for the MFU; tokens_per_step, tokens: for days and money.

    Raises:
      ConfigError: an unknown chip, a mesh or a batch that does not fit the cluster, no wheels to compile with.
      OutOfDeviceMemory: XLA finds no way to place the program in the chip's memory.
    """
    target = target_of(on, chips)
    program, abstract = lay_out_recipe(recipe, config, batch, target)
    step = compile_program(program, abstract, target, options)
    return recipe_summary(program, abstract, config, target, step, flops_per_step, tokens_per_step, tokens)


def lay_out_recipe(recipe: Recipe, config: Config, batch: Any, target: aot.Target) -> tuple[Program, Any]:
    """A trainer's own model and loss on a target's devices, and its abstract batch (see `plan_recipe`)."""
    check_mesh(config, target)
    with aot.on(target):
        program = lay_out(recipe, config, make_mesh(config.mesh, target.devices()))
    return program, batch_like(batch, program)


def recipe_summary(
    program: Program,
    batch: Any,
    config: Config,
    target: aot.Target,
    step: CompiledStep,
    flops_per_step: float | None,
    tokens_per_step: float | None,
    tokens: float | None,
) -> Plan:
    """The plan of a trainer's compiled step; `batch` is the abstract one."""
    parts, settings = parts_of(program, batch), settings_of(config)
    found = _plan(target, step, program, parts, settings, flops_per_step, tokens_per_step, tokens)
    return replace(found, placement=placement(program.layout))


def target_of(on: str | aot.Target, chips: str | Path | None = None) -> aot.Target:
    """The cluster of a name, with the chips of a file."""
    return on if isinstance(on, aot.Target) else aot.parse_target(on, aot.load_chips(chips))


def summary(described: Described, step: CompiledStep, tokens: float | None) -> Plan:
    """The plan of a run's compiled step."""
    found = _plan(
        described.target,
        step,
        described.program,
        described.parts,
        settings_of(described.config),
        described.model_flops,
        described.tokens,
        tokens,
    )
    notes = (*found.notes, *vocabulary_notes(described.config))
    return replace(found, notes=notes, placement=placement(described.program.layout))


def _tried(described: Described, tokens: float, options: Mapping[str, Any] | None) -> Plan | None:
    try:
        return summary(described, compile_step(described, options), tokens)
    except OutOfDeviceMemory:
        return None


def _plan(
    target: aot.Target,
    step: CompiledStep,
    program: Program | None,
    parts: Mapping[str, int],
    settings: Mapping[str, Any],
    model_flops: float | None,
    tokens_per_step: float | None,
    tokens: float | None,
) -> Plan:
    known = correction(target)
    staged = None if program is None else _staged(program, step.inspection, target, known.reached)
    inspection = step.inspection if staged is None else staged.inspection
    apart = None if program is None else program.parts.apart
    if apart is not None:
        inspection = inspection.seldom(MEETING, apart.inner_steps)
    groups, flops = cost.traffic(inspection.collectives, target), inspection.work.flops
    dtype = max(flops, key=lambda name: flops[name]) if flops else "bf16"
    forecast = staged.forecast() if staged else cost.step_forecast(inspection, target, known.reached)
    notes = [*target_notes(target), *step.notes, *known.notes, *cost.unit_notes(target.chip, dtype), CAUSAL]
    unknown = [c for c in inspection.custom_calls if c.kind == "kernel" and not c.flops]
    if unknown:
        notes.append(f"{len(unknown)} kernels tell no FLOPs: their arithmetic is not in the times")
    memory = _memory(target, inspection, parts)
    if memory.limit < memory.total <= _MOST * memory.capacity:
        notes.append(f"with XLA_PYTHON_CLIENT_MEM_FRACTION={_MOST} in the environment it fits as it is")
    if any(loop.trips is None for loop in inspection.loops):
        notes.append("the turns of some loops are not known before the run: each counts as one")
    if any(usual_turns(loop.op_name) is not None for loop in inspection.loops):
        notes.append(EVEN)
    return Plan(
        target=target.name,
        devices=target.size,
        compiled=True,
        mesh=dict(inspection.mesh),
        settings=settings,
        memory=memory,
        traffic=groups,
        hidden_share=cost.hidden_share(groups),
        flops=Flops(model_flops, (staged or inspection).flops * target.size),
        roofline=cost.roofline(inspection.work, groups, target),
        forecast=with_money(forecast, target, dtype, model_flops, tokens_per_step, tokens),
        compile_seconds=step.seconds,
        options=step.options,
        notes=tuple(notes),
        pipeline=staged.told() if staged else None,
    )


def _staged(
    program: Program, inspection: aot.Inspection, target: aot.Target, reached: cost.Reached
) -> PipelinedStep | None:
    """The step as its pipeline runs it; None where there is none."""
    if program.stacking is None:
        return None
    work = program.stacking.pipelining.work
    return PipelinedStep(inspection, work, program.accumulation, target, reached)


def _memory(target: aot.Target, inspection: aot.Inspection, parts: Mapping[str, int]) -> MemoryUse:
    memory = inspection.memory
    assert memory is not None  # compiled, not text
    gradients = min(parts.get("gradients", 0), memory.temporary)
    known = sum(parts.get(name, 0) for name in ("parameters", "optimizer", "exchange", "batch"))
    return MemoryUse(
        parameters=parts.get("parameters", 0),
        gradients=gradients,
        optimizer=parts.get("optimizer", 0),
        activations=memory.temporary - gradients,
        batch=parts.get("batch", 0),
        exchange=parts.get("exchange", 0),
        other=max(0, memory.total - memory.temporary - known),
        total=memory.total,
        capacity=target.chip.memory.bytes,
        limit=memory_limit(target),
    )

"""From a run and a cluster to a plan."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsjax import aot
from dsjax.config import Config
from dsjax.errors import OutOfDeviceMemory
from dsjax.plan import cost
from dsjax.plan.analytic import estimate
from dsjax.plan.compiled import (
    CompiledStep,
    Described,
    check_mesh,
    compile_step,
    describe,
    memory_limit,
    vocabulary,
)
from dsjax.plan.fit import changes_that_fit
from dsjax.plan.result import Flops, Forecast, MemoryUse, Plan

CAUSAL = (
    "model FLOPs count causal attention once: only the scores that the mask keeps; hardware FLOPs are of "
    "every product in the program, with what is recomputed and what a mask throws away"
)
_SECONDS_A_DAY = 86400


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
    tokens = (
        tokens or float(config.train.steps) * config.train.global_batch_size * config.train.sequence_length
    )
    check_mesh(config, target)
    missing = aot.missing_for(target.chip.kind)
    if missing:
        return estimate(config, target, vocabulary(config), tokens, missing)
    described = describe(config, target, vocabulary(config))
    try:
        found = summary(described, compile_step(described, options), tokens)
    except OutOfDeviceMemory as error:
        found = estimate(config, target, vocabulary(config), tokens, str(error))
    if suggest and not found.fits:
        return replace(
            found, changes=changes_that_fit(described, lambda other: _tried(other, tokens, options))
        )
    return found


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
    chosen = aot.choose_options(target, options)
    started = time.monotonic()
    compiled = aot.compile_for(target, aot.lower_for(target, jitted, *args), chosen.options)
    seconds = time.monotonic() - started
    step = CompiledStep(aot.inspect(compiled), seconds, chosen.options, tuple(chosen.notes))
    return _plan(target, step, {}, {}, model_flops, tokens_per_step, tokens)


def target_of(on: str | aot.Target, chips: str | Path | None = None) -> aot.Target:
    """The cluster of a name, with the chips of a file."""
    return on if isinstance(on, aot.Target) else aot.parse_target(on, aot.load_chips(chips))


def summary(described: Described, step: CompiledStep, tokens: float | None) -> Plan:
    """The plan of a run's compiled step."""
    return _plan(
        described.target,
        step,
        described.parts,
        settings_of(described.config),
        described.model_flops,
        described.tokens,
        tokens,
    )


def settings_of(config: Config) -> dict[str, Any]:
    """What of a config's section train shapes the step."""
    keys = ("global_batch_size", "sequence_length", "gradient_accumulation_steps", "remat", "fsdp_gather")
    return {key: getattr(config.train, key) for key in keys}


def _tried(described: Described, tokens: float, options: Mapping[str, Any] | None) -> Plan | None:
    try:
        return summary(described, compile_step(described, options), tokens)
    except OutOfDeviceMemory:
        return None


def _plan(
    target: aot.Target,
    step: CompiledStep,
    parts: Mapping[str, int],
    settings: Mapping[str, Any],
    model_flops: float | None,
    tokens_per_step: float | None,
    tokens: float | None,
) -> Plan:
    inspection = step.inspection
    groups = cost.traffic(inspection.collectives, target)
    forecast = cost.step_forecast(inspection, target)
    notes = [*step.notes, CAUSAL]
    unknown = [c for c in inspection.custom_calls if c.kind == "kernel" and not c.flops]
    if unknown:
        notes.append(f"{len(unknown)} kernels tell no FLOPs: their arithmetic is not in the times")
    if any(loop.trips is None for loop in inspection.loops):
        notes.append("the turns of some loops are not known before the run: each counts as one")
    return Plan(
        target=target.name,
        devices=target.size,
        compiled=True,
        mesh=dict(inspection.mesh),
        settings=settings,
        memory=_memory(target, inspection, parts),
        traffic=groups,
        hidden_share=cost.hidden_share(groups),
        flops=Flops(model_flops, inspection.flops * target.size),
        roofline=cost.roofline(inspection.work, groups, target),
        forecast=with_money(forecast, target, inspection, model_flops, tokens_per_step, tokens),
        compile_seconds=step.seconds,
        options=step.options,
        notes=tuple(notes),
    )


def _memory(target: aot.Target, inspection: aot.Inspection, parts: Mapping[str, int]) -> MemoryUse:
    memory = inspection.memory
    assert memory is not None  # compiled, not text
    gradients = min(parts.get("gradients", 0), memory.temporary)
    known = sum(parts.get(name, 0) for name in ("parameters", "optimizer", "batch"))
    return MemoryUse(
        parameters=parts.get("parameters", 0),
        gradients=gradients,
        optimizer=parts.get("optimizer", 0),
        activations=memory.temporary - gradients,
        batch=parts.get("batch", 0),
        other=max(0, memory.total - memory.temporary - known),
        total=memory.total,
        capacity=target.chip.memory.bytes,
        limit=memory_limit(target),
    )


def with_money(
    forecast: Forecast,
    target: aot.Target,
    inspection: aot.Inspection | None,
    model_flops: float | None,
    tokens_per_step: float | None,
    tokens: float | None,
) -> Forecast:
    """A forecast with what follows from its seconds."""
    seconds, chip = forecast.step_seconds, target.chip
    flops = inspection.work.flops if inspection is not None else {}
    dtype = max(flops, key=lambda name: flops[name]) if flops else "bf16"
    mfu = model_flops / (seconds * target.size * chip.flops(dtype)) if model_flops and seconds else None
    if not tokens_per_step or not seconds:
        return replace(forecast, mfu=mfu)
    rate = tokens_per_step / seconds
    days = tokens / rate / _SECONDS_A_DAY if tokens else None
    hours = None if days is None else days * 24 * target.size
    return replace(
        forecast,
        mfu=mfu,
        tokens_per_second=rate,
        tokens=tokens,
        days=days,
        dollars=None if hours is None else hours * chip.price,
        kwh=None if hours is None else hours * chip.watts / 1000,
    )

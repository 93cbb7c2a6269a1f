"""Layouts of a run on a cluster: all by formulas, the best few compiled, one chosen."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from dsjax import aot
from dsjax.config import Config
from dsjax.errors import ConfigError, OutOfDeviceMemory
from dsjax.mesh.axes import divisors
from dsjax.plan import analytic, estimate
from dsjax.plan.compiled import compile_step, describe, vocabulary
from dsjax.plan.planner import summary
from dsjax.plan.result import Forecast, Plan
from dsjax.plan.settings import as_typed, with_settings
from dsjax.plan.show import gib, seconds

_REMATS = ("none", "dots", "full")
# The formulas are not exact: what they put a little over the limit is still tried.
_SLACK = 1.1
# Of small models they are less so: where none seems to fit, the smallest of up to so many limits are tried.
_HOPE = 1.5


@dataclass(frozen=True)
class Candidate:
    """A layout.

    Attributes:
      settings: what differs from the config, `section.key` -> value.
      plan: by formulas, or compiled.
    """

    settings: dict[str, Any]
    plan: Plan

    @property
    def words(self) -> str:
        """Its settings as they are typed."""
        return as_typed(self.settings)


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
      config: the run with the best layout.
      ranked: those that were compiled, the best first; those that do not fit last.
      counted: layouts that were possible; fitting: of them, by formulas.
      why: in words, why the first is the first.
    """

    config: Config
    ranked: tuple[Candidate, ...]
    counted: int
    fitting: int
    why: tuple[str, ...]

    @property
    def best(self) -> Plan:
        """The winner's plan."""
        return self.ranked[0].plan


def search(
    config: Config,
    target: aot.Target,
    *,
    tokens: float | None = None,
    compiles: int = 4,
    progress: Callable[[str], None] = lambda line: None,
) -> Found:
    """The fastest layout that fits: mesh axes, microbatches and recomputation; the batch stays.

    Args:
      compiles: how many of the best by formulas are compiled, and ranked by what was compiled.
      progress: is told what is being compiled.

    Raises:
      ConfigError: no layout divides, or the model has no formulas.
      OutOfDeviceMemory: no layout fits.
    """
    vocab_size = vocabulary(config)
    possible = sorted(
        _estimated(config, target, vocab_size, tokens), key=lambda c: c.plan.forecast.step_seconds
    )
    if not possible:
        raise ConfigError(
            f"{target.name}: no layout divides train.global_batch_size {config.train.global_batch_size} and the "
            f"model over {target.size} devices; use a multiple of {target.size}, or fewer devices"
        )
    fitting = [c for c in possible if c.plan.memory.total <= _SLACK * c.plan.memory.limit]
    compiler = aot.missing_for(target.chip.kind) is None
    chosen = _varied(fitting, compiles) or (_smallest(possible, compiles) if compiler else [])
    if not chosen:
        least = min(possible, key=lambda c: c.plan.memory.total)
        raise OutOfDeviceMemory(
            f"{target.name}: no layout fits: the smallest takes about {gib(least.plan.memory.total)} of "
            f"{gib(least.plan.memory.limit)} a device ({least.words}); use more or larger devices"
        )
    ranked = []
    if compiler:
        for candidate in chosen:
            progress(f"compiling {candidate.words}")
            ranked.append(_compiled(config, target, vocab_size, tokens, candidate))
    else:
        ranked = chosen
    ranked.sort(key=lambda c: (not c.plan.fits, c.plan.forecast.step_seconds))
    if not ranked[0].plan.fits:
        raise OutOfDeviceMemory(
            f"{target.name}: none of the {len(ranked)} likeliest layouts fits once compiled; the nearest takes "
            f"{gib(min(c.plan.memory.total for c in ranked))} of {gib(ranked[0].plan.memory.limit)} a device"
        )
    winner = with_settings(config, ranked[0].settings)
    return Found(winner, tuple(ranked), len(possible), len(fitting), tuple(reasons(ranked)))


def layouts(config: Config, target: aot.Target) -> Iterator[dict[str, Any]]:
    """Every mesh of data, fsdp, context and tensor on the target, microbatches and remat that divide the batch.

    Matrices are cut along one dimension or along both (`mesh.tensor: [columns, rows]`).
    """
    devices, train = target.size, config.train
    for tensor, context in itertools.product(divisors(devices), repeat=2):
        if tensor > target.domain or tensor * context > devices or devices % (tensor * context):
            continue
        if context > 1 and train.sequence_length % (2 * context):
            continue
        rest = devices // (tensor * context)
        if train.global_batch_size % rest:
            continue
        micros = divisors(train.global_batch_size // rest)
        for fsdp, sizes, micro, remat in itertools.product(divisors(rest), _sizes(tensor), micros, _REMATS):
            yield {
                "mesh.data": rest // fsdp,
                "mesh.fsdp": fsdp,
                "mesh.context": context,
                "mesh.tensor": sizes,
                "train.gradient_accumulation_steps": micro,
                "train.remat": remat,
            }


def _sizes(tensor: int) -> list[int | list[int]]:
    """Matrices cut into so many parts along one dimension, or along both: columns and rows."""
    return [tensor, *([tensor // rows, rows] for rows in divisors(tensor) if 1 < rows < tensor)]


def _estimated(
    config: Config, target: aot.Target, vocab_size: int | None, tokens: float | None
) -> Iterator[Candidate]:
    known: dict[tuple[Any, ...], analytic.Laid | None] = {}
    for settings in layouts(config, target):
        changed = with_settings(config, settings)
        mesh = tuple(str(value) for name, value in settings.items() if name.startswith("mesh."))
        if mesh not in known:
            try:
                known[mesh] = analytic.lay_out(changed, target, vocab_size)
            except ConfigError as error:
                if any(line.startswith("model.") for line in error.faults):
                    raise
                known[mesh] = None  # the model does not divide so
        laid = known[mesh]
        if laid is not None:
            yield Candidate(settings, estimate.plan_of(laid.with_config(changed), tokens, "searching"))


def _varied(fitting: list[Candidate], number: int) -> list[Candidate]:
    """The first few, of each mesh the two best: near-equal microbatches would crowd out other layouts."""
    taken: list[Candidate] = []
    for candidate in fitting:
        alike = [c for c in taken if c.plan.mesh == candidate.plan.mesh]
        if len(alike) < 2:
            taken.append(candidate)
        if len(taken) == number:
            break
    return taken


def _smallest(possible: list[Candidate], number: int) -> list[Candidate]:
    """Those of the least memory, of each mesh the two best, as far as there is hope for them."""
    near = [c for c in possible if c.plan.memory.total <= _HOPE * c.plan.memory.limit]
    return _varied(sorted(near, key=lambda c: c.plan.memory.total), number)


def _compiled(
    config: Config, target: aot.Target, vocab_size: int | None, tokens: float | None, candidate: Candidate
) -> Candidate:
    described = describe(with_settings(config, candidate.settings), target, vocab_size)
    try:
        return Candidate(candidate.settings, summary(described, compile_step(described), tokens))
    except OutOfDeviceMemory:
        memory = candidate.plan.memory
        over = replace(memory, total=max(memory.total, memory.limit + 1))
        return Candidate(candidate.settings, replace(candidate.plan, memory=over))


def reasons(ranked: list[Candidate]) -> Iterator[str]:
    """Why the first is the first, against each of the others."""
    best = ranked[0].plan
    yield (
        f"{ranked[0].words}: {seconds(best.forecast.step_seconds)} a step, {gib(best.memory.total)} a device, "
        f"{_parts(best.forecast)}"
    )
    for other in ranked[1:]:
        plan = other.plan
        if not plan.fits:
            yield f"{other.words}: does not fit, {gib(plan.memory.total)} of {gib(plan.memory.limit)}"
            continue
        slower = plan.forecast.step_seconds / best.forecast.step_seconds - 1
        yield f"{other.words}: {slower:.1%} slower, {gib(plan.memory.total)} a device, {_against(plan, best)}"


def _parts(forecast: Forecast) -> str:
    return f"{seconds(forecast.compute_seconds)} of compute, {seconds(forecast.exposed_seconds)} waiting for links"


def _against(plan: Plan, best: Plan) -> str:
    compute = plan.forecast.compute_seconds - best.forecast.compute_seconds
    waits = plan.forecast.exposed_seconds - best.forecast.exposed_seconds
    told = [
        f"{seconds(abs(value))} {'more' if value > 0 else 'less'} {what}"
        for value, what in ((compute, "compute"), (waits, "waiting for links"))
        if value
    ]
    return " and ".join(told) or "the same time"

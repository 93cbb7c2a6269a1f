"""Layouts of a run on a cluster: all by formulas, the best few compiled, one chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from dsjax import aot
from dsjax.config import Config
from dsjax.errors import ConfigError, OutOfDeviceMemory
from dsjax.models import build
from dsjax.plan import analytic, estimate
from dsjax.plan.compiled import compile_step, describe, vocabulary
from dsjax.plan.layouts import layouts, own, pipelines
from dsjax.plan.planner import summary
from dsjax.plan.result import Forecast, Plan
from dsjax.plan.settings import as_typed, run_tokens, with_settings
from dsjax.plan.show import gib, seconds

# The formulas are not exact: what they put a little over the limit is still tried.
_SLACK = 1.1
# Of small models they are less so: where none seems to fit, the smallest of up to so many limits are tried.
_HOPE = 1.5
# Layouts compiled at most for each that was asked for: where some fit, and where none has yet.
_MOST, _MOST_IN_VAIN = 3, 8
# Layouts of one mesh: near-equal microbatches would crowd out other meshes.
_ALIKE = 2


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
      tokens: of the whole run, for days and money; the run's own by default.
      compiles: how many that fit are compiled at least, the config's own layout first.
      progress: is told what is being compiled.

    Raises:
      ConfigError: no layout divides, or the model has no formulas.
      OutOfDeviceMemory: no layout fits.
    """
    vocab_size = vocabulary(config)
    tokens = tokens or run_tokens(config)
    formulas = _Formulas(config, target, vocab_size)
    mine = own(config, target, formulas.experts)
    possible = sorted(_estimated(formulas, mine, tokens), key=lambda c: c.plan.forecast.step_seconds)
    if not possible:
        raise ConfigError(
            f"{target.name}: no layout divides train.global_batch_size {config.train.global_batch_size} and the "
            f"model over {target.size} devices; use a multiple of {target.size}, or fewer devices"
        )
    if aot.missing_for(target.chip.kind) is None:

        def compiled(candidate: Candidate) -> Candidate:
            progress(f"compiling {candidate.words}")
            return _compiled(config, target, vocab_size, tokens, candidate)

        ranked = _explored(
            possible, next((c for c in possible if c.settings == mine), None), compiles, compiled
        )
    else:
        ranked = _varied([c for c in possible if c.plan.fits], compiles)
    ranked.sort(key=lambda c: (not c.plan.fits, c.plan.forecast.step_seconds))
    if not ranked or not ranked[0].plan.fits:
        raise _nothing_fits(target, possible, ranked)
    winner = with_settings(config, ranked[0].settings)
    fitting = sum(c.plan.fits for c in possible)
    return Found(winner, tuple(ranked), len(possible), fitting, tuple(reasons(ranked)))


def _nothing_fits(target: aot.Target, possible: list[Candidate], tried: list[Candidate]) -> OutOfDeviceMemory:
    least = min(tried or possible, key=lambda c: c.plan.memory.total)
    how = f"of the {len(tried)} that were compiled" if tried else "by formulas"
    return OutOfDeviceMemory(
        f"{target.name}: no layout fits: the smallest, {how}, takes {gib(least.plan.memory.total)} of "
        f"{gib(least.plan.memory.limit)} a device ({least.words}); use more or larger devices"
    )


def _explored(
    possible: list[Candidate],
    first: Candidate | None,
    compiles: int,
    compiled: Callable[[Candidate], Candidate],
) -> list[Candidate]:
    """Compiles the likeliest layout again and again, correcting the formulas by what comes out.

    One compiled layout corrects all of its kind (which axes cut tensors, what is recomputed) in time and
    memory.  Ends after `compiles` that fit once none is expected to be faster, at the latest after some times as many.
    """
    learned: dict[Any, tuple[float, float]] = {}
    tried: list[Candidate] = []
    left = list(possible)

    def expected(candidate: Candidate) -> tuple[float, float]:
        slower, larger = learned.get(_kind(candidate), (1.0, 1 / _SLACK))
        memory = candidate.plan.memory
        return candidate.plan.forecast.step_seconds * slower, memory.total * larger / memory.limit

    while left:
        fitting = [c for c in tried if c.plan.fits]
        if len(tried) >= (_MOST if fitting else _MOST_IN_VAIN) * compiles:
            break
        new = [c for c in left if sum(c.plan.mesh == other.plan.mesh for other in fitting) < _ALIKE]
        hopeful = [c for c in new if expected(c)[1] <= 1]
        if not hopeful and not fitting:
            near = [c for c in new if expected(c)[1] <= _HOPE]
            hopeful = sorted(near, key=lambda c: expected(c)[1])[:1]
        if not hopeful:
            break
        following = first if first in left else min(hopeful, key=expected)
        fastest = min((c.plan.forecast.step_seconds for c in fitting), default=math.inf)
        if len(fitting) >= compiles and expected(following)[0] >= fastest:
            break
        left.remove(following)
        tried.append(compiled(following))
        learned[_kind(following)] = (
            tried[-1].plan.forecast.step_seconds / following.plan.forecast.step_seconds,
            tried[-1].plan.memory.total / following.plan.memory.total,
        )
    return tried


def _kind(candidate: Candidate) -> tuple[Any, ...]:
    """What the formulas are wrong about alike."""
    mesh, pipeline = candidate.plan.mesh, candidate.plan.pipeline
    cut = (axis in mesh for axis in ("context", "tensor", "tensor_rows"))
    return *cut, candidate.settings["train.remat"], pipeline and pipeline.schedule


def _estimated(formulas: _Formulas, mine: dict[str, Any] | None, tokens: float | None) -> Iterator[Candidate]:
    """Every layout that divides, by formulas; with a pipeline only those that come near to fitting.

    Args:
      mine: the layout that the config has already.
    """
    config, target = formulas.config, formulas.target
    for settings in layouts(config, target, formulas.experts):
        laid = formulas.laid(settings)
        if laid is not None:
            yield Candidate(settings, estimate.plan_of(laid, tokens, "searching"))
    staged = list(pipelines(config, target, formulas.layers, formulas.experts))
    if mine is not None and "mesh.pipeline" in mine and mine not in staged:
        staged.append(mine)
    for settings in staged:
        laid = formulas.laid(settings)
        if laid is None:
            continue
        memory = analytic.memory(laid)
        # Their schedules are simulated, so what is too large is left out first.
        if settings == mine or memory.total <= _HOPE * memory.limit:
            yield Candidate(settings, estimate.plan_of(laid, tokens, "searching"))


class _Formulas:
    """A config with other settings, laid out; where parameters lie the same they are laid out once.

    Attributes:
      layers: of the model, 0 until a layout divides; experts: of a layer.
    """

    def __init__(self, config: Config, target: aot.Target, vocab_size: int | None):
        self.config, self.target, self._vocab_size = config, target, vocab_size
        family = build(config.model, platform=target.chip.kind, vocab_size_hint=vocab_size).family
        self.experts = family.experts if family else 0
        self._known: dict[tuple[Any, ...], analytic.Laid | None] = {}
        self.layers = 0

    def laid(self, settings: dict[str, Any]) -> analytic.Laid | None:
        """The run with these settings; None where it does not divide."""
        changed = with_settings(self.config, settings)
        places = ("mesh.", "pipeline.virtual_stages")
        key = tuple(str(value) for name, value in settings.items() if name.startswith(places))
        if key not in self._known:
            self._known[key] = self._lay_out(changed)
        known = self._known[key]
        try:
            return known and known.with_config(changed)
        except ConfigError:
            return None  # a schedule or a recomputation that does not go with it

    def _lay_out(self, config: Config) -> analytic.Laid | None:
        try:
            laid = analytic.lay_out(config, self.target, self._vocab_size)
        except ConfigError as error:
            if any(line.startswith("model.") for line in error.faults):
                raise
            return None  # the model does not divide so
        self.layers = laid.sizes.stacked
        return laid


def _varied(fitting: list[Candidate], number: int) -> list[Candidate]:
    """The first few, of each mesh the two best."""
    taken: list[Candidate] = []
    for candidate in fitting:
        alike = [c for c in taken if c.plan.mesh == candidate.plan.mesh]
        if len(alike) < _ALIKE:
            taken.append(candidate)
        if len(taken) == number:
            break
    return taken


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

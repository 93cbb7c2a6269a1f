"""Settings with which a step fits that does not, each compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dsjax.config import Config
from dsjax.errors import ConfigError
from dsjax.plan import analytic
from dsjax.plan.compiled import Described, describe, memory_limit
from dsjax.plan.result import Change, Plan
from dsjax.plan.settings import as_typed, with_settings
from dsjax.plan.sizes import has_formulas

_ENOUGH = 3  # changes to propose
_TRIES = 8  # compiles at most
_HOPE = 1.15  # times the limit: what formulas say to be more is not compiled
_MICROBATCHES = (2, 4, 8, 16, 32)


def changes_that_fit(described: Described, plan_of: Callable[[Described], Plan | None]) -> tuple[Change, ...]:
    """The smallest changes of settings that make a step fit, the fastest of them first.

    Args:
      plan_of: compiles what it is given; None where that cannot be placed at all.
    """
    config, found, tries = described.config, [], 0
    for settings in _candidates(config, dict(described.program.mesh.shape), described.program.microbatches):
        if _hopeless(with_settings(config, settings), described):
            continue
        try:
            other = describe(with_settings(config, settings), described.target, described.model.vocab_size)
        except ConfigError:
            continue  # it does not divide
        held = sum(size for name, size in other.parts.items() if name != "gradients")
        if held > memory_limit(other.target):
            continue  # the state alone is too large
        tries += 1
        tried = plan_of(other)
        if tried is not None and tried.fits:
            found.append(
                Change(as_typed(settings), tried.memory.total, tried.forecast.step_seconds),
            )
        if len(found) == _ENOUGH or tries == _TRIES:
            break
    useful = [one for one in found if not any(_better(other, one) for other in found)]
    return tuple(sorted(useful, key=lambda change: change.step_seconds))


def _better(one: Change, other: Change) -> bool:
    """Whether one takes less of both memory and time."""
    return one.total < other.total and one.step_seconds < other.step_seconds


def _hopeless(config: Config, described: Described) -> bool:
    """Whether the formulas, which are for families on GPUs, leave no hope; True too where it does not divide."""
    if described.target.chip.kind != "gpu" or not has_formulas(described.model):
        return False
    try:
        memory = analytic.memory(analytic.lay_out(config, described.target, described.model.vocab_size))
    except ConfigError:
        return True
    return memory.total > _HOPE * memory.limit


def _candidates(config: Config, mesh: Mapping[str, int], count: int) -> Iterator[dict[str, Any]]:
    """Other settings, those that change and cost least first.

    Args:
      count: microbatches of a step.
    """
    train, key = config.train, "train.gradient_accumulation_steps"
    if mesh["pipeline"] > 1:
        count, key = count // train.gradient_accumulation_steps, "pipeline.microbatches"
    remats = [remat for remat in ("dots", "full") if _keeps(remat) < _keeps(train.remat)]
    microbatches = [
        count * factor for factor in _MICROBATCHES if train.global_batch_size % (count * factor) == 0
    ]
    yield from ({key: n} for n in microbatches[:2])
    yield from ({"train.remat": remat} for remat in remats)
    strongest = {"train.remat": remats[-1]} if remats else {}
    if mesh["data"] > 1:
        yield {"mesh.data": 1, "mesh.fsdp": mesh["data"] * mesh["fsdp"]}
    for n in microbatches if remats else microbatches[2:]:
        yield {**strongest, key: n}
    for axes in _wider(mesh):
        yield {**strongest, **axes}
        if microbatches:
            yield {**strongest, **axes, key: microbatches[-1]}


def _keeps(remat: str) -> int:
    return {"full": 0, "dots": 2, "none": 3}.get(remat, 1)


def _wider(mesh: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """The mesh with what replicas there are made shards, then with a tensor or context axis."""
    shards = mesh["data"] * mesh["fsdp"]
    if mesh["data"] > 1:
        yield {"mesh.data": 1, "mesh.fsdp": shards}
    for axis in ("tensor", "context"):
        for size in (2, 4, 8):
            if shards % size == 0 and mesh[axis] == 1:
                yield {"mesh.data": 1, "mesh.fsdp": shards // size, f"mesh.{axis}": size}

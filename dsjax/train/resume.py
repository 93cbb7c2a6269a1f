"""The state that a call of `fit` starts from: given, restored from the newest tier that is good, or new."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import jax

from dsjax.checkpoint import DiskCheckpoints
from dsjax.config import Config
from dsjax.errors import Damaged, InputError
from dsjax.train.agreement import everywhere, of_process_0
from dsjax.train.carried import Kept, Workers, with_params
from dsjax.train.given import require_alive
from dsjax.train.memory import refuse_oversized_state
from dsjax.train.program import Program
from dsjax.train.rundir import RunDirectory
from dsjax.train.saving import Tiers
from dsjax.train.state import State


class Store(Protocol):
    """A tier, as far as reading goes."""

    directory: Any  # a path or a URL

    def latest_step(self) -> int | None:
        """The newest state's step."""

    def facts(self, step: int) -> dict[str, Any]:
        """What was written beside the state of a step."""

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """The state of a step in the places of `like`, and its facts."""


@dataclass(frozen=True)
class Start:
    """What a call of `fit` starts from.

    Attributes:
      facts: what was written beside the state; empty for a given or a new one.
      differences: settings that changed since.
      tier: memory, disk or remote; None: the state was given, or is new.
      passed_over: checkpoints that were newer but damaged, and why, as (step, tier, reason).
    """

    program: Program
    state: State
    facts: dict[str, Any] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    tier: str | None = None
    passed_over: list[tuple[int, str, str]] = field(default_factory=list)


def restore(program: Program, store: Store, step: int | None = None) -> tuple[State, dict[str, Any]]:
    """The state saved at a step (None: the newest) and what was written beside it.

    Raises:
      InputError: there is none, it cannot be read, or it is of another model.
      OutOfDeviceMemory: it is larger than a device.
    """
    if step is None:
        step = store.latest_step()
        if step is None:
            raise InputError(f"no checkpoint in {store.directory}; train first, or set run.dir")
    refuse_oversized_state(program.abstract_state, list(program.mesh.devices.flat))
    facts = store.facts(step)
    kept, workers = Kept.of(program, facts), Workers.of(program, facts)
    one = replace(workers.one, residuals={})
    stored, back = program.held(facts, one)
    read, facts = store.restore(step, replace(workers.stored(stored), residuals=kept.stored))
    state = workers.parted(back(replace(workers.joined(read), residuals={})), read)
    notes = [note for note in (workers.note, kept.note) if note]
    return replace(state, residuals=kept.carried(read.residuals)), facts | {"notes": notes}


def candidates(tiers: Tiers) -> Iterator[tuple[int, str, Store]]:
    """What there is to resume from, newest first; of two of the same step, what is read faster."""
    found: list[tuple[int, str, Store]] = []
    if tiers.memory is not None:
        found += [(step, "memory", tiers.memory) for step in tiers.memory.newest()]
    found += [(step, "disk", tiers.disk) for step in of_process_0(tiers.disk.steps())]
    yield from sorted(found, key=lambda one: (-one[0], one[1] != "memory"))
    # A copy elsewhere is older than what is here, unless here is nothing that can be used.
    if tiers.remote is not None:
        here = {step for step, tier, _ in found if tier == "disk"}
        for step in of_process_0(tiers.remote.steps() if jax.process_index() == 0 else []):
            if step not in here and tiers.remote.ranged:
                yield step, "remote", tiers.remote
            elif step not in here:
                _fetch(tiers, step)
                yield step, "remote", tiers.disk


def _fetch(tiers: Tiers, step: int) -> None:
    """Brings a copy to the disk."""
    assert tiers.remote is not None
    fault = ""
    if jax.process_index() == 0:
        try:
            tiers.remote.fetch(step, tiers.disk.directory / str(step))
        except InputError as error:
            fault = error.faults[0]
    if not everywhere(not fault):
        raise Damaged(fault or f"checkpoint {step}: process 0 could not fetch its copy")


def begin(
    program: Program, tiers: Tiers, directory: RunDirectory, config: Config, given: State | None
) -> Start:
    """The state to start from, and the program that it is of: one whose stages its run had found for itself.

    Raises:
      InputError, ConfigError: `run.resume` or the run directory do not allow it, or nothing that was
        saved can be read.
    """
    where, resume = tiers.disk.directory, config.run.resume
    if given is not None:
        require_alive(given)
        latest = tiers.disk.latest_step()
        if latest is not None and resume != "never" and latest > int(given.step):
            raise InputError(
                f"{where} already holds step {latest} but fit was given a state of step {int(given.step)}; leave "
                "state out to resume, or choose another run.dir"
            )
        _refuse_if_never(latest, resume, where)
        return Start(program, given)
    passed_over: list[tuple[int, str, str]] = []
    differences: list[str] | None = None
    for step, tier, store in candidates(tiers):
        _refuse_if_never(step, resume, where)
        if differences is None:
            differences = directory.check_resume()
        try:
            going_on = program.going_on(store.facts(step))
            state, facts = restore(going_on, store, step)
            whole, reason = True, ""
        except Damaged as error:
            whole, reason = False, error.faults[0]
        if everywhere(whole):
            _put_aside(tiers.disk, passed_over)
            return Start(going_on, state, facts, differences, tier, passed_over)
        passed_over.append((step, tier, reason or "another process found it damaged"))
    if passed_over:
        raise InputError([reason for _, _, reason in passed_over])
    if resume == "must":
        raise InputError(f"run.resume is must but {where} holds no checkpoint; set run.resume to auto")
    return Start(program, _fresh_state(program, config))


def _put_aside(disk: DiskCheckpoints, passed_over: list[tuple[int, str, str]]) -> None:
    """Damaged checkpoints get another name: as the newest they would have better ones removed."""
    for step, tier, _ in passed_over if jax.process_index() == 0 else ():
        if tier == "disk":
            with contextlib.suppress(OSError):
                (disk.directory / str(step)).rename(disk.directory / f"{step}.damaged")


def _refuse_if_never(latest: int | None, resume: str, where: Path) -> None:
    if resume == "never" and latest is not None:
        raise InputError(
            f"run.resume is never but {where} holds a checkpoint of step {latest}; choose another run.name or "
            "run.dir, or set run.resume to auto"
        )


def _fresh_state(program: Program, config: Config) -> State:
    state, source = program.init(config.run.seed), config.run.init_from
    if source is None:
        return state
    other = DiskCheckpoints(Path(source) / "checkpoints")
    latest = other.latest_step()
    if latest is None:
        raise InputError(f"run.init_from {source}: holds no checkpoint")
    stored, back = program.held(other.facts(latest), {"params": program.abstract_state.params})
    return with_params(program, state, back(other.restore_part(latest, stored))["params"])

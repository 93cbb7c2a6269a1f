"""The state that a call of `fit` starts from: given, restored, or new."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dsjax.checkpoint import DiskCheckpoints
from dsjax.config import Config
from dsjax.errors import InputError
from dsjax.train.carried import Kept, Workers, with_params
from dsjax.train.given import require_alive
from dsjax.train.memory import refuse_oversized_state
from dsjax.train.program import Program
from dsjax.train.rundir import RunDirectory
from dsjax.train.state import State


def restore(
    program: Program, checkpoints: DiskCheckpoints, step: int | None = None
) -> tuple[State, dict[str, Any]]:
    """The state saved at a step (None: the newest) and what was written beside it.

    Raises:
      InputError: there is none, it cannot be read, or it is of another model.
      OutOfDeviceMemory: it is larger than a device.
    """
    if step is None:
        step = checkpoints.latest_step()
        if step is None:
            raise InputError(f"no checkpoint in {checkpoints.directory}; train first, or set run.dir")
    refuse_oversized_state(program.abstract_state, list(program.mesh.devices.flat))
    facts = checkpoints.facts(step)
    kept, workers = Kept.of(program, facts), Workers.of(program, facts)
    one = replace(workers.one, residuals={})
    stored, back = program.held(facts, one)
    read, facts = checkpoints.restore(step, replace(workers.stored(stored), residuals=kept.stored))
    state = workers.parted(back(replace(workers.joined(read), residuals={})), read)
    return replace(state, residuals=kept.carried(read.residuals)), facts | {"residuals_note": kept.note}


def going_on(program: Program, checkpoints: DiskCheckpoints, given: State | None) -> Program:
    """The program with the stages that the newest checkpoint's run had found for itself."""
    latest = checkpoints.latest_step()
    return program if given is not None or latest is None else program.going_on(checkpoints.facts(latest))


def first_state(
    program: Program,
    checkpoints: DiskCheckpoints,
    directory: RunDirectory,
    config: Config,
    given: State | None,
) -> tuple[State, dict[str, Any], list[str]]:
    """The state to start from, its checkpoint's metadata, and settings that changed since.

    Raises:
      InputError, ConfigError: `run.resume` or the run directory do not allow it.
    """
    latest, resume, where = checkpoints.latest_step(), config.run.resume, checkpoints.directory
    if resume == "never" and latest is not None:
        raise InputError(
            f"run.resume is never but {where} holds a checkpoint of step {latest}; choose another run.name or "
            "run.dir, or set run.resume to auto"
        )
    if resume == "must" and latest is None and given is None:
        raise InputError(f"run.resume is must but {where} holds no checkpoint; set run.resume to auto")
    if given is not None:
        require_alive(given)
        if latest is not None and latest > int(given.step):
            raise InputError(
                f"{where} already holds step {latest} but fit was given a state of step {int(given.step)}; leave "
                "state out to resume, or choose another run.dir"
            )
        return given, {}, []
    if latest is None:
        return _fresh_state(program, config), {}, []
    differences = directory.check_resume()
    state, facts = restore(program, checkpoints, latest)
    return state, facts, differences


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

"""When a run's state is saved, into which tier, and what happens when that fails."""

from __future__ import annotations

import collections
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from dsjax.checkpoint import DiskCheckpoints, MemorySnapshots
from dsjax.checkpoint.places import put_aside
from dsjax.checkpoint.snapshots import snapshot_directory
from dsjax.config.checkpoint import CheckpointConfig, MemoryConfig
from dsjax.errors import ConfigError, Diverged, DsjaxError, InputError, Preempted
from dsjax.faults import Faults
from dsjax.processes import everywhere, together
from dsjax.train.recorder import Recorder
from dsjax.train.state import State
from dsjax.train.votes import SAVE

if TYPE_CHECKING:
    from dsjax.checkpoint.remote import RemoteCheckpoints

# Steps between snapshots where a supervisor is there to make use of them and nothing else is asked for.
SUPERVISED_EVERY = 10
_COMMIT_SECONDS = 60.0


def snapshot_every(memory: MemoryConfig) -> int:
    """Steps between snapshots in memory; 0: none are made."""
    if memory.every is not None:
        return memory.every
    return SUPERVISED_EVERY if os.environ.get("DSJAX_SUPERVISED") else 0


@dataclass
class Tiers:
    """Where the states of a run are kept; None: not there.

    Attributes:
      notes: for the user, on what is not there.
    """

    disk: DiskCheckpoints
    memory: MemorySnapshots | None = None
    remote: RemoteCheckpoints | None = None
    notes: list[str] = field(default_factory=list)
    _closed: bool = False

    def close(self) -> None:
        """Ends the threads behind snapshots and copies; closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        for tier in (self.memory, self.remote):
            if tier is not None:
                tier.close()


def open_tiers(config: CheckpointConfig, disk: DiskCheckpoints, run_directory: Path) -> Tiers:
    """The tiers that a run's settings name.

    Raises:
      ConfigError: a store's URL that cannot be used, or the extra for it is missing.
    """
    every = snapshot_every(config.memory)
    # Snapshots of an earlier start count, and must not outlive this one's steps, whether or not it makes any.
    left = snapshot_directory(config.memory, run_directory).is_dir()
    wanted = bool(every) or not everywhere(not left)
    memory, notes = None, []
    if wanted:
        memory = MemorySnapshots(config.memory, run_directory, every)
        try:
            memory.newest()
        except ConfigError as error:
            if config.memory.every is not None:
                raise
            memory, notes = None, [_without_snapshots(error)]
    if not config.remote.urls:
        return Tiers(disk, memory, notes=notes)
    from dsjax.checkpoint.remote import RemoteCheckpoints

    return Tiers(disk, memory, RemoteCheckpoints(config.remote), notes)


def make_room_in_memory(tiers: Tiers, config: MemoryConfig, state: State, step: int) -> None:
    """Takes the memory for snapshots of a run that goes on from a step; notes where there is too little.

    Raises:
      ConfigError: there is too little, and snapshots were asked for.
    """
    if tiers.memory is None:
        return
    if not tiers.memory.every:
        tiers.memory.forget_after(step)
        return
    try:
        tiers.memory.prepare(state, step)
    except ConfigError as error:
        if config.every is not None:
            raise
        tiers.memory.close()
        tiers.memory = None
        tiers.notes.append(_without_snapshots(error))


def _without_snapshots(error: ConfigError) -> str:
    return f"no snapshots in memory: {error.faults[0]} (checkpoint.memory.every=0 says that none are wanted)"


def last_good(disk: DiskCheckpoints) -> str:
    """The newest checkpoint on disk, in words."""
    if not disk.failed:
        disk.wait()
    latest = disk.latest_step()
    if latest is None:
        return "no checkpoint was saved"
    return f"the last good checkpoint is {disk.directory / str(latest)}"


@dataclass
class Saving:
    """The saves of one call of `fit`.

    Attributes:
      facts: what is written beside the state of a step.
      on_checkpoint: the user's callback, with the step of a checkpoint that has begun to be saved.
    """

    config: CheckpointConfig
    tiers: Tiers
    facts: Callable[[int], Mapping[str, Any]]
    recorder: Recorder
    on_checkpoint: Callable[[int], None] | None = None
    faults: Faults = field(default_factory=Faults)
    _evaluated: tuple[int, Mapping[str, Any]] = (-1, {})
    _saved_at: int = -1
    _failures: int = 0
    _owed: bool = False
    _late: bool = False
    _uncommitted: int | None = None
    _committed: int = -1
    _copied: int = -1
    _trouble: str | None = None

    def __post_init__(self) -> None:
        self._saved_time = self._copied_time = time.monotonic()
        self._notices: collections.deque[tuple[str, dict[str, Any]]] = collections.deque()
        self.tiers.disk.before_save = self.faults.before_save
        if self.tiers.remote is not None:
            self.tiers.disk.held = self.tiers.remote.busy
            self.tiers.remote.on_event = lambda kind, **told: self._notices.append((kind, told))

    # ---- what the loop calls -------------------------------------------------------------------

    def started_at(self, step: int) -> None:
        """The run goes on from the state of this step, which the disk may hold already; 0: from a new one."""
        self._saved_at = step if step and self.tiers.disk.has(step) else -1

    def evaluated(self, step: int, results: Mapping[str, Any]) -> None:
        """What was found of the state of a step, by which the best are kept."""
        self._evaluated = step, results

    def settle_before_going_back(self, step: int) -> None:
        """Waits for what is being saved; a save that fails is of a state that no longer counts."""
        try:
            together(self.tiers.disk.wait)
        except DsjaxError as error:
            if jax.process_count() > 1:
                raise  # processes that wait for each other in a save cannot begin another one
            self.tiers.disk.recover()
            self.recorder.event("save_failed", step, reason=error.faults[0], failures=1)
        self._settle()

    def gone_back(self, step: int) -> None:
        """States of later steps no longer count; those on disk get another name, until the run goes back again.

        Raises:
          InputError: a checkpoint cannot be renamed.
        """
        if self.tiers.memory is not None:
            self.tiers.memory.forget_after(step)
        disk, remote = self.tiers.disk, self.tiers.remote

        def leave() -> None:
            for old in disk.directory.glob("*.rolled_back"):
                shutil.rmtree(old, ignore_errors=True)
            for later in (one for one in disk.steps() if one > step):
                put_aside(disk.directory / str(later), "rolled_back")
                if disk.has(later):
                    where = disk.directory / str(later)
                    raise InputError(f"{where}: cannot be renamed, and is of a past that did not last")
            if remote is not None:
                remote.forget_after(step)

        together(lambda: leave() if jax.process_index() == 0 else None)
        self._uncommitted, self._evaluated, self._owed = None, (-1, {}), False
        self._committed, self._copied = (min(one, step) for one in (self._committed, self._copied))
        self.started_at(step)

    def keep_anew(self, step: int, state: State) -> None:
        """Saves a state that was gone back to, so that a restart, too, leaves out the batches that it leaves out."""
        memory = self.tiers.memory
        if memory is not None and memory.every:
            memory.forget_after(step - 1)  # two snapshots of one step would be one made of both
            memory.save(step, state, self.facts(step))
        else:
            self._late = True

    def laid_out_anew(self, step: int, state: State) -> None:
        """The state has other shapes or places from now on."""
        if self.tiers.memory is not None and self.tiers.memory.every:
            self.tiers.memory.prepare(state, step)

    def votes(self) -> int:
        """What this process asks of all of them: process 0's clock tells when minutes have passed."""
        minutes = self.config.disk.every_minutes
        due = minutes is not None and time.monotonic() - self._saved_time >= 60 * minutes
        return SAVE if due and jax.process_index() == 0 else 0

    def step_done(self, step: int, state: State) -> None:
        """Saves where that is due; tells of saves that failed, and makes up for them.

        Raises:
          InputError, InternalError: a save failed as often as it may.
        """
        self.check(step)
        memory = self.tiers.memory
        if memory is not None and memory.due(step):
            # Lines of steps that a resume does not repeat must be written before it can go on from here.
            self.recorder.drain()
            self.recorder.beat(step, "saving")
            if self.recorder.sound:
                memory.save(step, state, self.facts(step))
        every = self.config.disk.every
        if self._owed or self._late or self.recorder.asked & SAVE or (every and step % every == 0):
            self._save(step, state)

    def check(self, step: int) -> None:
        """Meets what background work has come to."""
        try:
            self.tiers.disk.check()
        except DsjaxError as error:
            self._failed(step, error)
        if self.tiers.memory is not None:
            self.tiers.memory.check()
            self._tell_trouble(step, self.tiers.memory.trouble)
        self._settle()
        self._tell_of_copies()

    def _tell_of_copies(self) -> None:
        while self._notices:
            kind, told = self._notices.popleft()
            self.recorder.event(kind, told.pop("step"), **told)
            self.recorder.progress.message(
                f"{kind.replace('_', ' ')}: {told.get('reason') or told.get('url')}"
            )

    def _tell_trouble(self, step: int, trouble: str | None) -> None:
        """A snapshot that did not reach the other host is told once, not at every snapshot."""
        if trouble and not self._trouble:
            self.recorder.event("buddy_unreached", step, reason=trouble)
            self.recorder.progress.message(f"step {step}: snapshots stay on their own host: {trouble}")
        self._trouble = trouble

    def last(self, step: int, state: State) -> None:
        """Saves the state that the loop ends with, and waits until it is on disk."""
        while True:
            if self._saved_at != step or self._owed or self._late:
                self._save(step, state, last=True)
            try:
                self.tiers.disk.wait()
            except DsjaxError as error:
                self._failed(step, error)
            if not self._owed:
                self._settle(last=True)
                return

    # ---- how a call ends -----------------------------------------------------------------------

    def __enter__(self) -> Saving:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Finishes what is under way; after an error of the run, errors of that are not told."""
        if error is None or isinstance(error, Preempted):
            self._finish()
            return
        with contextlib.suppress(Exception):
            # Where only this process failed, the others would not take part in finishing a save.
            together = jax.process_count() == 1 or isinstance(error, Diverged)
            if together and not self.tiers.disk.failed:
                self.tiers.disk.wait()
        with contextlib.suppress(Exception):
            self.tiers.close()

    def _finish(self) -> None:
        """All is on disk: the last copy is sent, and memory given back."""
        self.tiers.disk.wait()
        # Process 0 commits: until it has, what is in memory is all there is.
        until = time.monotonic() + _COMMIT_SECONDS
        while self._saved_at >= 0 and not self.tiers.disk.has(self._saved_at) and time.monotonic() < until:
            time.sleep(0.05)
        if self.tiers.memory is not None:
            self.tiers.memory.clear()
        self.tiers.close()
        self._tell_of_copies()

    # ---- within --------------------------------------------------------------------------------

    def _save(self, step: int, state: State, *, last: bool = False) -> None:
        recorder = self.recorder
        recorder.drain()
        if not recorder.sound and not last:
            # The parameters may be ruined already: the checkpoints from before are worth more than their place.
            if not self._late:
                recorder.progress.message(f"step {step}: not saved before a step goes well again")
            self._late = True
            return
        recorder.beat(step, "saving")
        if not self._owed:
            self._failures = 0
        self._owed = self._late = False
        recorder.asked &= ~SAVE
        self._saved_at, self._saved_time = step, time.monotonic()
        evaluated, results = self._evaluated
        try:
            self.tiers.disk.wait()
            self._settle()
            self.tiers.disk.save(step, state, self.facts(step), results if evaluated == step else {})
        except DsjaxError as error:
            self._failed(step, error)
            return
        self._uncommitted = step
        if self.on_checkpoint is not None:
            self.on_checkpoint(step)
        recorder.start_clock()

    def _failed(self, step: int, error: DsjaxError) -> None:
        self._failures += 1
        retries = self.config.disk.retries
        # Processes that wait for each other in a save cannot begin another one.
        if self._failures > retries or jax.process_count() > 1:
            raise error
        self._owed, self._uncommitted = True, None
        self.tiers.disk.recover()
        reason = error.faults[0]
        self.recorder.event("save_failed", step, reason=reason, failures=self._failures)
        self.recorder.progress.message(
            f"step {step}: saving failed: {reason}; trying again at the next step ({self._failures} of {retries})"
        )

    def _settle(self, *, last: bool = False) -> None:
        """Tells of the newest checkpoint once all of it is on disk, and has it copied when that is due."""
        disk, remote, step = self.tiers.disk, self.tiers.remote, self._uncommitted
        if step is not None and disk.has(step):
            self._uncommitted, self._committed = None, step
            self.recorder.event("checkpoint_saved", step)
        if remote is None or jax.process_index() != 0 or self._committed == self._copied:
            return
        due = time.monotonic() - self._copied_time >= 60 * self.config.remote.every_minutes
        if due or last:
            remote.copy(self._committed, disk.directory / str(self._committed))
            self._copied, self._copied_time = self._committed, time.monotonic()

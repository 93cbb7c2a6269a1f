"""What a worker is doing, for the supervisor that watches it: a small record in shared memory.

Telling costs one write to mapped memory.  The record also has the durations of the latest steps, by
which the supervisor judges what is slow and what hangs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import statistics
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# In the order in which they come at one step.
PHASES = (
    "starting",
    "restoring",
    "waiting for data",
    "compiling",
    "step",
    "evaluating",
    "saving",
    "finished",
)
# Of these nobody can say how long they take; of the others a few steps' time is enough.
SLOW_PHASES = frozenset(("starting", "restoring", "compiling", "saving"))

_DURATIONS = 15
# count, process, attempt, phase, step, boot time, durations of steps (0: none yet), count again
_RECORD = struct.Struct(f"<qiiiqd{_DURATIONS}dq")


@dataclass(frozen=True)
class Beat:
    """What a record says.

    Attributes:
      count: grows with each beat.
      process: the worker's process id.
      attempt: which start of the job the worker belongs to, from 0.
      step: the step that it is at.
      what: what it does there, one of `PHASES`.
      booted: when its process began to beat, seconds since 1970.
      typical_seconds: the median of its latest steps; None before the second one.
    """

    count: int
    process: int
    attempt: int
    step: int
    what: str
    booted: float
    typical_seconds: float | None


def stacks_path(path: str | Path) -> Path:
    """Where the worker of a record writes its Python stacks on SIGUSR1."""
    return Path(f"{path}.stacks")


def create(path: Path) -> None:
    """Makes the record of a worker that has not beaten yet."""
    path.write_bytes(bytes(_RECORD.size))
    stacks_path(path).unlink(missing_ok=True)


class Heartbeat:
    """A worker's side. Without a supervisor it beats for nobody, at no cost.

    Args:
      path: the record, as `create` made it; None: there is no supervisor.
      attempt: which start of the job this is.
    """

    def __init__(self, path: str | Path | None = None, attempt: int = 0):
        self._map: mmap.mmap | None = None
        self._attempt = attempt
        self._count, self._booted = 0, time.time()
        self._stepped: tuple[int, float] | None = None  # step, when
        self._durations = [0.0] * _DURATIONS
        if path is None:
            return
        # A supervisor that has gone took its directory with it.
        with contextlib.suppress(OSError, ValueError):
            with open(path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), _RECORD.size)
            stacks = stacks_path(path).open("wb", buffering=0)
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
            self.at(0, "starting")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Heartbeat:
        """The heartbeat that `dsjax launch` asks for by DSJAX_HEARTBEAT, and else one for nobody."""
        attempt = environ.get("DSJAX_ATTEMPT", "0")
        return cls(environ.get("DSJAX_HEARTBEAT") or None, int(attempt) if attempt.isdecimal() else 0)

    def at(self, step: int, what: str) -> None:
        """Tells that work goes on.

        Args:
          step: the step that is being worked at.
          what: one of `PHASES`; long work of the quick ones (an evaluation of many batches) beats again
            and again.
        """
        if self._map is None:
            return
        if what == "step":
            self._measure(step)
        self._count += 1
        _RECORD.pack_into(
            self._map, 0, self._count, os.getpid(), self._attempt, PHASES.index(what), step, self._booted,
            *self._durations, self._count,
        )  # fmt: skip

    def _measure(self, step: int) -> None:
        now = time.monotonic()
        if self._stepped is not None and step > self._stepped[0]:
            each = (now - self._stepped[1]) / (step - self._stepped[0])
            self._durations = [*self._durations[1:], each]
        self._stepped = step, now


class Pulse:
    """A supervisor's side of one record."""

    def __init__(self, path: Path):
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), _RECORD.size, access=mmap.ACCESS_READ)

    def read(self) -> Beat | None:
        """The latest beat; None: there was none yet, or it is being written at this moment."""
        first, process, attempt, phase, step, booted, *durations, last = _RECORD.unpack(self._map)
        if not first or first != last:
            return None
        known = [seconds for seconds in durations if seconds]
        typical = statistics.median(known) if known else None
        return Beat(first, process, attempt, step, PHASES[phase], booted, typical)

    def close(self) -> None:
        self._map.close()

"""The worker processes of one node: started, watched by exit code and heartbeat, signalled."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from dsjax.launch.distributed import gpus, share
from dsjax.launch.options import beats_itself
from dsjax.launch.output import Output
from dsjax.observe.heartbeat import Beat, Pulse, create, stacks_path

EXIT_NO_PROGRAM = 127
_PR_SET_PDEATHSIG = 1
# A look at the heartbeats that comes late (a paused machine, say) tells nothing of the time between.
_LONGEST_LOOK = 1.0
_STATES = {
    psutil.STATUS_STOPPED: "stopped by a signal",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "waiting for a disk, a network file system or a device",
}


@dataclass(frozen=True)
class Generation:
    """The workers of all nodes from one start to the next.

    Attributes:
      key: tells it from every other one.
      attempt: counts the starts, from 0.
      coordinator: HOST:PORT of rank 0, a new port each time.
      processes: workers on all nodes.
      first: rank of this node's first worker.
      nodes, wanted: nodes that take part, and how many there would be if all came.
      name: this node's name.
    """

    key: str
    attempt: int
    coordinator: str
    processes: int
    first: int
    nodes: int
    wanted: int
    name: str


@dataclass(frozen=True)
class Look:
    """A worker as its node sees it.

    Attributes:
      rank: in the job.
      code: exit code, 128 + N where signal N ended it; None: it runs.
      step, what: its latest heartbeat; "" where it has never beaten and need not.
      idle: seconds since the heartbeat changed.
      typical: median seconds of its steps; None: unknown yet.
      state: why the system does not run it, in words; "" where it does.
    """

    rank: int
    code: int | None = None
    step: int = -1
    what: str = ""
    idle: float = 0.0
    typical: float | None = None
    state: str = ""


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes] | None  # None: there is no such program any more
    pulse: Pulse
    record: Path
    code: int | None = None
    beat: Beat | None = None
    idle: float = 0.0
    dumped: bool = field(default=False)


class Workers:
    """The workers of one node in one generation, and of those after it.

    Args:
      arguments: program and arguments.
      count: how many.
      output: where their output goes.
      directory: for the records of their heartbeats; on a memory file system.
    """

    def __init__(self, arguments: list[str], count: int, output: Output, directory: Path):
        self._arguments, self._count = arguments, count
        self._output, self._directory = output, directory
        self._workers: list[_Worker] = []
        self._looked = time.monotonic()

    def start(self, generation: Generation) -> None:
        """Starts all of them; those of the last generation have ended, or do so now."""
        self.signal(signal.SIGKILL, groups=True)
        for worker in self._workers:
            if worker.process is not None:
                worker.process.wait()
        self._output.settle(0.2)
        self._drop()
        parent = os.getpid()
        for local in range(self._count):
            rank = generation.first + local
            record = self._directory / f"rank-{rank}"
            create(record)
            environment = worker_environment(generation, local, self._count, record)
            worker = _Worker(rank, self._spawn(environment, parent), Pulse(record), record)
            worker.code = EXIT_NO_PROGRAM if worker.process is None else None
            self._workers.append(worker)
        for worker in self._workers:
            if worker.process is not None and worker.process.stdout is not None:
                self._output.follow(worker.rank, generation.attempt, worker.process.stdout)
        self._looked = time.monotonic()

    def _spawn(self, environment: dict[str, str], parent: int) -> subprocess.Popen[bytes] | None:
        try:
            return subprocess.Popen(
                self._arguments,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # Each worker leads a session of its own: its children get what is sent to its group.
                start_new_session=True,
                preexec_fn=lambda: _die_with(parent),
            )
        except OSError as error:
            self._output.say(f"cannot start {self._arguments[0]}: {error.strerror}")
            return None

    def poll(self) -> None:
        """Looks at exit codes and heartbeats."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, _LONGEST_LOOK), now
        for worker in self._workers:
            if worker.code is not None or worker.process is None:
                continue
            code = worker.process.poll()
            if code is not None:
                worker.code = code if code >= 0 else 128 - code
            beat = worker.pulse.read()
            if beat is not None and (worker.beat is None or beat.count != worker.beat.count):
                worker.beat, worker.idle = beat, 0.0
            else:
                worker.idle += passed

    def looks(self) -> list[Look]:
        """All of them, as last looked at."""
        return [self._look(worker) for worker in self._workers]

    def _look(self, worker: _Worker) -> Look:
        beat = worker.beat
        if beat is None:
            what = "starting" if beats_itself(self._arguments) else ""
            return Look(worker.rank, worker.code, what=what, idle=worker.idle)
        state = self._state(beat.process) if worker.idle > _LONGEST_LOOK and worker.code is None else ""
        return Look(worker.rank, worker.code, beat.step, beat.what, worker.idle, beat.typical_seconds, state)

    @staticmethod
    def _state(process: int) -> str:
        with contextlib.suppress(psutil.Error):
            return _STATES.get(psutil.Process(process).status(), "")
        return ""

    def signal(self, number: int, *, groups: bool = False) -> None:
        """Signals those that run; with `groups` their children too."""
        for worker in self._workers:
            if worker.code is None and worker.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    (os.killpg if groups else os.kill)(worker.process.pid, number)

    def ask_for_stacks(self) -> None:
        """Has the workers that beat write their Python stacks."""
        for worker in self._workers:
            # Whoever has not beaten has not been told what SIGUSR1 means and would die of it.
            if worker.code is None and worker.beat is not None:
                worker.dumped = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.beat.process, signal.SIGUSR1)

    def kill(self) -> None:
        """Ends all at once; stacks that were asked for are kept in the logs first."""
        for worker in self._workers:
            if worker.dumped:
                self._keep_stacks(worker)
        self.signal(signal.SIGKILL, groups=True)

    def _keep_stacks(self, worker: _Worker) -> None:
        worker.dumped = False
        path = self._output.logs / f"rank-{worker.rank}.stacks"
        with contextlib.suppress(OSError):
            text = stacks_path(worker.record).read_text(errors="replace")
            if not text:
                self._output.say(f"rank {worker.rank}: no stack, the process does not answer")
                return
            path.write_text(text)
            self._output.say(f"rank {worker.rank} is in {innermost(text)} (all of it: {path})")

    def _drop(self) -> None:
        for worker in self._workers:
            worker.pulse.close()
        self._workers.clear()


def innermost(stacks: str, frames: int = 3) -> str:
    """The innermost frames of the main thread, of jax's own only the first, from faulthandler's text."""
    main = stacks[max(0, stacks.find("Current thread")) :]
    lines = [line.strip() for line in main.splitlines() if line.startswith("  ")]
    told = [line for number, line in enumerate(lines) if not number or "/jax/_src/" not in line]
    return " < ".join(told[:frames]) or "no Python code"


def worker_environment(generation: Generation, local: int, count: int, record: Path) -> dict[str, str]:
    """What a worker finds in its environment: its place in the job, and who watches it."""
    environment = {
        **os.environ,
        "DSJAX_COORDINATOR": generation.coordinator,
        "DSJAX_NUM_PROCESSES": str(generation.processes),
        "DSJAX_PROCESS_ID": str(generation.first + local),
        "DSJAX_SUPERVISED": "1",
        "DSJAX_ATTEMPT": str(generation.attempt),
        "DSJAX_HEARTBEAT": str(record),
        "DSJAX_NODE": generation.name,
        "DSJAX_NODES": str(generation.nodes),
        "DSJAX_NODES_WANTED": str(generation.wanted),
        "PYTHONUNBUFFERED": "1",
    }
    devices = share(local, count, gpus(os.environ))
    if devices is not None:
        environment["DSJAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, devices))
    return environment


# Loaded before anything forks: a new process must not wait for a lock that another thread held.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _die_with(parent: int) -> None:
    """In a new process: be killed when the supervisor dies, however it dies."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

"""`dsjax launch`: N processes of one job on this host, watched together."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from dsjax.errors import EXIT_DONE, EXIT_PREEMPTED, InputError

VERBS = ("train", "eval", "generate", "data", "checkpoints", "doctor")
LOGS = "launch-logs"
# How long workers have to end by themselves once they are told to because another one died.
GRACE_SECONDS = 10.0
# Workers save together: when one has stopped after saving, the others are about to.
_SAVED_GRACE_SECONDS = 60.0
# A process that is killed takes its peers' connections with it: they may be seen to fail before it is.
_CAUSE_SECONDS = 1.0
# What ends a process from outside or by a fault of its own, never because a peer has gone (that is an abort).
_CAUSES = {128 + s for s in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)}
_PR_SET_PDEATHSIG = 1
# What XLA's CPU collectives print for every group of devices; the logs keep it.
_CHATTER = b"[Gloo] Rank "


def launch(workers: int, command: Sequence[str]) -> int:
    """Runs a command as the processes of one job on this host, and returns the job's exit code.

    Each process finds its place in DSJAX_COORDINATOR, DSJAX_NUM_PROCESSES and DSJAX_PROCESS_ID, and its
    share of the GPUs in DSJAX_LOCAL_DEVICE_IDS.  Its output goes to the terminal, each line behind
    its rank, and to ``launch-logs/TIME/rank-N.log``.  When one fails the others are ended.  SIGTERM and
    Ctrl-C are passed on, and the processes have the time they need to save.

    Args:
      workers: number of processes.
      command: a verb of dsjax and its arguments, or another program and its.

    Returns:
      0; the exit code of the first process that failed (128 + N where signal N ended it; one that was
      killed counts before the peers that failed for want of it); or 75 where they stopped after saving.

    Raises:
      InputError: there is no such program, or the logs cannot be written.
    """
    arguments = _arguments(command)
    logs = _log_directory()
    job = _Job(workers, arguments, logs)
    with job.receiving_signals():
        job.start()
        return job.watch()


def _arguments(command: Sequence[str]) -> list[str]:
    words = list(command)
    if words[:1] == ["--"]:
        del words[0]
    if not words:
        raise InputError("launch: nothing to run; dsjax launch --workers 2 -- train CONFIG, say")
    if words[0] in VERBS or words[0] == "dsjax":
        return [sys.executable, "-m", "dsjax", *words[words[0] == "dsjax" :]]
    program = shutil.which(words[0])
    if program is None:
        raise InputError(
            f"launch: {words[0]} is neither a verb of dsjax ({', '.join(VERBS)}) nor a program on PATH"
        )
    return [program, *words[1:]]


def _log_directory() -> Path:
    path = Path(LOGS) / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise InputError(
            f"launch: cannot write logs to {path.absolute()} ({error.strerror}); start it from a directory "
            "of yours"
        ) from None
    return path


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class _Job:
    """The processes, and what has become of them."""

    def __init__(self, workers: int, arguments: list[str], logs: Path):
        self._workers, self._arguments, self._logs = workers, arguments, logs
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._codes: dict[int, int] = {}
        self._failed: tuple[int, int] | None = None  # rank, code
        self._ended_by_us = False
        self._kill_at: float | None = None
        self._signals = 0
        self._echo_lock = threading.Lock()
        self._echo = True

    def start(self) -> None:
        self._say(f"{self._workers} processes; their logs are in {self._logs}/")
        address, parent = f"127.0.0.1:{_free_port()}", os.getpid()
        for rank in range(self._workers):
            # The reading side comes later: no thread may run while processes are forked.
            self._processes.append(
                subprocess.Popen(
                    self._arguments,
                    env=_environment(address, self._workers, rank),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=lambda: _die_with(parent),
                )
            )
        for rank, process in enumerate(self._processes):
            reader = threading.Thread(target=self._read, args=(rank, process), daemon=True)
            reader.start()
            self._readers.append(reader)
            threading.Thread(target=self._await, args=(rank, process), daemon=True).start()

    def watch(self) -> int:
        """Waits for all of them; the job's exit code."""
        while len(self._codes) < self._workers:
            try:
                rank, code = self._ended.get(timeout=0.2)
            except queue.Empty:
                if self._kill_at is not None and time.monotonic() >= self._kill_at:
                    self._kill_at = None
                    self._end_others(signal.SIGKILL)
                continue
            for ended, its_code in self._with_its_cause(rank, code):
                self._codes[ended] = its_code
                self._judge(ended, its_code)
        for reader in self._readers:
            # A worker's own child may hold the pipe open for ever.
            reader.join(timeout=2.0)
        if self._failed is not None:
            return self._failed[1]
        return EXIT_PREEMPTED if EXIT_PREEMPTED in self._codes.values() else EXIT_DONE

    def _with_its_cause(self, rank: int, code: int) -> list[tuple[int, int]]:
        """An end, and those that come at almost the same time, the likeliest cause first."""
        ends = [(rank, code)]
        if code in (EXIT_DONE, EXIT_PREEMPTED) or code in _CAUSES or self._ended_by_us:
            return ends
        until = time.monotonic() + _CAUSE_SECONDS
        with contextlib.suppress(queue.Empty):
            while len(self._codes) + len(ends) < self._workers:
                ends.append(self._ended.get(timeout=max(0.0, until - time.monotonic())))
        return sorted(ends, key=lambda end: end[1] not in _CAUSES)

    def _judge(self, rank: int, code: int) -> None:
        """Decides what the end of one means for the others."""
        alive = self._workers - len(self._codes)
        if code == EXIT_DONE or self._ended_by_us:
            return
        if code == EXIT_PREEMPTED:
            if alive and self._kill_at is None:
                self._kill_at = time.monotonic() + _SAVED_GRACE_SECONDS
            return
        if self._failed is None:
            self._failed = (rank, code)
            how = (
                f"was ended by {signal.Signals(code - 128).name}"
                if _is_signal(code)
                else f"ended with exit code {code}"
            )
            others = "; ending the others" if alive else ""
            self._say(f"rank {rank} {how} (see {self._logs}/rank-{rank}.log){others}")
        if alive:
            self._ended_by_us = True
            self._end_others(signal.SIGTERM)
            self._kill_at = time.monotonic() + GRACE_SECONDS

    def _end_others(self, number: int) -> None:
        for rank, process in enumerate(self._processes):
            if rank not in self._codes:
                # Each worker leads a session of its own: its children get the signal too.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    @contextlib.contextmanager
    def receiving_signals(self) -> Iterator[None]:
        """Passes SIGTERM and Ctrl-C on to the workers; a terminal that goes away is a SIGTERM."""

        def pass_on(number: int, frame: FrameType | None) -> None:
            self._signals += 1
            number = signal.SIGTERM if number == signal.SIGHUP else number
            for rank, process in enumerate(self._processes):
                if rank not in self._codes:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, number)
            if self._signals == 2:
                self._kill_at = time.monotonic() + GRACE_SECONDS

        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup sets it
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, pass_on) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # ---- output --------------------------------------------------------------------------------

    def _await(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        self._ended.put((rank, code if code >= 0 else 128 - code))

    def _read(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with (self._logs / f"rank-{rank}.log").open("wb") as log:
            for line in process.stdout:
                _write(log, line)
                if not line.startswith(_CHATTER):
                    self._print(f"[{rank}] ".encode() + line)

    def _say(self, text: str) -> None:
        self._print(f"dsjax launch: {text}\n".encode())

    def _print(self, line: bytes) -> None:
        with self._echo_lock:
            if self._echo:
                try:
                    sys.stdout.buffer.write(line if line.endswith(b"\n") else line + b"\n")
                    sys.stdout.buffer.flush()
                except OSError:  # the terminal has gone: the logs are left
                    self._echo = False
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write(log: IO[bytes], line: bytes) -> None:
    # A full disk must not stop the reading: the worker would wait for its pipe.
    with contextlib.suppress(OSError):
        log.write(line)
        log.flush()


def _is_signal(code: int) -> bool:
    return code > 128 and code - 128 in signal.valid_signals()


def _environment(address: str, workers: int, rank: int) -> dict[str, str]:
    from dsjax.launch.distributed import gpus, share

    environment = {
        **os.environ,
        "DSJAX_COORDINATOR": address,
        "DSJAX_NUM_PROCESSES": str(workers),
        "DSJAX_PROCESS_ID": str(rank),
        "PYTHONUNBUFFERED": "1",
    }
    devices = share(rank, workers, gpus(os.environ))
    if devices is not None:
        environment["DSJAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, devices))
    return environment


def _die_with(parent: int) -> None:
    """In a new process: be killed when the supervisor dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

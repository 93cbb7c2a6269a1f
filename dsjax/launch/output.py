"""The output of workers: each line to the terminal behind its rank, and to the rank's log."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import IO

from dsjax.errors import InputError

LOGS = "launch-logs"
# What XLA's CPU collectives print for every group of devices; the logs keep it. It is written piece by piece, one
# thread a device, so that words of others may stand between any two pieces: those are shown.
_CHATTER = re.compile(
    rb"\[Gloo\] Rank (\d+ is connected to (\d+ peer ranks\. (Expected number of connected peer ranks is : )?)?)?"
    rb"| is connected to | peer ranks\. |Expected number of connected peer ranks is : "
)


class Output:
    """The terminal, shared by supervisor and workers, and the directory of logs.

    Args:
      suffix: tells apart the directories of supervisors that may start at the same time in one place.

    Raises:
      InputError: the logs cannot be written.
    """

    def __init__(self, suffix: str = ""):
        self.logs = Path(LOGS) / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}{suffix}"
        self._lock, self._echo = threading.Lock(), True
        self._readers: list[threading.Thread] = []
        try:
            self.logs.mkdir(parents=True)
        except OSError as error:
            raise InputError(
                f"launch: cannot write logs to {self.logs.absolute()} ({error.strerror}); start it from a "
                "directory of yours"
            ) from None

    def say(self, text: str) -> None:
        """The supervisor's own words."""
        self._print(f"dsjax launch: {text}\n".encode())

    def log(self, rank: int) -> Path:
        """The log of a rank, of all of its starts."""
        return self.logs / f"rank-{rank}.log"

    def follow(self, rank: int, attempt: int, pipe: IO[bytes]) -> None:
        """Passes on what a worker writes, until it ends."""
        reader = threading.Thread(target=self._read, args=(rank, attempt, pipe), daemon=True)
        reader.start()
        self._readers.append(reader)

    def settle(self, seconds: float) -> None:
        """Waits for the last lines of workers that have ended, so long at most.

        A worker's own child may hold the pipe open for ever.
        """
        until = time.monotonic() + seconds
        for reader in self._readers:
            reader.join(timeout=max(0.0, until - time.monotonic()))
        self._readers.clear()

    def _read(self, rank: int, attempt: int, pipe: IO[bytes]) -> None:
        with self.log(rank).open("ab") as log:
            if attempt:
                _write(log, b"==== attempt %d ====\n" % attempt)
            for line in pipe:
                _write(log, line)
                own = without_chatter(line)
                if own is not None:
                    self._print(f"[{rank}] ".encode() + own)

    def _print(self, line: bytes) -> None:
        with self._lock:
            if self._echo:
                try:
                    sys.stdout.buffer.write(line if line.endswith(b"\n") else line + b"\n")
                    sys.stdout.buffer.flush()
                except OSError:  # the terminal has gone: the logs are left
                    self._echo = False
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def without_chatter(line: bytes) -> bytes | None:
    """The line less what XLA's CPU collectives said in it; None: they alone spoke."""
    if b"peer ranks" not in line and b"[Gloo] Rank " not in line:
        return line
    own = _CHATTER.sub(b"", line)
    return own if own.strip(b"0123456789 \n") else None


def _write(log: IO[bytes], line: bytes) -> None:
    # A full disk must not stop the reading: the worker would wait for its pipe.
    with contextlib.suppress(OSError):
        log.write(line)
        log.flush()

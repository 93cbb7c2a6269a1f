"""What a failure means: which one made the others fail, and whether the job starts again."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from dsjax.errors import (
    EXIT_BAD_INPUT,
    EXIT_DIVERGED,
    EXIT_DONE,
    EXIT_INTERNAL,
    EXIT_OUT_OF_MEMORY,
    EXIT_PREEMPTED,
)

# A process that is killed takes its peers' connections with it: they may be seen to fail before it is.
_CAUSE_SECONDS = 1.0
# What ends a process from outside or by a fault of its own, never because a peer has gone (that is an abort).
_KILLS = {128 + s for s in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)}
_CAUSES = _KILLS | {EXIT_BAD_INPUT, EXIT_DIVERGED, EXIT_OUT_OF_MEMORY}


class Budget:
    """How often a job may start again: so often in all, and not without getting further.

    Args:
      restarts: in all.
      fruitless: so many failures in a row without a step that was not reached before end the job.
    """

    def __init__(self, restarts: int, fruitless: int = 3):
        self._restarts, self._most_fruitless, self.used = restarts, fruitless, 0
        self._best, self._fruitless = -1, 0

    def refuses(self, reached: int) -> str:
        """Counts a failure at a step; why the job must not start again, "" if it may."""
        self._fruitless = 1 if reached > self._best else self._fruitless + 1
        self._best = max(self._best, reached)
        if self.used >= self._restarts:
            return f"--max-restarts {self._restarts} are used up"
        if self._fruitless >= self._most_fruitless:
            at = f"step {reached}" if reached >= 0 else "the first step"
            return f"{self._fruitless} failures in a row got no further than {at}"
        self.used += 1
        return ""

    def __str__(self) -> str:
        return f"restart {self.used} of at most {self._restarts}"


def cause(ends: Mapping[int, tuple[float, int]], workers: int, now: float) -> tuple[int, int] | None:
    """The rank and code of the worker whose failure made the others fail, once that can be told.

    Args:
      ends: rank -> when it was seen to have ended, and its code.
      workers: how many there are in all.
    """
    failed = [
        (when, rank, code) for rank, (when, code) in ends.items() if code not in (EXIT_DONE, EXIT_PREEMPTED)
    ]
    if not failed:
        return None
    failed.sort(key=lambda end: (end[2] not in _CAUSES, end[0]))
    _, rank, code = failed[0]
    known = code in _CAUSES or len(ends) == workers
    return (rank, code) if known or now >= min(failed)[0] + _CAUSE_SECONDS else None


def is_final(code: int) -> bool:
    """Whether starting again would be of no use: the command chose this code, and would again."""
    return not (_is_signal(code) or code in (1, EXIT_INTERNAL))


def how(code: int) -> str:
    """How a worker ended, in words."""
    if _is_signal(code):
        return f"was ended by {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}"


def _is_signal(code: int) -> bool:
    return code > 128 and code - 128 in signal.valid_signals()

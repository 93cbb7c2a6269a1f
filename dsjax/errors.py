"""The errors a user can meet, each with the exit code the command line ends with.

A message is one line a fault: what was expected, what came, which setting to change.  The
command line prints the lines and ends with ``exit_code``; a traceback is shown only under
``DSJAX_DEBUG=1``.
"""

from __future__ import annotations

from collections.abc import Iterable

EXIT_DONE = 0
EXIT_BAD_INPUT = 2
EXIT_DIVERGED = 3
EXIT_INTERNAL = 70
EXIT_OUT_OF_MEMORY = 71
EXIT_PREEMPTED = 75


class DsjaxError(Exception):
    """Base of every error that is reported to the user as plain lines."""

    exit_code = EXIT_INTERNAL

    def __init__(self, faults: str | Iterable[str]):
        self.faults = [faults] if isinstance(faults, str) else list(faults)
        super().__init__("\n".join(self.faults))


class ConfigError(DsjaxError):
    """The configuration is refused: nothing was compiled or written."""

    exit_code = EXIT_BAD_INPUT


class InputError(DsjaxError):
    """A file, data set, tokenizer or checkpoint cannot be used as it is."""

    exit_code = EXIT_BAD_INPUT


class Damaged(InputError):
    """A checkpoint or snapshot that cannot be trusted; an older one may serve."""


class Diverged(DsjaxError):
    """Training gave up: too many steps in a row were not finite."""

    exit_code = EXIT_DIVERGED


class FaultyDevice(Diverged):
    """A device holds or computes other numbers than it should: nothing of it counts.

    Attributes:
      trusted: the last step whose state was found to be right.
    """

    def __init__(self, message: str, trusted: int):
        super().__init__(message)
        self.trusted = trusted


class InternalError(DsjaxError):
    """Something failed that no setting of the user explains (a lost peer, a failed save)."""

    exit_code = EXIT_INTERNAL


class OutOfDeviceMemory(DsjaxError):
    """The step does not fit: the message says what was asked, what there is and what would fit."""

    exit_code = EXIT_OUT_OF_MEMORY


class Preempted(DsjaxError, SystemExit):
    """Stopped by a signal or ``train.stop_after`` after saving; the same command goes on.

    A script that does not catch it ends with the exit code and no traceback, as its supervisor expects.
    """

    exit_code = EXIT_PREEMPTED

    def __init__(self, faults: str | Iterable[str]):
        super().__init__(faults)
        self.code = EXIT_PREEMPTED

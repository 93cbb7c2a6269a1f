"""Signals to a supervisor."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Signals:
    """SIGTERM and Ctrl-C, kept for the supervisor to act on; a terminal that goes away is a SIGTERM."""

    def __init__(self) -> None:
        self._came: list[int] = []

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._came.append(signal.SIGTERM if number == signal.SIGHUP else number)

    def take(self) -> list[int]:
        """Those that came since the last call."""
        came, self._came = self._came, []
        return came

    @contextlib.contextmanager
    def received(self) -> Iterator[Signals]:
        """Receives them while the code inside runs."""
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup sets it
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._receive) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

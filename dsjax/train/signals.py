"""SIGTERM and Ctrl-C ask the loop to save and stop; a second Ctrl-C quits at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from dsjax.errors import EXIT_PREEMPTED


def stop_outside_of_training() -> None:
    """From now on SIGTERM ends the process with exit code 75 where no loop is there to receive it.

    At once: there is nothing to save, an exception would be lost where Python runs the handler inside a finaliser
    or a callback, and a process that leaves its cluster in good order waits for the others, minutes long.
    """

    def receive(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(Exception):  # it may have interrupted a write to the very stream
            print(
                "dsjax: stopped by SIGTERM; run the same command again to go on", file=sys.stderr, flush=True
            )
            sys.stdout.flush()
        os._exit(EXIT_PREEMPTED)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, receive)


class StopRequest:
    """Whether and by which signal this process was asked to stop."""

    def __init__(self) -> None:
        self.signal: str | None = None

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Receives the signals while the code inside runs; only the main thread can."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {n: signal.signal(n, request._receive) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

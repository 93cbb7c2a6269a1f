"""Sending snapshots to another host, behind the training."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass

from dsjax.checkpoint.snapshots.file import SnapshotFile, used_bytes
from dsjax.checkpoint.snapshots.peers import FAULTS, FIRST, Addresses, chunks, step_of

_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class _Order:
    """A snapshot to be sent: its file, its header as it was then, the name of the copy."""

    file: SnapshotFile
    header: bytes
    step: int
    name: str

    def stands(self) -> bool:
        """Whether the file still holds it."""
        return used_bytes(self.file.path)[0] == self.header


class Sender:
    """Sends this process's newest snapshot to its buddy; what it is too slow for is skipped.

    Attributes:
      sent_step: step of the newest snapshot that the buddy has; None: of none yet.
      trouble: why the last one was not sent; None: it was.
    """

    def __init__(self, addresses: Addresses, buddy: int):
        self._addresses, self._buddy = addresses, buddy
        self._next: _Order | None = None
        self._wake, self._committing = threading.Condition(), threading.Lock()
        self._busy = self._closing = False
        self._forgotten = 0
        self.sent_step: int | None = None
        self.trouble: str | None = None
        threading.Thread(target=self._run, daemon=True, name="snapshot-sender").start()

    def send(self, file: SnapshotFile, name: str) -> None:
        """Sends the snapshot that a file holds next, in place of any that waits."""
        order = _Order(file, used_bytes(file.path)[0], step_of(file.path), name)
        with self._wake:
            self._next = order
            self._wake.notify_all()

    def wait(self, seconds: float) -> None:
        """Waits until nothing is to be sent, or the time is up."""
        with self._wake:
            self._wake.wait_for(lambda: self._next is None and not self._busy, seconds)

    def forget(self) -> None:
        """Nothing that was to be sent counts any more."""
        with self._wake, self._committing:
            self._next, self._forgotten = None, self._forgotten + 1

    def close(self) -> None:
        """Ends the thread, after what it is sending."""
        with self._wake:
            self._closing, self._next = True, None
            self._wake.notify_all()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._busy = False
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._next is not None or self._closing)
                if self._next is None:
                    return
                order, self._next, self._busy = self._next, None, True
                forgotten = self._forgotten
            while not self._sent(order, forgotten):
                with self._wake:
                    given_up = lambda: self._next is not None or self._closing  # noqa: E731
                    if self._wake.wait_for(given_up, _RETRY_SECONDS) or forgotten != self._forgotten:
                        break

    def _sent(self, order: _Order, forgotten: int) -> bool:
        """Tries to send; False: it can be tried again."""
        try:
            if not order.stands() or not self._copy(order, forgotten):
                slow = "the network is slower than snapshots are made; raise checkpoint.memory.every"
                self.trouble = slow if forgotten == self._forgotten else None
                return True
        except FAULTS as error:
            self.trouble = f"rank {self._buddy}: {type(error).__name__}: {error}"
            return False
        self.sent_step, self.trouble = order.step, None
        return True

    def _copy(self, order: _Order, forgotten: int) -> bool:
        """Copies the file; False: it was written over meanwhile, or no longer counts."""
        data = order.file.raw(FIRST, used_bytes(order.file.path)[1])
        link = self._addresses.connect(self._buddy)
        try:
            answer, _ = self._addresses.request(link, "POST", json.dumps(["begin", order.name]))
            slot = answer.decode()
            self._addresses.request(link, "PUT", slot, chunks(data), data.size)
            with self._committing:
                if forgotten != self._forgotten or not order.stands():
                    return False
                end = json.dumps(["end", slot])
                self._addresses.request(link, "POST", end, order.header, len(order.header))
            return True
        finally:
            link.close()

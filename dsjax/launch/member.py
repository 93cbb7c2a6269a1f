"""A node as the leader knows it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from dsjax.launch.workers import Look


class Member:
    """A node that has come.

    Args:
      rank, name: of the node.
      workers: how many it starts.
      tell: gives it an order.
      is_own: it is the leader's own node.

    Attributes:
      drained: why it is to leave, in words; "" where it is not.
      silent: its link is down, for a short while yet.
      hung_up: its supervisor ended the link and did not come back at once, as when it was killed.
      lost: it has been silent for too long, or was started anew.
    """

    def __init__(
        self, rank: int, name: str, workers: int, tell: Callable[[dict[str, Any]], None], is_own: bool = False
    ):
        self.rank, self.name, self.workers, self.is_own = rank, name, workers, is_own
        self.tell = tell
        self.drained, self.silent, self.hung_up, self.lost = "", False, False, False
        self._key, self._first = "", 0  # of the generation that it was told to start
        self._status: dict[str, Any] = {"key": "", "address": "", "port": 0, "ill": "", "workers": []}
        self._looks: list[Look] = []

    def hear(self, status: dict[str, Any]) -> None:
        """Takes what the node says of itself."""
        self._status = status
        self._looks = [Look(**look) for look in status["workers"]]
        self.drained = self.drained or str(status["ill"])

    @property
    def coordinator(self) -> str:
        """HOST:PORT for the workers of a generation in which this node is the first."""
        host = self._status["address"]
        return f"[{host}]:{self._status['port']}" if ":" in host else f"{host}:{self._status['port']}"

    @property
    def looks(self) -> list[Look]:
        """Its workers in the generation that it was told to start."""
        if self._status["key"] == self._key:
            return self._looks
        return [Look(self._first + local) for local in range(self.workers)]

    @property
    def running(self) -> bool:
        """Whether some of its workers may still run."""
        return bool(self._key) and any(look.code is None for look in self.looks)

    def start(self, attempt: int, first: int, **generation: Any) -> None:
        """Has it start its workers; ranks begin with `first`."""
        # Not the attempt: it would be the same under a leader that was started anew.
        self._key, self._first = uuid.uuid4().hex, first
        start = {"key": self._key, "attempt": attempt, "first": first, "name": self.name, **generation}
        self.order("start", generation=start)

    def order(self, what: str, **more: Any) -> None:
        """Tells it what to do."""
        self.tell({"order": what, **more})

"""The processes of a job meet before jax.distributed starts, so that one that stays away can be named.

Rank 0 listens on the coordinator's own port until every rank has come, says "go", frees the port and
jax's service takes it over.  Meanwhile each rank is told who is still missing.  Messages are lines of
JSON; whoever says something else (a port scan, a health check) is not one of us and is dropped.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from dsjax.errors import ConfigError, InternalError
from dsjax.launch.lines import Peer, is_local, listen

_PAUSE_SECONDS = 0.2
_TELL_SECONDS = 0.3
_RANKS_NAMED = 16  # in a message


@dataclass(frozen=True)
class Meeting:
    """Where and with whom to meet.

    Attributes:
      address: HOST:PORT of rank 0.
      processes, rank: how many are to come, and which of them this process is.
      source: who said so, in words, for messages.
    """

    address: str
    processes: int
    rank: int
    source: str

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def is_local(self) -> bool:
        """Whether all processes are on this host."""
        return is_local(self.host)


def meet(meeting: Meeting, timeout: float) -> None:
    """Returns when every rank has come.

    Args:
      timeout: seconds to wait.

    Raises:
      InternalError: some did not; their ranks are named, by every rank that came.
      ConfigError: the port is taken, a rank came twice, or the ranks disagree on how many they are.
    """
    deadline = time.monotonic() + timeout
    if meeting.rank == 0:
        _Host(meeting, timeout).wait(deadline)
    else:
        _Guest(meeting, timeout).wait(deadline)


def _missed(meeting: Meeting, who: str, timeout: float) -> InternalError:
    return InternalError(
        f"{who} not come within {timeout:.0f} s; rank {meeting.rank} waited at {meeting.address} (by "
        f"{meeting.source}). See whether that process started and can reach this address; "
        "runtime.distributed_timeout is how long to wait"
    )


class _Host:
    """Rank 0."""

    def __init__(self, meeting: Meeting, timeout: float):
        self._meeting, self._timeout = meeting, timeout
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, Peer] = {}
        self._told: tuple[str, float] = ("", 0.0)  # who was said to be missing, and when

    def wait(self, deadline: float) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._selector)
            stack.callback(self._close_all)
            listener = stack.enter_context(self._listen())
            self._selector.register(listener, selectors.EVENT_READ, None)
            while self._missing():
                left = deadline - time.monotonic()
                if left <= 0:
                    self._give_up()
                for key, _ in self._selector.select(min(left, _TELL_SECONDS)):
                    if key.data is None:
                        self._accept(listener)
                    else:
                        self._read(key.data)
                self._tell_news()
            self._selector.unregister(listener)
            # The port is free before the others look for jax's service there.
            listener.close()
            self._tell(go=True)
            self._see_off()

    def _listen(self) -> socket.socket:
        port = self._meeting.port
        try:
            return listen(self._meeting.host, port, self._meeting.processes)
        except OSError as error:
            raise ConfigError(
                f"rank 0 cannot listen on port {port} of the coordinator's address {self._meeting.address} "
                f"({error.strerror}); another job may be using it: set DSJAX_COORDINATOR to HOST:ANOTHER_PORT"
            ) from None

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._meeting.processes) if rank not in self._peers]

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.settimeout(1.0)
        self._selector.register(connection, selectors.EVENT_READ, Peer(connection))

    def _read(self, peer: Peer) -> None:
        said = peer.lines()
        if said is None or not all(self._greet(peer, message) for message in said):
            self._drop(peer)

    def _who(self) -> str:
        """Those who are missing, as a sentence begins."""
        missing = self._missing()
        ranks = ", ".join(map(str, missing[:_RANKS_NAMED]))
        if len(missing) > _RANKS_NAMED:
            ranks += f" and {len(missing) - _RANKS_NAMED} more"
        if len(missing) == 1:
            return f"rank {ranks} of {self._meeting.processes} has"
        return f"ranks {ranks} of {self._meeting.processes} have"

    def _give_up(self) -> NoReturn:
        self._tell(missing=self._who())
        raise _missed(self._meeting, self._who(), self._timeout)

    def _greet(self, peer: Peer, message: dict[str, Any]) -> bool:
        """Takes what a peer says; whether it is one of us."""
        if message.get("gave_up") and peer.rank is not None:
            self._give_up()  # its time was up first; without it the job cannot start
        rank, processes = message.get("rank"), message.get("processes")
        if not isinstance(rank, int) or not isinstance(processes, int):
            return False
        if processes != self._meeting.processes or not 0 < rank < processes:
            peer.say(
                refused=f"rank {rank} was told of {processes} processes but rank 0 at "
                f"{self._meeting.address} of {self._meeting.processes}; is another job using this address?"
            )
            return False
        peer.rank, peer.name = rank, str(message.get("name"))
        if rank in self._peers:
            fault = (
                f"rank {rank} came twice, from {self._peers[rank].name} and from {peer.name}; each process "
                "has a rank of its own"
            )
            peer.say(refused=fault)
            self._tell(refused=fault)
            raise ConfigError(fault)
        self._peers[rank] = peer
        return True

    def _drop(self, peer: Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.rank is not None and self._peers.get(peer.rank) is peer:
            del self._peers[peer.rank]

    def _tell_news(self) -> None:
        """Says who is still missing, if that has changed; not at each of a thousand arrivals."""
        now = time.monotonic()
        if self._missing() and now - self._told[1] >= _TELL_SECONDS and self._told[0] != self._who():
            self._told = self._who(), now
            self._tell(waiting=self._who())

    def _tell(self, **message: Any) -> None:
        for peer in self._peers.values():
            peer.say(**message)

    def _see_off(self) -> None:
        """Lets the others hang up first, so that no connection of ours lingers on the port."""
        for peer in self._peers.values():
            while peer.lines():
                pass

    def _close_all(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.connection.close()


class _Guest:
    """Any other rank."""

    def __init__(self, meeting: Meeting, timeout: float):
        self._meeting, self._timeout = meeting, timeout
        self._waiting = ""  # who is missing, by rank 0's latest words
        self._trouble = "it never answered"

    def wait(self, deadline: float) -> None:
        while not self._ask(deadline):
            if time.monotonic() >= deadline:
                raise self._gave_up()
            time.sleep(_PAUSE_SECONDS)
        # jax's service follows on the same port; looking for it here avoids its client's slow retries.
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), self._connect(deadline):
                return
            time.sleep(_PAUSE_SECONDS / 10)

    def _gave_up(self) -> InternalError:
        meeting = self._meeting
        if self._waiting:
            return _missed(meeting, self._waiting, self._timeout)
        return InternalError(
            f"rank 0 of {meeting.processes} was not reached at {meeting.address} within {self._timeout:.0f} "
            f"s by rank {meeting.rank} on {socket.gethostname()} ({self._trouble}; address by "
            f"{meeting.source}). See whether rank 0 started and this host may connect to it; "
            "DSJAX_COORDINATOR=HOST:PORT names another address"
        )

    @contextlib.contextmanager
    def _connect(self, deadline: float) -> Iterator[socket.socket]:
        left = max(0.1, min(10.0, deadline - time.monotonic()))
        with socket.create_connection((self._meeting.host, self._meeting.port), timeout=left) as connection:
            yield connection

    def _ask(self, deadline: float) -> bool:
        """Comes once; whether all have come. False: try again."""
        self._waiting = ""
        try:
            with self._connect(deadline) as connection:
                peer = Peer(connection)
                name = f"{socket.gethostname()} process {os.getpid()}"
                peer.say(rank=self._meeting.rank, processes=self._meeting.processes, name=name)
                return self._listen(peer, deadline)
        except OSError as error:
            self._trouble = error.strerror or str(error)
            return False

    def _listen(self, peer: Peer, deadline: float) -> bool:
        while (left := deadline - time.monotonic()) > 0:
            peer.connection.settimeout(left)
            said = peer.lines()
            if said is None:
                self._waiting = ""
                self._trouble = "something answers there, but not as rank 0 of a starting job does"
                return False
            for message in said:
                if message.get("go"):
                    return True
                if "refused" in message:
                    raise ConfigError(str(message["refused"]))
                if "missing" in message:
                    raise _missed(self._meeting, str(message["missing"]), self._timeout)
                self._waiting = str(message.get("waiting", self._waiting))
        peer.say(gave_up=True)
        return False

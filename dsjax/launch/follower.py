"""The other nodes' side of the links: says how this node is, does what the leader orders."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from typing import Any

from dsjax.errors import EXIT_PREEMPTED, ConfigError, InternalError
from dsjax.launch.lines import Peer
from dsjax.launch.node import Node
from dsjax.launch.nodes import BEAT_SECONDS, LONGEST_LINE
from dsjax.launch.options import Options, split_address
from dsjax.launch.output import Output
from dsjax.launch.signals import Signals

_TURN_SECONDS = 0.05
_PAUSE_SECONDS = 0.3
_CONNECT_SECONDS = 5.0


def connect(address: str, seconds: float = _CONNECT_SECONDS) -> Peer:
    """A connection to the leader at HOST:PORT.

    Raises:
      OSError: it is not there.
    """
    connection = socket.create_connection(split_address(address), timeout=seconds)
    connection.settimeout(1.0)
    return Peer(connection, LONGEST_LINE)


def drain(which: str, address: str, seconds: float = 10.0) -> str:
    """Has a job go on without a node; returns what the leader says.

    Args:
      which: the node's name or number.
      address: HOST:PORT of the job's rendezvous.
      seconds: how long to wait for the answer.

    Raises:
      ConfigError: there is no such node.
      InternalError: the leader does not answer.
    """
    with contextlib.suppress(OSError):
        peer = connect(address)
        with peer.connection:
            peer.say(drain=which)
            until = time.monotonic() + seconds
            while time.monotonic() < until and (said := peer.lines()) is not None:
                for message in said:
                    if "refused" in message:
                        raise ConfigError(f"launch --drain: {message['refused']}")
                    if "done" in message:
                        return str(message["done"])
    raise InternalError(f"launch --drain: no job answers at {address}; is it the job's --rendezvous?")


class Follower:
    """A node that is led by another one's supervisor.

    Args:
      options: how the job is supervised.
      node: this node.
      name: this node's.
      output: for its words.
    """

    def __init__(self, options: Options, node: Node, name: str, output: Output):
        self._options, self._node, self._name, self._output = options, node, name, output
        self._life = f"{os.getpid()}-{time.time_ns()}"
        self._peer: Peer | None = None
        self._welcome = False  # the leader has this node
        self._heard = time.monotonic()  # when the leader said something last
        self._said = (0.0, "")  # when this node told of itself last, and which ends
        self._refused = ""
        self._code: int | None = None

    def run(self, signals: Signals) -> int:
        """Does what it is told until the job ends; returns the job's exit code.

        Raises:
          InternalError: the leader was not reached, or has gone.
          ConfigError: it refuses this node.
        """
        stops: list[int] = []
        while self._code is None:
            stops += signals.take()
            if stops and not self._welcome:
                return EXIT_PREEMPTED
            if self._peer is None:
                self._reach()
            if self._peer is not None:
                if self._welcome:
                    for number in stops:
                        self._peer.say(stop=number)
                    stops.clear()
                self._listen(self._peer)
            self._node.poll()
            self._tell()
            self._give_up_if_lost()
        if self._peer is not None:
            self._peer.connection.close()
        return self._code

    def _reach(self) -> None:
        try:
            self._peer = connect(self._options.rendezvous or "")
        except OSError:
            time.sleep(_PAUSE_SECONDS)
            return
        hello = {
            "rank": self._options.node_rank, "life": self._life, "name": self._name,
            "workers": self._options.workers, "nodes": [self._options.min_nodes, self._options.max_nodes],
            "status": self._node.status(),
        }  # fmt: skip
        self._peer.say(hello=hello)

    def _listen(self, peer: Peer) -> None:
        if not select.select([peer], [], [], _TURN_SECONDS)[0]:
            return
        said = peer.lines()
        if said is None:
            self._hang_up()
            return
        for message in said:
            self._obey(message)

    def _hang_up(self) -> None:
        if self._peer is not None:
            self._peer.connection.close()
            self._peer = None
            time.sleep(_PAUSE_SECONDS)

    def _obey(self, message: dict[str, Any]) -> None:
        if "refused" in message:
            self._refused = str(message["refused"])
            self._hang_up()
            return
        self._heard, self._refused = time.monotonic(), ""
        self._welcome = self._welcome or "welcome" in message
        if message.get("order") == "end":
            self._code = int(message["code"])
            if message["why"]:
                self._output.say(f"this node leaves: {message['why']}")
        elif "order" in message:
            self._node.obey(message)

    def _tell(self) -> None:
        """Tells the leader how this node is: each second, and at once when a worker has ended."""
        if self._peer is None or not self._welcome:
            return
        status, now = self._node.status(), time.monotonic()
        news = str([status["key"], status["ill"], [look["code"] for look in status["workers"]]])
        if news != self._said[1] or now - self._said[0] >= BEAT_SECONDS:
            self._said = now, news
            self._peer.say(status=status)

    def _give_up_if_lost(self) -> None:
        patience = self._options.lost_seconds if self._welcome else self._options.gather_seconds
        if time.monotonic() - self._heard < patience:
            return
        if self._refused:
            raise ConfigError(f"launch: {self._refused}")
        where = f"the leader at {self._options.rendezvous}"
        self._node.workers.kill()
        if self._welcome:
            raise InternalError(f"launch: {where} has gone; node {self._options.node_rank} ends its workers")
        raise InternalError(
            f"launch: node {self._options.node_rank} did not reach {where} within {patience:g} s; has node 0 "
            "started, and may this host connect to it? --rendezvous HOST:PORT names another address"
        )

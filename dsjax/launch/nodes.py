"""The leader's side of the links between nodes: who has come, what they say, who has gone silent.

Each supervisor keeps one connection to the leader's, over which both say lines of JSON: the node its
status, each second and when something changed, the leader its orders.  A link that breaks may come back;
a node that stays silent is lost.
"""

from __future__ import annotations

import selectors
import signal
import socket
import time
from dataclasses import dataclass
from typing import Any

from dsjax.errors import EXIT_PREEMPTED, ConfigError
from dsjax.launch.lines import Peer, listen
from dsjax.launch.member import Member
from dsjax.launch.node import Node
from dsjax.launch.options import Options

LONGEST_LINE = 1 << 20  # the status of a node with many workers
BEAT_SECONDS = 1.0
# One with a node's number that was heard so lately is not to be replaced by another.
_ALIVE_SECONDS = 3.0
_FAREWELL_SECONDS = 2.0


@dataclass
class _Link:
    member: Member
    life: str  # tells one start of a supervisor from the next
    peer: Peer
    heard: float
    ended: float | None = None  # when the other side hung up


class Hub:
    """All nodes of the job, this one first.

    Args:
      options: how the job is supervised; with `rendezvous` it listens there.
      node: this node.
      name: this node's.

    Raises:
      ConfigError: the port is taken.
    """

    def __init__(self, options: Options, node: Node, name: str):
        self._options, self._node = options, node
        self._own = Member(options.node_rank, name, options.workers, node.obey, is_own=True)
        self._links: dict[int, _Link] = {}
        self._stops: list[tuple[int, int]] = []
        self._told = 0.0
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self.dismissed: set[int] = set()
        if options.rendezvous:
            try:
                self._listener = listen(options.host, options.port, options.max_nodes)
            except OSError as error:
                raise ConfigError(
                    f"launch: cannot listen on port {options.port} of --rendezvous {options.rendezvous} "
                    f"({error.strerror}); another job may be using it: take another port"
                ) from None
            self._selector.register(self._listener, selectors.EVENT_READ, None)

    def members(self) -> list[Member]:
        """The nodes that are here, by number."""
        return sorted([self._own, *(link.member for link in self._links.values())], key=lambda m: m.rank)

    def take_stops(self) -> list[tuple[int, int]]:
        """Node and number of the signals that other nodes' supervisors got since the last call."""
        came, self._stops = self._stops, []
        return came

    def turn(self, seconds: float) -> None:
        """Lets time pass, listens to all nodes and looks at this one."""
        if self._listener is None:
            time.sleep(seconds)
        else:
            self._listen(seconds)
        self._node.poll()
        self._own.hear(self._node.status())

    def dismiss_drained(self) -> None:
        """Sends those home that are to leave; their workers have ended."""
        for member in self.members():
            if member.drained:
                self.dismissed.add(member.rank)
                if not member.is_own:
                    member.order("end", code=EXIT_PREEMPTED, why=member.drained)
                    self._links.pop(member.rank).peer.rank = None  # it hangs up once it has read this

    def close(self, code: int) -> None:
        """Tells all that the job has ended."""
        for link in self._links.values():
            link.member.order("end", code=code, why="")
        if self._listener is None:
            return
        # They hang up first: what was said to them is lost where we close with theirs unread.
        until = time.monotonic() + _FAREWELL_SECONDS
        while self._selector.get_map().keys() - {self._listener.fileno()} and time.monotonic() < until:
            self._listen(_FAREWELL_SECONDS / 10)
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            (self._listener if key.data is None else key.data.connection).close()
        self._selector.close()

    # ---- links ---------------------------------------------------------------------------------

    def _listen(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)
        now = time.monotonic()
        for rank, link in list(self._links.items()):
            silence = now - link.heard
            link.member.silent = link.member.silent or silence > _ALIVE_SECONDS
            link.member.hung_up = link.ended is not None and now - link.ended > _ALIVE_SECONDS
            if silence > self._options.lost_seconds:
                self._lose(rank)
        if now - self._told >= BEAT_SECONDS:
            self._told = now
            for link in self._links.values():
                link.peer.say(beat=True)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.settimeout(1.0)
        self._selector.register(connection, selectors.EVENT_READ, Peer(connection, LONGEST_LINE))

    def _read(self, peer: Peer) -> None:
        said = peer.lines()
        link = self._links.get(peer.rank) if peer.rank is not None else None
        if said is None:
            self._drop(peer)
            if link is not None and link.peer is peer:
                link.member.silent, link.ended = True, time.monotonic()
            return
        try:
            for message in said:
                self._hear(peer, message)
        except (KeyError, TypeError, ValueError):  # not one of us
            self._drop(peer)

    def _hear(self, peer: Peer, message: dict[str, Any]) -> None:
        if "hello" in message:
            self._welcome(peer, message["hello"])
        elif "drain" in message:
            self._drain(peer, str(message["drain"]))
        elif peer.rank is not None and (link := self._links.get(peer.rank)) and link.peer is peer:
            link.heard, link.member.silent = time.monotonic(), False
            if "status" in message:
                link.member.hear(message["status"])
            elif "stop" in message:
                self._stops.append((peer.rank, signal.Signals(message["stop"])))
            elif "bye" in message:
                self._drop(peer)
                self._lose(peer.rank)

    def _welcome(self, peer: Peer, hello: dict[str, Any]) -> None:
        rank, life, nodes = int(hello["rank"]), str(hello["life"]), list(hello["nodes"])
        ours = [self._options.min_nodes, self._options.max_nodes]
        if nodes != ours:
            self._refuse(
                peer, f"node {rank} was told of --nodes {nodes} but node 0 of {ours}; is it another job?"
            )
            return
        before = self._links.get(rank)
        back = before is not None and before.life == life
        heard_lately = before is not None and not before.member.silent
        if rank == self._options.node_rank or not 0 < rank < ours[1] or (heard_lately and not back):
            whose = before.member.name if before else self._own.name
            self._refuse(
                peer, f"node {rank} is here already ({whose}); each node has a --node-rank of its own"
            )
            return
        peer.rank, now = rank, time.monotonic()
        if before is not None and back:
            self._drop(before.peer)
            before.peer, before.heard, before.member.silent = peer, now, False
            before.ended, before.member.hung_up = None, False
            before.member.tell = lambda order: peer.say(**order)
        else:
            if before is not None:
                self._lose(rank)
            names = {member.name for member in self.members()}
            name = str(hello["name"])
            name = f"{name}-{rank}" if name in names else name
            member = Member(rank, name, int(hello["workers"]), lambda order: peer.say(**order))
            member.hear(hello["status"])
            member.order("kill")  # one that was given up may still have workers of an earlier generation
            self._links[rank] = _Link(member, life, peer, now)
            self.dismissed.discard(rank)
        peer.say(welcome=True)

    def _refuse(self, peer: Peer, why: str) -> None:
        peer.say(refused=why)

    def _drain(self, peer: Peer, which: str) -> None:
        found = [m for m in self.members() if which in (m.name, str(m.rank))]
        if not found:
            here = ", ".join(f"{m.rank} ({m.name})" for m in self.members())
            self._refuse(peer, f"there is no node {which} here, only {here}")
            return
        for member in found:
            member.drained = member.drained or "asked to by --drain"
        peer.say(done=f"node {found[0].rank} ({found[0].name}) leaves once all workers have saved")

    def _drop(self, peer: Peer) -> None:
        if peer.connection.fileno() >= 0:
            self._selector.unregister(peer.connection)
            peer.connection.close()

    def _lose(self, rank: int) -> None:
        self._links[rank].member.lost = True
        self._forget(rank)

    def _forget(self, rank: int) -> None:
        self._drop(self._links.pop(rank).peer)

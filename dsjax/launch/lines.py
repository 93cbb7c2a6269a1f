"""A connection over which both sides say lines of JSON objects."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any


class Peer:
    """A connection, and the lines that came over it.

    Args:
      connection: a connected socket; its timeout is that of `lines`.
      longest: bytes of a line; whoever says a longer one is not one of us.
    """

    def __init__(self, connection: socket.socket, longest: int = 4096):
        self.connection = connection
        self.rank: int | None = None
        self.name = ""
        self._buffer, self._longest = b"", longest

    def fileno(self) -> int:
        return self.connection.fileno()

    def lines(self) -> list[dict[str, Any]] | None:
        """What has arrived; None: the connection has ended, or does not speak as we do."""
        try:
            data = self.connection.recv(65536)
        except (BlockingIOError, TimeoutError):
            return []
        except OSError:
            return None
        *whole, self._buffer = (self._buffer + data).split(b"\n")
        try:
            said = [json.loads(line) for line in whole]
        except (ValueError, RecursionError):
            return None
        ours = data and len(self._buffer) <= self._longest and all(isinstance(one, dict) for one in said)
        return said if ours else None

    def say(self, **message: Any) -> None:
        """Sends a line; one who has gone will be seen to have gone when read from."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")


def is_local(host: str) -> bool:
    """Whether only processes of this host can reach the address."""
    return host in ("localhost", "127.0.0.1", "::1")


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """A socket that listens, without blocking: on a local address alone, else on all of this host's.

    Raises:
      OSError: the port is taken.
    """
    if is_local(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", port))
    listener.listen(max(128, backlog))
    listener.setblocking(False)
    return listener

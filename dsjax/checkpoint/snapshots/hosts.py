"""Which processes share a host, by the directory that they see, and where others reach this one."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

import jax

from dsjax.processes import gather

_TOKEN = ".host"


@dataclass(frozen=True)
class Hosts:
    """Which processes share a directory, and so a host's memory.

    Attributes:
      of: the host of each rank, numbered in the order of their lowest ranks.
      me: this process's rank.
    """

    of: tuple[int, ...]
    me: int

    @property
    def count(self) -> int:
        return max(self.of) + 1

    @property
    def mine(self) -> int:
        """This process's host."""
        return self.of[self.me]

    def ranks(self, host: int) -> list[int]:
        """The processes of a host."""
        return [rank for rank, its in enumerate(self.of) if its == host]

    @property
    def leads(self) -> bool:
        """Whether this process speaks for its host."""
        return self.ranks(self.mine)[0] == self.me

    def buddy(self, rank: int) -> int | None:
        """The process of the next host that keeps a copy of a process's snapshots; None: there is one host."""
        if self.count == 1:
            return None
        own, others = self.ranks(self.of[rank]), self.ranks((self.of[rank] + 1) % self.count)
        return others[own.index(rank) % len(others)]

    def keeps_for(self) -> list[int]:
        """The processes whose copies this one keeps."""
        return [rank for rank in range(len(self.of)) if self.buddy(rank) == self.me]

    @classmethod
    def meet(cls, directory: Path) -> Hosts:
        """Finds out who shares a directory: they see the same random token there."""
        tokens = gather(_token(directory))
        order = list(dict.fromkeys(tokens))
        return cls(tuple(order.index(token) for token in tokens), jax.process_index())


def _token(directory: Path) -> str:
    """The directory's token, made by whoever comes first."""
    path = directory / _TOKEN
    own = directory / f"{_TOKEN}-{secrets.token_hex(8)}"
    own.write_text(secrets.token_hex(16))
    try:
        os.link(own, path)
    except FileExistsError:
        pass
    finally:
        own.unlink()
    return path.read_text()


def remove_empty(directory: Path) -> None:
    """Removes a directory that holds nothing but its token."""
    with contextlib.suppress(OSError):
        (directory / _TOKEN).unlink(missing_ok=True)
        directory.rmdir()


def own_address() -> str:
    """An address of this host that the job's other hosts can reach: the one that faces the coordinator."""
    from jax._src import distributed  # the only place that needs it: jax does not tell the address publicly

    coordinator = distributed.global_state.coordinator_address or ""
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return socket.gethostbyname(socket.gethostname())

"""Snapshots between hosts: each process serves what its host holds, and sends its own to a buddy.

HTTP with a secret of the job.  A box of a record is read with GET.  A whole snapshot is copied with PUT between
two POSTs: it is invalid from the first, and counts after the second.
"""

from __future__ import annotations

import hmac
import http.client
import http.server
import json
import secrets
import socket
import socketserver
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from dsjax.checkpoint.snapshots.file import (
    Record,
    SnapshotFile,
    digest_of,
    make_valid,
    read_index,
)
from dsjax.checkpoint.snapshots.hosts import Hosts, own_address
from dsjax.checkpoint.snapshots.reading import Copy, Corner, LocalFiles, as_array
from dsjax.errors import Damaged
from dsjax.processes import gather

_CHUNK = 4 << 20
_TIMEOUT_SECONDS = 60.0
FIRST = 4096  # a header takes this much of a file
# What copying over a network meets when the other side, or the file, is going away.
FAULTS = (OSError, http.client.HTTPException, ValueError)


def chunks(data: np.ndarray) -> Iterator[memoryview]:
    for start in range(0, data.size, _CHUNK):
        yield data[start : start + _CHUNK].data


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: str, secret: str, directory: Path):
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, 0), _Handler)
        self.secret, self.files = secret, LocalFiles(directory)
        self.copies: dict[str, list[SnapshotFile]] = {}

    def server_bind(self) -> None:
        """Without the base class's question to the name service, which may take long to answer."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that went away in the middle: the file it wrote stays invalid."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _answer(self, status: int, body: Any = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        if status >= 400:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        for start in range(0, len(body), _CHUNK):
            self.wfile.write(body[start : start + _CHUNK])

    def _is_ours(self) -> bool:
        given = self.headers.get("Authorization", "")
        if hmac.compare_digest(given.encode(), self.server.secret.encode()):
            return True
        self._answer(403)
        return False

    def do_GET(self) -> None:
        if not self._is_ours():
            return
        try:
            file, number, start, stop = json.loads(unquote(self.path[1:]))
            if Path(file).name != file:
                raise Damaged("a file of another directory")
            box = self.server.files.box(file, number, tuple(start), tuple(stop))
        except (Damaged, ValueError, TypeError, IndexError) as error:
            self._answer(404, str(error).encode())
            return
        raw = np.ascontiguousarray(box).reshape(-1).view(np.uint8)
        self._answer(200, raw.data, Digest=digest_of(raw))

    def _slots(self, name: str) -> list[SnapshotFile]:
        """The files for copies of a name, or the one file that has it."""
        copies = self.server.copies
        named = [slot for slots in copies.values() for slot in slots if slot.path.name == name]
        return copies.get(name, named)

    def do_POST(self) -> None:
        """The beginning of a copy, answered by the name of the file to fill; or, with its header, its end."""
        if not self._is_ours():
            return
        what, name = json.loads(unquote(self.path[1:]))
        header = self.rfile.read(int(self.headers["Content-Length"]))
        slots = self._slots(name)
        if not slots:
            self._answer(409, b"it is not ready to take copies yet")
        elif what == "begin":
            slot = min(slots, key=lambda slot: step_of(slot.path))
            slot.begin()
            self._answer(200, slot.path.name.encode())
        else:
            make_valid(slots[0].path, header)
            self._answer(200)

    def do_PUT(self) -> None:
        """The bytes behind the header of a copy."""
        if not self._is_ours():
            return
        (slot,) = self._slots(unquote(self.path[1:]))
        for chunk in chunks(slot.raw(FIRST, FIRST + int(self.headers["Content-Length"]))):
            while len(chunk):
                received = self.rfile.readinto(chunk)  # type: ignore[attr-defined]
                if not received:
                    raise ConnectionError
                chunk = chunk[received:]
        self._answer(200)


def step_of(path: Path) -> int:
    """The step of a snapshot file; -1: it is not valid."""
    index = read_index(path)
    return -1 if index is None else index.step


@dataclass(frozen=True)
class Addresses:
    """How to reach each rank's server, and the secret that opens it."""

    of: Sequence[tuple[str, int]]
    secret: str

    def connect(self, rank: int) -> http.client.HTTPConnection:
        host, port = self.of[rank]
        return http.client.HTTPConnection(host, port, timeout=_TIMEOUT_SECONDS)

    def request(
        self, link: http.client.HTTPConnection, method: str, path: str, body: Any = None, length: int = 0
    ) -> tuple[bytes, str]:
        """The answer's body and digest.

        Raises:
          OSError, HTTPException: not reached, or refused.
        """
        headers = {"Authorization": self.secret}
        if method != "GET":
            headers["Content-Length"] = str(length)
        link.request(method, "/" + quote(path, safe=""), body, headers)
        answer = link.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise http.client.HTTPException(f"{answer.status} {data[:500].decode(errors='replace')}")
        return data, answer.headers.get("Digest", "")


class Peers:
    """This process's server, and its way to the others' servers; made by all processes together.

    Args:
      directory: this host's snapshots.
      hosts: who is where; at least two hosts.
    """

    def __init__(self, directory: Path, hosts: Hosts):
        secret = gather(secrets.token_hex(16))[0]
        address = own_address()
        self._server = _Server(address, secret, directory)
        threading.Thread(target=self._server.serve_forever, daemon=True, name="snapshot-server").start()
        told = gather([address, self._server.server_address[1]])
        self.addresses = Addresses([(host, port) for host, port in told], secret)
        self._hosts = hosts
        self._links: dict[tuple[int, int], http.client.HTTPConnection] = {}

    def serve_afresh(self) -> None:
        """Forgets what was known of this host's files, which have been written since."""
        self._server.files = LocalFiles(self._server.files.directory)

    def take_copies(self, copies: dict[str, list[SnapshotFile]]) -> None:
        """From now on copies of snapshots are taken, into the files of each name."""
        self._server.copies = copies

    def fetch(self, copy: Copy, number: int, start: Corner, stop: Corner, record: Record) -> np.ndarray:
        """A box of a record of another host's file, as `LocalFiles.box`.

        Raises:
          Damaged: that host cannot be reached, or says that the record is damaged.
        """
        ranks = self._hosts.ranks(copy.host)
        rank = ranks[self._hosts.me % len(ranks)]
        key = threading.get_ident(), rank
        link = self._links.pop(key, None) or self.addresses.connect(rank)
        path = json.dumps([copy.file, number, start, stop], separators=(",", ":"))
        try:
            data, digest = self.addresses.request(link, "GET", path)
        except FAULTS as error:
            link.close()
            raise Damaged(f"snapshot {copy.file} with rank {rank}: {error}") from error
        self._links[key] = link
        if digest_of(np.frombuffer(data, np.uint8)) != digest:
            raise Damaged(f"snapshot {copy.file} with rank {rank}: {record.name} was damaged on its way")
        box = Record(record.name, record.dtype, record.shape, start, stop, 0, len(data))
        return as_array(np.frombuffer(data, np.uint8), box)

    def hang_up(self) -> None:
        """Ends the connections that `fetch` has kept."""
        while self._links:
            self._links.popitem()[1].close()

    def close(self) -> None:
        self.hang_up()
        self._server.shutdown()
        self._server.server_close()

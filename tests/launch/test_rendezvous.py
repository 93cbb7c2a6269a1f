"""Processes meet, or learn who stayed away. Threads stand for processes; the sockets are real."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from dsjax.errors import ConfigError, InternalError
from dsjax.launch.rendezvous import Meeting, meet


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Ranks:
    """Runs `meet` for some ranks at once and keeps what each ended with."""

    def __init__(self, processes: int, port: int | None = None):
        self.processes, self.port = processes, port or free_port()
        self.ends: dict[int, object] = {}
        self._threads: list[threading.Thread] = []

    def start(self, rank: int, timeout: float, processes: int | None = None, key: int | None = None) -> None:
        def run() -> None:
            meeting = Meeting(f"127.0.0.1:{self.port}", processes or self.processes, rank, "a test")
            try:
                meet(meeting, timeout)
                self.ends[rank if key is None else key] = "met"
            except (ConfigError, InternalError) as error:
                self.ends[rank if key is None else key] = error

        thread = threading.Thread(target=run)
        thread.start()
        self._threads.append(thread)

    def serve(self) -> None:
        """Stands for jax's service, which the others look for on the same port."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if self.ends.get(0) == "met":
                with socket.create_server(("127.0.0.1", self.port)):
                    self.join()
                return
            time.sleep(0.01)

    def join(self) -> dict[int, object]:
        for thread in self._threads:
            thread.join(20)
        return self.ends


def test_all_meet_in_any_order_and_the_port_is_free_at_once():
    ranks = Ranks(4)
    for rank in (3, 1):
        ranks.start(rank, 10)
    time.sleep(0.3)  # they come before rank 0
    for rank in (0, 2):
        ranks.start(rank, 10)
    ranks.serve()
    assert ranks.ends == dict.fromkeys(range(4), "met")


def test_every_rank_names_those_who_stay_away():
    ranks = Ranks(5)
    for rank in (0, 2, 4):
        ranks.start(rank, 1)
    for rank, error in sorted(ranks.join().items()):
        assert isinstance(error, InternalError)
        assert f"ranks 1, 3 of 5 have not come within 1 s; rank {rank} waited at" in str(error)


def test_a_rank_whose_time_is_up_first_names_them_and_ends_the_waiting():
    ranks = Ranks(3)
    began = time.monotonic()
    ranks.start(0, 10)
    ranks.start(1, 0.8)
    assert "rank 2 of 3 has not come within 1 s; rank 1 waited" in str(ranks.join()[1])
    # Without rank 1 the others wait in vain; it is not one of those who stayed away.
    assert "rank 2 of 3 has not come" in str(ranks.ends[0]) and time.monotonic() - began < 5


def test_rank_0_that_stays_away_is_named():
    ranks = Ranks(2)
    ranks.start(1, 0.6)
    message = str(ranks.join()[1])
    assert "rank 0 of 2 was not reached at 127.0.0.1" in message and "Connection refused" in message


def test_an_unknown_host_is_said():
    with pytest.raises(InternalError, match=r"rank 0 of 2 was not reached at no-such-host\.invalid:5"):
        meet(Meeting("no-such-host.invalid:5", 2, 1, "a test"), 0.3)


def test_a_rank_that_comes_and_dies_is_missing_until_it_comes_again():
    ranks = Ranks(2)
    ranks.start(0, 10)
    time.sleep(0.2)
    with socket.create_connection(("127.0.0.1", ranks.port)) as dying:
        dying.sendall(b'{"rank": 1, "processes": 2, "name": "x"}\n')
        # It is one of two and has come, so rank 0 says go; without the newline it would not have come.
        assert b"go" in dying.recv(1000) + dying.recv(1000)
    ranks.serve()
    ranks = Ranks(3)
    ranks.start(0, 1)
    time.sleep(0.2)
    with socket.create_connection(("127.0.0.1", ranks.port)) as dying:
        dying.sendall(b'{"rank": 1, "processes": 3, "name": "x"}\n')
        dying.recv(1000)
    assert "ranks 1, 2 of 3" in str(ranks.join()[0])


def test_very_many_are_counted():
    ranks = Ranks(100)
    for rank in (0, 5):
        ranks.start(rank, 1)
    for error in ranks.join().values():
        assert "ranks 1, 2, 3, 4, 6, 7" in str(error) and "17 and 82 more of 100 have not come" in str(error)


def test_strangers_are_dropped():
    ranks = Ranks(2)
    ranks.start(0, 10)
    time.sleep(0.2)
    strangers = []
    for words in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xfe\x00" * 3000,
        b"[1]\n",
        b'{"rank": "1"}\n' * 2,
        b"[" * 60000 + b"\n",
        b'{"rank": 0, "processes": 2}\n',
        b"",
    ):
        stranger = socket.create_connection(("127.0.0.1", ranks.port))
        stranger.sendall(words)
        strangers.append(stranger)
    ranks.start(1, 10)
    ranks.serve()
    assert ranks.ends == {0: "met", 1: "met"}
    for stranger in strangers:
        stranger.close()


def test_a_rank_that_comes_twice_is_refused_everywhere():
    ranks = Ranks(3)
    ranks.start(0, 10)
    ranks.start(1, 10)
    time.sleep(0.5)
    ranks.start(1, 10, key=11)
    for error in ranks.join().values():
        assert isinstance(error, ConfigError) and "rank 1 came twice" in str(error)
    assert set(ranks.ends) == {0, 1, 11}


def test_a_process_of_another_job_is_told_so():
    ranks = Ranks(2)
    ranks.start(0, 1.5)
    time.sleep(0.2)
    ranks.start(3, 1, processes=4)
    ends = ranks.join()
    assert isinstance(ends[3], ConfigError) and "was told of 4 processes but rank 0" in str(ends[3])
    assert "rank 1 of 2 has not come" in str(ends[0])


def test_a_port_that_is_taken_is_refused_with_the_cure():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match="DSJAX_COORDINATOR to HOST:ANOTHER_PORT"):
            meet(Meeting(address, 2, 0, "a test"), 1)


def test_something_else_that_answers_is_not_rank_0():
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(5)

        def answer() -> None:
            for _ in range(2):
                try:
                    connection, _ = other.accept()
                except OSError:
                    return
                connection.sendall(b"SSH-2.0-server\r\n")
                connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(InternalError, match="not as rank 0"):
            meet(Meeting(f"127.0.0.1:{other.getsockname()[1]}", 2, 1, "a test"), 0.3)
    thread.join()

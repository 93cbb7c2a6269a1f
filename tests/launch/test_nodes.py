"""Several nodes on one machine: they meet, lose each other, go on with fewer, come back, leave."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_local import finish, start, wait_for
from test_supervisor import supervise

from dsjax.errors import ConfigError, InternalError
from dsjax.launch.follower import drain
from dsjax.launch.options import node_counts, place, split_address

# Works until it is told to stop, which it does as one that has saved; the file `enough` ends the job.
WORKS = (
    "def save(*_):\n  sys.exit(75)\n"
    "signal.signal(signal.SIGTERM, save)\n"
    "names = ('NUM_PROCESSES', 'NODES', 'NODES_WANTED', 'NODE', 'COORDINATOR')\n"
    "place = [os.environ['DSJAX_' + name] for name in names]\n"
    "open('starts', 'a').write(' '.join([str(attempt), str(rank), *place, str(os.getpid())]) + '\\n')\n"
    "while not os.path.exists('enough'): go(1)\n"
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Job:
    """Supervisors that share a rendezvous."""

    def __init__(self, directory: Path, nodes: str, code: str = WORKS, **options):
        self.directory, self._code = directory, code
        fewest, most = node_counts(nodes)
        self.address = f"127.0.0.1:{free_port()}"
        self._options = {
            "min_nodes": fewest, "max_nodes": most, "rendezvous": self.address, "lost_seconds": 1.5,
            "rejoin_seconds": 1.0, "gather_seconds": 15.0, **options,
        }  # fmt: skip
        self.nodes: dict[int, subprocess.Popen[str]] = {}
        self.output: dict[int, str] = {}

    def start(self, *ranks: int, **options) -> Job:
        for rank in ranks:
            words = {**self._options, "node_rank": rank, "name": f"host-{rank}", **options}
            self.nodes[rank] = supervise(self.directory, self._code, **words)
        return self

    def starts(self, attempt: int) -> list[list[str]]:
        """rank, processes, nodes, wanted, node, coordinator, process id of the attempt's workers."""
        path = self.directory / "starts"
        lines = path.read_text().splitlines() if path.exists() else []
        return sorted(words[1:] for line in lines if (words := line.split())[0] == str(attempt))

    def wait(self, attempt: int, workers: int) -> list[list[str]]:
        wait_for(lambda: len(self.starts(attempt)) == workers)
        time.sleep(0.3)
        return self.starts(attempt)

    def enough(self) -> None:
        (self.directory / "enough").touch()

    def ends(self, *ranks: int) -> list[int]:
        codes = []
        for rank in ranks or self.nodes:
            code, out, err = finish(self.nodes[rank])
            self.output[rank] = out + err
            codes.append(code)
        return codes


@pytest.fixture
def job(tmp_path):
    jobs: list[Job] = []

    def make(nodes: str, code: str = WORKS, **options) -> Job:
        jobs.append(Job(tmp_path, nodes, code, **options))
        return jobs[-1]

    yield make
    for one in jobs:
        for process in one.nodes.values():
            if process.poll() is None:
                process.kill()
                process.communicate()


def test_two_nodes_are_one_job(job):
    two = job("2", workers=2).start(1, 0)
    starts = two.wait(0, 4)
    assert [s[0] for s in starts] == ["0", "1", "2", "3"] and {s[1] for s in starts} == {"4"}
    assert [s[4] for s in starts] == ["host-0", "host-0", "host-1", "host-1"]
    assert {(s[2], s[3]) for s in starts} == {("2", "2")} and len({s[5] for s in starts}) == 1
    two.enough()
    assert two.ends() == [0, 0]
    assert "2 nodes, 4 processes" in two.output[0] and "[2]" not in two.output[0]


def test_a_worker_that_dies_on_one_node_starts_all_again(job):
    two = job("2").start(0, 1)
    first = two.wait(0, 2)
    os.kill(int(first[1][-1]), signal.SIGKILL)
    second = two.wait(1, 2)
    two.enough()
    assert two.ends() == [0, 0] and first[0][5] != second[0][5]
    assert "rank 1 was ended by SIGKILL (see its log on node host-1)" in two.output[0]


def test_a_hang_on_another_node_is_seen(job):
    two = job("2", hang_seconds=1.0).start(0, 1)
    os.kill(int(two.wait(0, 2)[1][-1]), signal.SIGSTOP)
    two.wait(1, 2)
    two.enough()
    assert two.ends() == [0, 0]
    assert "rank 1 hangs: at step" in two.output[0] and "(stopped by a signal)" in two.output[0]
    assert "rank 1: no stack" in two.output[1]


@pytest.mark.parametrize("to", [[1], [0, 1]])
def test_sigterm_to_any_or_all_supervisors_stops_the_job(job, to):
    # A second SIGTERM would end a worker that is saving.
    saves = WORKS.replace(
        "  sys.exit(75)", "  signal.signal(signal.SIGTERM, signal.SIG_DFL)\n  time.sleep(0.5)\n  sys.exit(75)"
    )
    two = job("2", saves).start(0, 1)
    two.wait(0, 2)
    for rank in to:
        two.nodes[rank].send_signal(signal.SIGTERM)
    assert two.ends() == [75, 75]


def test_a_lost_node_is_done_without_and_joins_again(job):
    elastic = job("1:2").start(0, 1)
    first = elastic.wait(0, 2)
    elastic.nodes.pop(1).kill()
    alone = elastic.wait(1, 1)
    assert alone[0][:4] == ["0", "1", "1", "2"]
    assert not Path(f"/proc/{first[1][-1]}").exists()  # its worker died with its supervisor
    elastic.start(1)
    assert [s[:4] for s in elastic.wait(2, 2)] == [["0", "2", "2", "2"], ["1", "2", "2", "2"]]
    elastic.enough()
    assert elastic.ends() == [0, 0]
    assert "lost node 1 (host-1)" in elastic.output[0] and "node 1 (host-1) has come" in elastic.output[0]


def test_a_node_that_is_back_in_time_is_waited_for(job):
    elastic = job("1:2", rejoin_seconds=20.0).start(0, 1)
    elastic.wait(0, 2)
    elastic.nodes.pop(1).kill()
    elastic.start(1)
    assert [s[1] for s in elastic.wait(1, 2)] == ["2", "2"]
    elastic.enough()
    assert elastic.ends() == [0, 0]


def test_too_few_nodes_end_with_70(job):
    two = job("2").start(0, 1)
    two.wait(0, 2)
    two.nodes.pop(1).kill()
    assert two.ends() == [70] and "1 of at least 2 nodes are here (not: 1)" in two.output[0]


def test_a_node_that_never_comes_ends_with_70(job):
    two = job("2", gather_seconds=1.0).start(0)
    assert two.ends() == [70] and "(not: 1)" in two.output[0]
    other = job("2", gather_seconds=1.0).start(1)
    assert other.ends() == [70] and "did not reach the leader" in other.output[1]


def test_members_end_when_the_leader_has_gone(job):
    two = job("2").start(0, 1)
    workers = two.wait(0, 2)
    two.nodes.pop(0).kill()
    assert two.ends() == [70] and "has gone" in two.output[1]
    wait_for(lambda: not any(Path(f"/proc/{w[-1]}").exists() for w in workers), 5)


def test_a_leader_that_is_back_at_once_takes_the_members_over(job):
    two = job("2", lost_seconds=8.0).start(0, 1)
    old = two.wait(0, 2)
    two.nodes.pop(0).kill()
    two.start(0)
    wait_for(lambda: len(two.starts(0)) == 4, 30)  # its attempts begin at 0 again
    wait_for(lambda: not any(Path(f"/proc/{worker[-1]}").exists() for worker in old), 5)
    two.enough()
    assert two.ends() == [0, 0]


def test_a_drained_node_leaves_and_the_others_go_on(job):
    three = job("1:3", rejoin_seconds=15.0).start(
        0, 1, 2
    )  # all are there at the first start, however busy it is
    three.wait(0, 3)
    assert "node 1 (host-1) leaves" in drain("host-1", three.address)
    assert [s[4] for s in three.wait(1, 2)] == ["host-0", "host-2"]
    assert three.ends(1) == [75] and "this node leaves: asked to by --drain" in three.output[1]
    with pytest.raises(ConfigError, match=r"no node host-1 here, only 0 \(host-0\), 2 \(host-2\)"):
        drain("host-1", three.address)
    three.enough()
    assert three.ends(0, 2) == [0, 0]


def test_a_node_that_falls_ill_is_drained(job, tmp_path):
    two = job("1:2", health_seconds=0.2, rejoin_seconds=15.0)
    two.start(0).start(1, health="! test -e ill")
    two.wait(0, 2)
    (tmp_path / "ill").touch()
    assert two.wait(1, 1)[0][4] == "host-0" and two.ends(1) == [75]
    two.enough()
    assert two.ends(0) == [0] and "draining node 1 (host-1): --health" in two.output[0]


def test_a_broken_link_that_comes_back_stops_nothing(job, tmp_path):
    """The second node reaches the leader through a relay, which is cut."""
    two = job("2", lost_seconds=6.0)
    relay = Relay(int(two.address.rpartition(":")[2]))
    two.start(0).start(1, rendezvous=f"127.0.0.1:{relay.port}")
    workers = two.wait(0, 2)
    relay.cut()
    time.sleep(1.5)
    assert two.starts(0) == workers and not two.starts(1)
    two.enough()
    assert two.ends() == [0, 0] and "lost" not in two.output[0] and relay.connections >= 2


class Relay:
    """Passes bytes between one node and the leader."""

    def __init__(self, to: int):
        self._to, self._open, self.connections = to, [], 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            near, _ = self._listener.accept()
            try:
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:  # the leader is not there yet
                near.close()
                continue
            self.connections += 1
            self._open += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(65536):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def cut(self) -> None:
        for connection in self._open:
            with contextlib.suppress(OSError):  # the other end has hung up in turn
                connection.shutdown(socket.SHUT_RDWR)
        self._open.clear()


def test_two_jobs_at_one_rendezvous_are_refused(job):
    one = job("2").start(0)
    wait_for(lambda: one.nodes[0].poll() is None and _answers(one.address))
    again = supervise(one.directory, WORKS, min_nodes=2, max_nodes=2, rendezvous=one.address)
    code, _, err = finish(again)
    assert code == 2 and "another job may be using it" in err
    size = {"min_nodes": 3, "max_nodes": 3, "node_rank": 1, "gather_seconds": 1.0}
    other = supervise(one.directory, WORKS, rendezvous=one.address, **size)
    code, _, err = finish(other)
    assert code == 2 and "is it another job?" in err
    one.start(1)
    one.wait(0, 2)
    twice = supervise(
        one.directory,
        WORKS,
        min_nodes=2,
        max_nodes=2,
        node_rank=1,
        rendezvous=one.address,
        gather_seconds=1.0,
    )
    code, _, err = finish(twice)
    assert code == 2 and "node 1 is here already (host-1)" in err
    # A stranger at the port disturbs nobody.
    with socket.create_connection(("127.0.0.1", int(one.address.rpartition(":")[2]))) as stranger:
        stranger.sendall(b'GET / HTTP/1.1\r\n\r\n{"hello": 1}\n')
        time.sleep(0.3)
    one.enough()
    assert one.ends() == [0, 0]


def _answers(address: str) -> bool:
    try:
        socket.create_connection(split_address(address), timeout=1).close()
        return True
    except OSError:
        return False


def test_draining_no_job_is_refused(tmp_path):
    with pytest.raises(InternalError, match="no job answers"):
        drain("host-1", f"127.0.0.1:{free_port()}")
    words = [sys.executable, "-m", "dsjax", "launch", "--drain", "host-1"]
    code, _, err = finish(start(tmp_path, words))
    assert code == 2 and "--rendezvous" in err


SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "gpu[1-4]", "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_NODEID": "2",
}  # fmt: skip
JOBSET = {"JOB_COMPLETION_INDEX": "1", "JOBSET_NAME": "train", "REPLICATED_JOB_NAME": "workers"}


def test_a_scheduler_says_which_node_this_is():
    found = place(None, None, None, SLURM)
    assert found["rendezvous"].startswith("gpu1:")
    assert (found["min_nodes"], found["max_nodes"], found["node_rank"]) == (4, 4, 2)
    elastic = place("2:4", None, "gpu1-ib:5000", SLURM)
    assert elastic == {"min_nodes": 2, "max_nodes": 4, "node_rank": 2, "rendezvous": "gpu1-ib:5000"}
    pod = place("1:2", None, None, JOBSET)
    assert pod == {
        "min_nodes": 1,
        "max_nodes": 2,
        "node_rank": 1,
        "rendezvous": "train-workers-0-0.train:61217",
    }
    assert place(None, None, None, {}) == place("1", None, None, SLURM) == {}
    assert place(None, None, None, {**SLURM, "DSJAX_SUPERVISED": "1"}) == {}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("2", None, "a:1"), "--node-rank"),
        (("2", 0, None), "--rendezvous"),
        (("2", 2, "a:1"), "from 0 to 1, got 2"),
        (("2:1", 0, "a:1"), "takes N or MIN:MAX"),
        (("0", 0, "a:1"), "takes N or MIN:MAX"),
        (("2", 0, "a:b"), "takes HOST:PORT"),
        ((None, 1, None), "without --nodes"),
    ],
)
def test_what_is_missing_is_asked_for(given, says):
    with pytest.raises(ConfigError, match=says):
        place(*given, {})

"""Two hosts on one machine: network namespaces that a slow link joins.

The link is a veth pair whose ends each let through so many bits a second (tc tbf); what crossed it is what its
counters say.  It needs root and iproute2.  Namespaces are named after the process that made them: those whose maker
is gone are removed, with what still runs in them, before others are made.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PREFIX = "dsjax-wire"
DEVICE = "wire0"  # the link's end, in each namespace
# In each namespace only the other one can be reached, so that any address is free, and any port.
ADDRESSES, PORT = ("10.77.0.1", "10.77.0.2"), 12421
BURST = 64 << 10  # bytes that may leave at once after a rest: as few as let segments of a veth pass unsplit
_HOSTS = Path("/etc/netns")
_PR_SET_PDEATHSIG = 1


class Failed(Exception):
    """A command or a process on a host that went wrong, in words."""


@dataclass(frozen=True)
class Host:
    """A namespace and its end of the link."""

    name: str
    address: str

    def command(self, words: Sequence[str]) -> list[str]:
        """The command as it is run on this host."""
        return ["ip", "netns", "exec", self.name, *words]


def missing() -> str | None:
    """Why there can be no such hosts here; None where there can."""
    if not sys.platform.startswith("linux"):
        return f"takes Linux's network namespaces; this is {sys.platform}"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"takes {' and '.join(absent)} of iproute2 (Debian: apt-get install iproute2)"
    if os.geteuid() != 0:
        return "takes root, to make network namespaces"
    return None


@contextlib.contextmanager
def two_hosts(megabits: float) -> Iterator[tuple[Host, Host]]:
    """Two hosts, joined by a link of so many megabits a second each way; gone again afterwards.

    Raises:
      Failed: the system does not let us.
    """
    remove_orphans()
    first, second = (Host(f"{PREFIX}-{os.getpid()}-{i}", ADDRESSES[i]) for i in range(2))
    try:
        for host in (first, second):
            _do("ip", "netns", "add", host.name)
            # Gloo listens on the address that the machine's own name has.
            place = _HOSTS / host.name
            place.mkdir(parents=True)
            (place / "hosts").write_text(f"127.0.0.1 localhost\n{host.address} {socket.gethostname()}\n")
        ends = [["netns", host.name] for host in (first, second)]
        _do("ip", "link", "add", DEVICE, *ends[0], "type", "veth", "peer", "name", DEVICE, *ends[1])
        for host in (first, second):
            _do("ip", "-n", host.name, "address", "add", f"{host.address}/30", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _do("ip", "-n", host.name, "link", "set", device, "up")
            shape = f"root tbf rate {megabits:g}mbit burst {BURST} latency 100ms".split()
            _do(*host.command(["tc", "qdisc", "add", "dev", DEVICE, *shape]))
        yield first, second
    finally:
        with _undisturbed():
            for host in (first, second):
                remove(host.name)


def remove(name: str) -> None:
    """Removes a namespace with all that runs in it, as far as it is there."""
    for _ in range(50):
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
        if not found:
            break
        for pid in map(int, found):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    shutil.rmtree(_HOSTS / name, ignore_errors=True)


def remove_orphans() -> None:
    """Removes the namespaces of makers that are gone."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines()
    names = {line.split()[0] for line in listed if line.strip()}
    names |= {place.name for place in _HOSTS.glob(f"{PREFIX}-*")}
    for name in names:
        maker = name.removeprefix(f"{PREFIX}-").split("-")[0]
        if name.startswith(f"{PREFIX}-") and maker.isdigit() and not Path(f"/proc/{maker}").exists():
            remove(name)


def run_on(
    hosts: Sequence[Host], command: Sequence[str], environ: Mapping[str, str], logs: Path, timeout: float
) -> None:
    """Runs a command on all hosts, as the processes of one cluster; all end when one fails, or when we do.

    Args:
      logs: a directory; what host i says is in i.log.
      timeout: seconds.

    Raises:
      Failed: with the last lines of the host that failed first, or that time is over.
    """
    meeting = {"DSJAX_COORDINATOR": f"{hosts[0].address}:{PORT}", "DSJAX_NUM_PROCESSES": str(len(hosts))}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, host in enumerate(hosts):
            with (logs / f"{rank}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        host.command(command),
                        env={**environ, **meeting, "DSJAX_PROCESS_ID": str(rank)},
                        stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                        # Ctrl-C reaches us alone; we then end them.
                        start_new_session=True, preexec_fn=_dies_with_us(),
                    )
                )  # fmt: skip
        _await(processes, logs, time.monotonic() + timeout)
    finally:
        with _undisturbed():
            for process in processes:
                process.kill()
                process.wait()


def _await(processes: Sequence[subprocess.Popen[bytes]], logs: Path, end: float) -> None:
    while any(process.poll() is None for process in processes):
        for rank, process in enumerate(processes):
            if process.poll():
                said = (logs / f"{rank}.log").read_text(errors="replace").strip().splitlines()[-3:]
                raise Failed(f"host {rank} ended with {process.returncode}: {' | '.join(said)}")
        if time.monotonic() > end:
            raise Failed("the hosts took too long")
        time.sleep(0.05)


@contextlib.contextmanager
def as_interrupt(*numbers: signal.Signals) -> Iterator[None]:
    """Signals that would end the process at once become a KeyboardInterrupt, so that it can clean up."""

    def raised(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = [signal.signal(number, raised) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals that ask for an end wait until this is over."""
    asked = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, asked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _dies_with_us() -> Callable[[], None]:
    library, parent = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Failed(f"{' '.join(command)}: {said}")

"""`dsjax launch --hosts`: a supervisor on each of a list of hosts, by plain ssh."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from dsjax.errors import ConfigError
from dsjax.launch.distributed import job_port
from dsjax.launch.options import node_counts, program, split_address
from dsjax.launch.run import WATCH_STDIN
from dsjax.launch.signals import Signals

_SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15"]
_SSH_FAILED = 255
# What steers jax and NCCL and where programs are; nothing that could be a secret.
_PASSED_ON = re.compile(r"(DSJAX|JAX|XLA|NCCL|TF_CPP)_\w+|(LD_LIBRARY_|PYTHON|)PATH|VIRTUAL_ENV")
# What a supervisor sets or reads to place processes: each host has its own.
_OWN = re.compile(
    r"DSJAX_(COORDINATOR|NUM_PROCESSES|PROCESS_ID|LOCAL_DEVICE_IDS|SUPERVISED|ATTEMPT|HEARTBEAT|NODE\w*)"
)
_TURN_SECONDS = 0.1
_FOLLOW_SECONDS = 30.0


def read_hosts(text: str) -> list[str]:
    """The hosts of ``a,user@b`` or of a file with one a line.

    Raises:
      ConfigError: there are none, or one is named twice.
    """
    path = Path(text)
    lines = path.read_text().splitlines() if path.is_file() else text.split(",")
    hosts = [name for line in lines if (name := line.partition("#")[0].strip())]
    faulty = [host for host in hosts if not re.fullmatch(r"[\w.@:\-]+", host) or host.startswith("-")]
    if not hosts or faulty or len(set(hosts)) < len(hosts):
        raise ConfigError(
            f"launch --hosts: takes different hosts as a,b or a file with one a line, got {', '.join(faulty or hosts)}"
        )
    return hosts


def supervisor_command(
    command: Sequence[str], *, rank: int, workers: int, nodes: str, rendezvous: str, **more: object
) -> list[str]:
    """The words that start the supervisor of one node; `more` are further fields of `Options`."""
    words = [sys.executable, "-m", "dsjax", "launch", "--workers", str(workers), "--nodes", nodes]
    words += ["--node-rank", str(rank), "--rendezvous", rendezvous]
    for name, value in more.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return [*words, "--", *command]


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that supervisors elsewhere get too."""
    return {k: v for k, v in environ.items() if _PASSED_ON.fullmatch(k) and not _OWN.fullmatch(k)}


def on_hosts(
    hosts: str,
    command: Sequence[str],
    *,
    workers: int,
    nodes: str | None,
    rendezvous: str | None,
    **more: object,
) -> int:
    """Runs a job on hosts that have this directory and this Python at the same place.

    Each line of output stands behind its host.  SIGTERM and Ctrl-C stop the job, which saves; so does
    the end of this process, however it ends.  A second signal leaves at once.

    Args:
      hosts: as `read_hosts` takes them; node 0 is the first.
      nodes: MIN:MAX where MAX are the hosts; None: all of them are needed.
      rendezvous: HOST:PORT on the first host; None: its name, and a port by chance.

    Returns:
      The exit code of the job.

    Raises:
      ConfigError: hosts that are none, or not as many as `nodes` says.
      InputError: there is no such program.
    """
    names = read_hosts(hosts)
    nodes = nodes or str(len(names))
    if node_counts(nodes)[1] != len(names):
        raise ConfigError(f"launch: --nodes {nodes} does not fit the {len(names)} of --hosts")
    words = list(command[1:] if command[:1] == ["--"] else command)
    program(words)  # refuses what is not there before anything is started
    first = names[0].partition("@")[2] or names[0]
    address = rendezvous or f"{first}:{job_port(f'{os.getpid()}.{time.time_ns()}')}"
    split_address(address)
    place = {"workers": workers, "nodes": nodes, "rendezvous": address, **more}
    started = [_start(name, supervisor_command(words, rank=rank, **place)) for rank, name in enumerate(names)]  # type: ignore[arg-type]
    with Signals().received() as signals:
        return _follow(started, names, signals)


def _start(host: str, words: list[str]) -> subprocess.Popen[bytes]:
    variables = [f"{name}={value}" for name, value in passed_on(os.environ).items()]
    there = (
        f"cd {shlex.quote(os.getcwd())} && exec env {shlex.join([*variables, f'{WATCH_STDIN}=1', *words])}"
    )
    # A session of its own: Ctrl-C at the terminal is not for ssh, but for the job.
    return subprocess.Popen(
        [*_SSH, host, there],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _follow(started: list[subprocess.Popen[bytes]], names: list[str], signals: Signals) -> int:
    readers = [
        threading.Thread(target=_pass_on, args=(name, process.stdout), daemon=True)
        for name, process in zip(names, started, strict=True)
    ]
    for reader in readers:
        reader.start()
    came, failed, until = 0, set[int](), float("inf")
    while any(process.poll() is None for process in started) and time.monotonic() < until:
        for _ in signals.take():
            came += 1
            for process in started:
                if process.stdin is not None:
                    process.stdin.close()  # which the supervisors there take for SIGTERM
        for rank, process in enumerate(started):
            if process.poll() == _SSH_FAILED and rank not in failed:
                failed.add(rank)
                print(f"dsjax launch: ssh to {names[rank]} (node {rank}) has failed", flush=True)
        if started[0].poll() is not None:
            until = min(until, time.monotonic() + _FOLLOW_SECONDS)
        if came > 1:
            break
        time.sleep(_TURN_SECONDS)
    for process in started:
        process.kill()
    for reader in readers:
        reader.join(timeout=2.0)
    if came > 1:
        return 128 + signal.SIGINT
    return started[0].wait()


def _pass_on(name: str, pipe: IO[bytes]) -> None:
    for line in pipe:
        try:
            sys.stdout.buffer.write(f"[{name}] ".encode() + line)
            sys.stdout.buffer.flush()
        except OSError:  # the terminal has gone; the supervisors keep logs
            return

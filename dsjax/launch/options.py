"""What `dsjax launch` is told: the command, how many nodes, where they meet, how patient to be."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsjax.errors import ConfigError, InputError
from dsjax.launch.distributed import DEFAULT_PORT, detect, only_task

VERBS = ("train", "eval", "generate", "data", "checkpoints", "doctor")


@dataclass(frozen=True)
class Options:
    """How a job is supervised.

    Attributes:
      workers: processes to start on this node.
      min_nodes, max_nodes: go on with as few, and with as many as come.
      node_rank: which node this is, from 0; node 0's supervisor leads.
      rendezvous: HOST:PORT of node 0's supervisor; None: there is one node.
      max_restarts: restarts in all.
      give_up_after: so many failures in a row without a new step end the job.
      hang_seconds: how long a rank may stand still before all are restarted.
      rejoin_seconds: how long a lost node, or one beyond the fewest, is waited for.
      grace_seconds: how long workers have to end by themselves before they are killed.
      health: a shell command; once it fails this node is drained.
      health_seconds: how often it runs, and how long it may take.
      lost_seconds: a node that says nothing for so long is lost.
      gather_seconds: how long the first start waits for the fewest nodes.
      name: this node's name.
    """

    workers: int
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int = 0
    rendezvous: str | None = None
    max_restarts: int = 100
    give_up_after: int = 3
    hang_seconds: float = 60.0
    rejoin_seconds: float = 30.0
    grace_seconds: float = 10.0
    health: str | None = None
    health_seconds: float = 30.0
    lost_seconds: float = 10.0
    gather_seconds: float = 300.0
    name: str = ""

    @property
    def host(self) -> str:
        """The host where the supervisors meet; a local one where there is one node."""
        return split_address(self.rendezvous)[0] if self.rendezvous else "127.0.0.1"

    @property
    def port(self) -> int:
        """The port where the supervisors meet; 0: there is one node."""
        return split_address(self.rendezvous)[1] if self.rendezvous else 0


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT as a pair; without a port the usual one.

    Raises:
      ConfigError: it is none.
    """
    found = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+))(?::(\d{1,5}))?", address.strip())
    if found is None or not 0 < int(found[3] or DEFAULT_PORT) < 65536:
        raise ConfigError(f"launch --rendezvous: takes HOST:PORT, got {address!r}")
    return found[1] or found[2], int(found[3] or DEFAULT_PORT)


def node_counts(text: str) -> tuple[int, int]:
    """The fewest and the most nodes of ``N`` or ``MIN:MAX``.

    Raises:
      ConfigError: it is neither.
    """
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    fewest, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < fewest <= most:
        raise ConfigError(f"launch --nodes: takes N or MIN:MAX, got {text!r}")
    return fewest, most


def place(
    nodes: str | None, node_rank: int | None, rendezvous: str | None, environ: Mapping[str, str] = os.environ
) -> dict[str, int | str | None]:
    """Which node this is, of how many, meeting where: the fields of `Options` by what was given.

    What was not given comes from the scheduler (a task a node of SLURM, a pod a node of Kubernetes), as
    for a process that joins a cluster by itself.  A supervisor inside of a worker is alone.

    Raises:
      ConfigError: there are several nodes and it is not known which this one is, or where they meet.
    """
    fewest, most = node_counts(nodes) if nodes else (1, 1)
    if nodes and most == 1:
        return {}
    told = bool(nodes) and node_rank is not None and rendezvous is not None
    alone = told or "DSJAX_SUPERVISED" in environ
    cluster = None if alone else detect(_sized(environ, most if nodes else None))
    if nodes and not alone:
        cluster = cluster or only_task(environ)
    if cluster is None and not nodes:
        given = [n for n, v in (("--node-rank", node_rank), ("--rendezvous", rendezvous)) if v is not None]
        if given:
            raise ConfigError(f"launch: {' and '.join(given)} without --nodes N (or MIN:MAX)")
        return {}
    if not nodes:
        assert cluster is not None
        fewest = most = cluster.num_processes
    rank = node_rank if node_rank is not None else cluster.process_id if cluster else None
    address = rendezvous or (cluster.coordinator if cluster else None)
    if rank is None:
        raise ConfigError("launch: --nodes without --node-rank R (from 0), which no scheduler tells here")
    if address is None:
        raise ConfigError(
            "launch: --nodes without --rendezvous HOST:PORT of node 0, which no scheduler tells here"
        )
    if not 0 <= rank < most:
        raise ConfigError(f"launch --node-rank: nodes are numbered from 0 to {most - 1}, got {rank}")
    split_address(address)
    return {"min_nodes": fewest, "max_nodes": most, "node_rank": rank, "rendezvous": address}


def _sized(environ: Mapping[str, str], nodes: int | None) -> Mapping[str, str]:
    """The environment with the number of pods, which Kubernetes does not tell, from ``--nodes``."""
    if nodes is None or "JOB_COMPLETION_INDEX" not in environ:
        return environ
    return {"DSJAX_NUM_PROCESSES": str(nodes), **environ}


def program(command: Sequence[str]) -> list[str]:
    """The program and arguments of a command: a verb of dsjax and its, or another program.

    Raises:
      InputError: there is none.
    """
    words = list(command)
    if words[:1] == ["--"]:
        del words[0]
    if not words:
        raise InputError("launch: nothing to run; dsjax launch --workers 2 -- train CONFIG, say")
    if words[0] in VERBS or words[0] == "dsjax":
        return [sys.executable, "-m", "dsjax", *words[words[0] == "dsjax" :]]
    found = shutil.which(words[0])
    if found is None:
        raise InputError(
            f"launch: {words[0]} is neither a verb of dsjax ({', '.join(VERBS)}) nor a program on PATH"
        )
    return [found, *words[1:]]


def beats_itself(arguments: Sequence[str]) -> bool:
    """Whether the program is known to tell of its progress, so that not beginning to is a hang too."""
    return list(arguments[1:4]) == ["-m", "dsjax", "train"]

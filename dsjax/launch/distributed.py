"""Which cluster this process belongs to, and joining it."""

from __future__ import annotations

import glob
import os
import re
import socket
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from dsjax.errors import ConfigError, InternalError
from dsjax.launch.rendezvous import Meeting, meet

# Where the environment names a coordinator's host but no port.
DEFAULT_PORT = 61217
# Ports made from a job's number: above the range that Linux gives to outgoing connections.
_FIRST_PORT, _PORTS = 61440, 4096


@dataclass(frozen=True)
class Cluster:
    """The processes of one job.

    Attributes:
      coordinator: HOST:PORT of process 0.
      num_processes, process_id: how many there are and which this one is.
      local_device_ids: the accelerators of this host that are this process's; None: all of them.
      source: who said so, in words.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None
    source: str


def detect(environ: Mapping[str, str]) -> Cluster | None:
    """The cluster that the environment describes; None: this process is alone.

    Explicit variables (DSJAX_COORDINATOR, DSJAX_NUM_PROCESSES, DSJAX_PROCESS_ID) come first, then
    Kubernetes, a SLURM step, Open MPI.  What describes less than a whole cluster (a shell inside an
    allocation, an indexed job of independent pods) describes none.

    Raises:
      ConfigError: explicit variables that are incomplete or wrong, or an address that cannot be found.
    """
    for source in (_kubernetes, _explicit, _slurm, _open_mpi):
        cluster = source(environ)
        if cluster is not None:
            return cluster if cluster.num_processes > 1 else None
    if environ.get("DSJAX_COORDINATOR"):
        raise ConfigError(
            "DSJAX_COORDINATOR is set but not DSJAX_NUM_PROCESSES and DSJAX_PROCESS_ID; set all three, or "
            "runtime.distributed=none to run alone"
        )
    return None


def only_task(environ: Mapping[str, str]) -> Cluster | None:
    """The SLURM step of one task that this process is; None: it is none. It could have been one of more."""
    cluster = _slurm(environ)
    return cluster if cluster is not None and cluster.num_processes == 1 else None


def _explicit(environ: Mapping[str, str]) -> Cluster | None:
    names = ("DSJAX_COORDINATOR", "DSJAX_NUM_PROCESSES", "DSJAX_PROCESS_ID")
    coordinator, processes, rank = (environ.get(name) for name in names)
    if not processes and not rank:
        return None
    missing = [name for name in names if not environ.get(name)]
    if missing:
        there = [name for name in names if environ.get(name)]
        raise ConfigError(
            f"{' and '.join(missing)} not set although {' and '.join(there)} is; set all three, or "
            "runtime.distributed=none to run alone"
        )
    count, index = _place(environ, "DSJAX_PROCESS_ID")
    ids_name = "DSJAX_LOCAL_DEVICE_IDS"
    ids = environ.get(ids_name)
    devices = tuple(_number({ids_name: one}, ids_name) for one in ids.split(",")) if ids else None
    return Cluster(_with_port(coordinator or ""), count, index, devices, "DSJAX_ variables")


def _place(environ: Mapping[str, str], index_name: str) -> tuple[int, int]:
    """The number of processes, and which this one is."""
    count, index = _number(environ, "DSJAX_NUM_PROCESSES"), _number(environ, index_name)
    if index >= count:
        raise ConfigError(
            f"{index_name} is {index} and DSJAX_NUM_PROCESSES {count}; processes are numbered from 0 to one "
            "less than there are"
        )
    return count, index


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not text.isdecimal():
        raise ConfigError(f"{name}: takes a number, got {text!r}")
    return int(text)


def _with_port(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):
        return f"{address}:{DEFAULT_PORT}" if ":" not in address else f"[{address}]:{DEFAULT_PORT}"
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"DSJAX_COORDINATOR: takes HOST:PORT, got {address!r}")
    return address


def _kubernetes(environ: Mapping[str, str]) -> Cluster | None:
    """A pod of an indexed Job or a JobSet: its index is the rank; how many there are must be said."""
    index, count = environ.get("JOB_COMPLETION_INDEX"), environ.get("DSJAX_NUM_PROCESSES")
    if not index or not count or environ.get("DSJAX_PROCESS_ID"):
        return None
    coordinator = environ.get("DSJAX_COORDINATOR")
    if not coordinator:
        name, job = environ.get("JOBSET_NAME"), environ.get("REPLICATED_JOB_NAME")
        if not name or not job:
            raise ConfigError(
                "Kubernetes: DSJAX_NUM_PROCESSES is set but not DSJAX_COORDINATOR; set it to the address of "
                "pod 0 (JOB-0.SERVICE), or JOBSET_NAME and REPLICATED_JOB_NAME from the pod's labels"
            )
        coordinator = f"{name}-{job}-0-0.{name}"
    count_and_index = _place(environ, "JOB_COMPLETION_INDEX")
    return Cluster(_with_port(coordinator), *count_and_index, None, "Kubernetes")


def _slurm(environ: Mapping[str, str]) -> Cluster | None:
    """A task of a step that srun started. A batch script or a shell of salloc is no step."""
    job, nodes = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_NODELIST")
    rank = _maybe(environ, "SLURM_PROCID")
    # SLURM_NTASKS is the allocation's in a shell that srun --pty started; the step's own count is right.
    count = _maybe(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if not job or not nodes or rank is None or count is None or rank >= count:
        return None
    step = _maybe(environ, "SLURM_STEP_ID", "SLURM_STEPID") or 0
    coordinator = environ.get("DSJAX_COORDINATOR") or f"{expand_nodes(nodes)[0]}:{job_port(f'{job}.{step}')}"
    here = _tasks_here(environ)
    devices = share(_maybe(environ, "SLURM_LOCALID"), here, gpus(environ))
    return Cluster(_with_port(coordinator), count, rank, devices, f"SLURM job {job} step {step}")


def _open_mpi(environ: Mapping[str, str]) -> Cluster | None:
    rank = _maybe(environ, "OMPI_COMM_WORLD_RANK")
    count = _maybe(environ, "OMPI_COMM_WORLD_SIZE")
    if rank is None or count is None or rank >= count:
        return None
    if count == 1:
        return Cluster("", 1, 0, None, "Open MPI")
    local_size = _maybe(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or uri.partition(";")[0]
    coordinator = environ.get("DSJAX_COORDINATOR")
    if not coordinator:
        host = "127.0.0.1" if local_size == count else _launcher_host(uri)
        if host is None:
            raise ConfigError(
                "Open MPI: does not tell the host of rank 0; pass it: mpirun -x DSJAX_COORDINATOR=HOST ..."
            )
        coordinator = f"{host}:{job_port(job)}"
    devices = share(_maybe(environ, "OMPI_COMM_WORLD_LOCAL_RANK"), local_size, gpus(environ))
    return Cluster(_with_port(coordinator), count, rank, devices, "Open MPI")


def _launcher_host(uri: str) -> str | None:
    """The first address in Open MPI 4's ``JOB;tcp://ADDRESS,ADDRESS:PORT`` of the host of mpirun."""
    found = re.search(r"tcp://([^,:;]+)|tcp6://\[([^,\]]+)", uri)
    if found is None:
        return None
    return found.group(1) or f"[{found.group(2)}]"


def _maybe(environ: Mapping[str, str], *names: str) -> int | None:
    """The first of the variables that is a number."""
    for name in names:
        text = environ.get(name, "")
        if text.isdecimal():
            return int(text)
    return None


def job_port(job: str) -> int:
    """A port that all processes of a job agree on and two jobs seldom share."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % (_PORTS - 1)


def expand_nodes(text: str) -> list[str]:
    """The hosts of a SLURM node list: ``a[01-03,7],b`` is a01, a02, a03, a7, b."""
    hosts = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        names = [""]
        for plain, ranges in re.findall(r"([^\[]*)(?:\[([^\]]*)\])?", part):
            ends = _numbers(ranges) if ranges else [""]
            names = [name + plain + end for name in names for end in ends]
        hosts += names
    return hosts


def _numbers(ranges: str) -> list[str]:
    found = []
    for one in ranges.split(","):
        first, dash, last = one.partition("-")
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)] if dash else [first]
    return found


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    """Tasks of the step on this host, from ``2(x3),1``."""
    node, text = _maybe(environ, "SLURM_NODEID"), environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(times or 1)
    return counts[node] if node is not None and node < len(counts) else None


def gpus(environ: Mapping[str, str]) -> int:
    """GPUs that this process may see."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    return len(glob.glob("/proc/driver/nvidia/gpus/*"))


def share(local_rank: int | None, local_size: int | None, gpus: int) -> tuple[int, ...] | None:
    """This process's part of a host's GPUs; None (all) where it is alone or bound to its own already."""
    if local_rank is None or not local_size or local_size == 1 or gpus < local_size:
        return None
    each = gpus // local_size
    return tuple(range(local_rank * each, (local_rank + 1) * each))


def join(cluster: Cluster, timeout: int) -> None:
    """Meets the other processes and starts jax.distributed. Joining again does nothing.

    Args:
      timeout: seconds to wait for the others.

    Raises:
      InternalError: processes that did not come in time, by rank.
    """
    import jax

    if jax.distributed.is_initialized():
        return
    meeting = Meeting(cluster.coordinator, cluster.num_processes, cluster.process_id, cluster.source)
    began = time.monotonic()
    meet(meeting, timeout)
    # gRPC would send the coordinator's traffic through a web proxy that the environment names.
    os.environ.setdefault("no_grpc_proxy", meeting.host)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would swallow SIGTERM outside of the loop, which saves and stops by a vote of its own.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            cluster.coordinator,
            cluster.num_processes,
            cluster.process_id,
            local_device_ids=cluster.local_device_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=max(30, int(timeout - (time.monotonic() - began))),
            coordinator_bind_address=cluster.coordinator if meeting.is_local else None,
        )
    except Exception as error:
        first = (str(error).splitlines() or ["no message"])[0]
        raise InternalError(
            f"rank {cluster.process_id} of {cluster.num_processes} on {socket.gethostname()} could not join "
            f"the cluster at {cluster.coordinator}: {first}"
        ) from error
    sys.excepthook = _end_at_once


def _end_at_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Tells of an exception that nobody caught and ends the process, without the cluster's farewell.

    Leaving in good order would wait minutes for processes that wait for this one's part of a collective.
    """
    sys.__excepthook__(kind, error, trace)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(getattr(error, "exit_code", 1))

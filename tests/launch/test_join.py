"""Real processes under jax.distributed on the CPU."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SUM = """
from dsjax.backend.platform import setup
from dsjax.cli_errors import guarded, leave
from dsjax.config.schema import RuntimeConfig

def main():
    where = dict(platform="cpu", cpu_devices={devices}, compilation_cache=None)
    for _ in range(2):  # the second time nothing happens
        setup(RuntimeConfig(**where, distributed_timeout={timeout}))
    import jax, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
    mine = np.full(jax.local_device_count(), 10.0 ** jax.process_index())
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("x")), mine, (jax.device_count(),))
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))(x)
    print("process", jax.process_index(), "of", jax.process_count(), "sum", float(total), flush=True)

leave(guarded(main))
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(environ: dict[str, str], devices: int = 1, timeout: int = 60) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DSJAX_", "SLURM_", "OMPI_", "JAX_"))}
    return subprocess.Popen(
        [sys.executable, "-c", SUM.format(devices=devices, timeout=timeout)],
        env={**clean, "PYTHONPATH": str(ROOT), **environ},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout, and what Python wrote to stderr (a GPU plugin without a GPU writes there too)."""
    out, err = process.communicate(timeout=120)
    lines = [
        line for line in err.splitlines() if not re.match(r"[IWE]\d{4} |WARNING: All log messages", line)
    ]
    return process.returncode, out, "\n".join(lines)


def explicit(rank: int, count: int, port: int) -> dict[str, str]:
    return {
        "DSJAX_COORDINATOR": f"127.0.0.1:{port}",
        "DSJAX_NUM_PROCESSES": str(count),
        "DSJAX_PROCESS_ID": str(rank),
    }


def test_two_processes_add_up_though_a_proxy_is_named():
    port = free_port()
    proxy = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    processes = [start({**explicit(rank, 2, port), **proxy}, devices=2) for rank in range(2)]
    for rank, process in enumerate(processes):
        code, out, err = finish(process)
        assert code == 0, err
        assert f"process {rank} of 2 sum 22.0" in out and err == ""


def test_a_slurm_step_joins():
    step = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": str(os.getpid() % 4000), "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": socket.gethostname()}  # fmt: skip
    processes = [start({**step, "SLURM_PROCID": str(rank)}) for rank in range(2)]
    for process in processes:
        code, out, err = finish(process)
        assert code == 0 and "of 2 sum 11.0" in out, err


def test_a_shell_inside_an_allocation_runs_alone():
    process = start(
        {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_NODELIST": "a[1-4]", "SLURM_PROCID": "0"},
        devices=3,
    )
    code, out, err = finish(process)
    assert code == 0 and "process 0 of 1 sum 3.0" in out, err


def test_a_peer_that_never_comes_is_named_within_the_time_by_everyone():
    port = free_port()
    began = time.monotonic()
    processes = {rank: start(explicit(rank, 3, port), timeout=6) for rank in (0, 2)}
    for process in processes.values():
        code, out, err = finish(process)
        assert code == 70
        assert (
            err.startswith("dsjax: rank 1 of 3 has not come within 6 s")
            and err.count("\n") == 0
            and out == ""
        )
    assert time.monotonic() - began < 25


def test_joining_after_jax_has_started_is_refused():
    code = (
        "import jax; jax.devices()\nfrom dsjax.backend.platform import setup\nfrom dsjax.cli_errors import "
        "guarded\nfrom dsjax.config.schema import RuntimeConfig\n"
        "raise SystemExit(guarded(lambda: setup(RuntimeConfig(compilation_cache=None))))"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **explicit(0, 2, free_port())}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "jax has started already" in done.stderr


@pytest.mark.slow
def test_eight_processes():
    port = free_port()
    processes = [start(explicit(rank, 8, port)) for rank in range(8)]
    for process in processes:
        code, out, err = finish(process)
        assert code == 0 and "sum 11111111.0" in out, err

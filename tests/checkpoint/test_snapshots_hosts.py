"""Snapshots of several hosts: two processes that use two directories share no memory, as two hosts do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.checkpoint.snapshots import MemorySnapshots
from dsjax.checkpoint.snapshots.file import read_index, snapshot_files
from dsjax.checkpoint.snapshots.hosts import Hosts
from dsjax.config.checkpoint import MemoryConfig
from dsjax.errors import InputError

WORKER = """
import os, sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
from dsjax.launch.distributed import detect, join
join(detect(os.environ), 60)
sys.path.insert(0, os.environ["HERE"])
import test_snapshots_hosts as here
getattr(here, sys.argv[1])(*sys.argv[2:])
print("well", flush=True)
jax.distributed.shutdown()
"""


def worker_pair(act: str, *arguments: object) -> None:
    """Runs a function of this file in two processes of one job."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    workers = []
    for rank in range(2):
        environment = os.environ | {
            "DSJAX_COORDINATOR": address,
            "DSJAX_NUM_PROCESSES": "2",
            "DSJAX_PROCESS_ID": str(rank),
            "HERE": str(Path(__file__).parent),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        command = [sys.executable, "-c", WORKER, act, *map(str, arguments)]
        workers.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    try:
        told = [worker.communicate(timeout=120)[0].decode() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for text in told:
        assert text.rstrip().endswith("well"), text


def state(step: int, *axes: str | None) -> dict:
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))

    def make() -> dict:
        return {"kernel": jnp.arange(8 * 16.0).reshape(8, 16) + step, "step": jnp.int32(step)}

    places = {"kernel": NamedSharding(mesh, P(*axes)), "step": NamedSharding(mesh, P())}
    return jax.jit(make, out_shardings=places)()


def like(tree: dict) -> dict:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def require_equal(got: dict, wanted: dict) -> None:
    for name, array in got.items():
        for mine, right in zip(array.addressable_shards, wanted[name].addressable_shards, strict=True):
            assert np.array_equal(mine.data, right.data), name


def snapshots_of(root: Path, memory: str, **settings) -> MemorySnapshots:
    return MemorySnapshots(MemoryConfig(path=str(root / memory), **settings), root / "run", every=1)


def save(root: str, steps: str, shared: str) -> None:
    """Saves some steps, on two hosts or one."""
    memory = "shared" if shared == "True" else f"host{jax.process_index()}"
    snapshots = snapshots_of(Path(root), memory)
    snapshots.prepare(state(0, "fsdp"), 0)
    for step in map(int, steps.split()):
        snapshots.save(step, state(step, "fsdp"), {"step": step})
        snapshots.wait_for_buddy(30)
    assert snapshots.trouble is None
    assert snapshots.buddy_step == (None if shared == "True" else int(steps.split()[-1]))
    assert snapshots.newest()[0] == int(steps.split()[-1])
    snapshots.close()


def restore(root: str, step: str, *memories: str) -> None:
    """Restores a step, cut otherwise, on hosts with these directories; and goes on."""
    snapshots = snapshots_of(Path(root), memories[jax.process_index()])
    assert snapshots.newest()[0] == int(step)
    wanted = state(int(step), None, "fsdp")
    got, meta = snapshots.restore(int(step), like(wanted))
    require_equal(got, wanted)
    assert meta == {"step": int(step)}
    snapshots.prepare(got, int(step))
    snapshots.save(int(step) + 1, state(int(step) + 1, None, "fsdp"), {})
    snapshots.wait_for_buddy(30)
    assert snapshots.newest()[:2] == [int(step) + 1, int(step)]
    snapshots.forget_after(int(step))
    snapshots.wait_for_buddy(30)
    assert snapshots.newest()[0] == int(step)
    snapshots.close()


def refuse(root: str, step: str) -> None:
    """One host's part is damaged, in both copies: all processes are told."""
    snapshots = snapshots_of(Path(root), f"host{jax.process_index()}")
    with pytest.raises(InputError, match="kernel"):
        snapshots.restore(int(step), like(state(0, "fsdp")))
    snapshots.close()


def test_a_lost_host_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    worker_pair("save", tmp_path, "1 2 3", False)
    # The first host alone: its own part, and the copy of the other's.
    alone = snapshots_of(tmp_path, "host0")
    assert alone.newest()[0] == 3
    wanted = state(3, None, "fsdp")
    require_equal(alone.restore(3, like(wanted))[0], wanted)
    alone.close()
    # With a new host that holds nothing, and in another order.
    worker_pair("restore", tmp_path, 3, "new", "host0")


def test_damage_in_one_process_ends_them_all(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    worker_pair("save", tmp_path, "1", False)
    for path in [
        p for host in ("host0", "host1") for d in (tmp_path / host).iterdir() for p in snapshot_files(d)
    ]:
        index = read_index(path)
        if index is not None and index.rank == 1:
            with path.open("r+b") as file:
                file.seek(next(r.offset for r in index.records if r.name == "kernel"))
                file.write(b"damage")
    worker_pair("refuse", tmp_path, 1)


def test_processes_of_one_host_share_its_memory(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    worker_pair("save", tmp_path, "1 2", True)
    wanted = state(2, "fsdp")
    snapshots = snapshots_of(tmp_path, "shared")
    require_equal(snapshots.restore(2, like(wanted))[0], wanted)
    for path in snapshot_files(snapshots.directory):
        index = read_index(path)
        if index is not None and (index.step, index.rank) == (2, 1):
            path.unlink()
    assert snapshots.newest() == [1]
    snapshots.close()


def test_who_keeps_whose_copies() -> None:
    four = Hosts((0, 0, 1, 1), 0)
    assert [four.buddy(rank) for rank in range(4)] == [2, 3, 0, 1]
    uneven = Hosts((0, 1, 1, 2), 0)
    assert [uneven.buddy(rank) for rank in range(4)] == [1, 3, 3, 0]
    assert Hosts((0, 1, 1, 2), 3).keeps_for() == [1, 2]
    assert Hosts((0, 0), 1).buddy(1) is None and not Hosts((0, 0), 1).leads

"""Checkpoints on disk: complete or absent, checked, kept by rule, read in parts."""

from __future__ import annotations

import math
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dsjax.checkpoint import DiskCheckpoints, listing
from dsjax.checkpoint.chunks import chunk_shape
from dsjax.checkpoint.tree import check_matches
from dsjax.config.checkpoint import DiskConfig
from dsjax.errors import InputError, InternalError


def placed(tree, *spec, devices=8):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",), axis_types=(AxisType.Auto,))
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*spec)))


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def state(scale=1.0):
    kernel = jax.random.normal(jax.random.key(1), (64, 32)) * scale
    return placed({"params": {"kernel": kernel, "small": kernel[:8, :2]}, "key": jnp.arange(8)}, "x")


@pytest.fixture
def saved(tmp_path):
    checkpoints = DiskCheckpoints(tmp_path / "c")
    checkpoints.save(5, state(), {"step": 5}, {"heldout": {"loss": 1.5}})
    checkpoints.wait()
    yield checkpoints
    checkpoints.close()


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_another_mesh_reads_the_same_and_plain_orbax_too(tmp_path, compression):
    checkpoints = DiskCheckpoints(tmp_path, DiskConfig(compression=compression))
    donated = jax.jit(lambda t: jax.tree.map(lambda x: x * 0, t), donate_argnums=0)
    one = state()
    checkpoints.save(5, one, {"a": 1})
    donated(one)  # The next step may overwrite the buffers at once.
    checkpoints.wait()
    like = abstract(placed(state(), None, devices=2))
    read, facts = checkpoints.restore(5, like)
    assert facts == {"a": 1, "metrics": {}}
    jax.tree.map(np.testing.assert_array_equal, read, state())
    assert read["key"].sharding.is_equivalent_to(like["key"].sharding, 1)
    part = checkpoints.restore_part(5, {"params": like["params"]})
    np.testing.assert_array_equal(part["params"]["kernel"], state()["params"]["kernel"])
    with ocp.StandardCheckpointer() as plain:
        jax.tree.map(np.testing.assert_array_equal, plain.restore(tmp_path / "5" / "state"), state())
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 5
    checkpoints.close()


def test_damage_is_found_and_named(saved):
    wrong = state(scale=2.0)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as writer:
        writer.save(saved.directory / "5" / "state", args=ocp.args.PyTreeSave(wrong), force=True)
    with pytest.raises(InputError, match="is damaged: params/kernel, params/small not as saved"):
        saved.restore(5, abstract(wrong))
    with pytest.raises(InputError, match="params/kernel"):
        saved.restore_part(5, {"params": abstract(wrong)["params"]})
    assert saved.restore_part(5, {"key": abstract(wrong)["key"]})["key"].shape == (8,)


def test_cut_files_are_refused(saved):
    files = [f for f in (saved.directory / "5" / "state").rglob("d/*") if f.stat().st_size]
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(InputError, match="damaged"):
        saved.restore(5, abstract(state()))


def test_names_that_are_no_steps_are_passed_over(saved):
    root = saved.directory
    for name in ("500 (copy)", "500.bak", "07", "٣", "9.orbax-checkpoint-tmp", "8.deleted", "6.notes"):
        shutil.copytree(root / "5", root / name)
    (root / "11").mkdir()
    assert [one.step for one in listing(root)] == saved.steps() == [5]
    assert saved.latest_step() == 5
    saved.prepare()
    left = {path.name for path in root.iterdir()}
    assert not {"9.orbax-checkpoint-tmp", "8.deleted"} & left
    assert {"500 (copy)", "500.bak", "6.notes", "5"} <= left
    with pytest.raises(InputError, match="11 does not exist; steps stored there: 5"):
        saved.facts(11)


def test_rules_decide_what_stays(tmp_path):
    config = DiskConfig(keep=1, keep_every=4, keep_best=1)
    checkpoints = DiskCheckpoints(tmp_path, config)
    for step, loss in [(1, 3.0), (2, 1.0), (4, 2.0), (5, 4.0), (6, 5.0)]:
        checkpoints.save(step, state(), {}, {"heldout": {"loss": loss, "other": math.inf}})
    checkpoints.wait()
    assert checkpoints.steps() == [2, 4, 6]
    assert checkpoints.has(6)
    assert not checkpoints.has(5)
    checkpoints.held = lambda: {6}
    checkpoints.save(7, state(), {})
    checkpoints.close()
    assert checkpoints.steps() == [2, 4, 6, 7]
    assert {path.name for path in tmp_path.iterdir()} == {"2", "4", "6", "7"}


def test_a_failed_save_can_be_tried_again(tmp_path, monkeypatch):
    checkpoints = DiskCheckpoints(tmp_path)
    checkpoints.save(1, state(), {})
    checkpoints.wait()
    handler = checkpoints._writer._handler
    monkeypatch.setattr(handler, "finalize", lambda path: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(InputError, match="the disk is full"):
        checkpoints.save(2, state(), {})
        checkpoints.wait()
    assert checkpoints.failed
    assert checkpoints.steps() == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    monkeypatch.undo()
    checkpoints.recover()
    checkpoints.save(2, state(), {})
    checkpoints.close()
    assert not checkpoints.failed
    assert checkpoints.steps() == [1, 2]


def test_a_step_is_replaced(saved):
    saved.save(5, state(scale=3.0), {"again": True})
    saved.wait()
    read, facts = saved.restore(5, abstract(state()))
    assert facts["again"]
    jax.tree.map(np.testing.assert_array_equal, read, state(scale=3.0))


@pytest.mark.parametrize("saved_as", [None, ("x",), (None, "x")])
@pytest.mark.parametrize("cut", [0, 1])
def test_an_eighth_is_read_as_an_eighth(tmp_path, saved_as, cut):
    """Of whatever dimension, and whatever the mesh was that saved it."""
    checkpoints = DiskCheckpoints(tmp_path)
    whole = placed({"params": {"w": jnp.ones((2048, 2048))}}, *(saved_as or ()), devices=8 if saved_as else 1)
    checkpoints.save(1, whole, {})
    checkpoints.close()
    base = {"driver": "file", "path": str(tmp_path / "1" / "state") + "/"}
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": "params.w/"}}
    array = tensorstore.open(spec).result()
    before = _bytes_read()
    array[(slice(0, 256), ...) if cut == 0 else (..., slice(0, 256))].read().result()
    # In the other dimension than the one it was cut in, chunks of such small shards are of the least size.
    along = saved_as is None or len(saved_as) == cut + 1
    assert _bytes_read() - before <= (1.1 if along else 2.1) / 8 * 2**24


@pytest.mark.parametrize(
    ("shape", "whole", "chunk"),
    [
        ((4096, 4096), (4096, 4096), (512, 512)),
        ((512, 4096), (4096, 4096), (64, 512)),
        ((32, 4096, 11008), (32, 4096, 11008), (1, 512, 1376)),
        ((12, 1024, 1024), (12, 1024, 1024), (1, 128, 128)),
        ((50257, 768), (50257, 768), (1733, 96)),
        ((4,), (4,), (4,)),
        ((), (), ()),
        ((0, 3), (0, 3), (1, 3)),
    ],
)
def test_chunks_divide_what_a_device_holds(shape, whole, chunk):
    found = chunk_shape(shape, whole, 4)
    assert all(max(1, size) % part == 0 for size, part in zip(shape, found, strict=True))
    assert found == chunk


def _bytes_read() -> int:
    metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])


def test_nothing_to_write_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises((InputError, InternalError), match="path is a file"):
        DiskCheckpoints(tmp_path / "file").prepare()


_TOGETHER = """
import sys
import jax, jax.numpy as jnp, numpy as np
rank, port, where = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from dsjax.checkpoint import DiskCheckpoints
from dsjax.config.checkpoint import DiskConfig
from dsjax.errors import Damaged
mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
made = jax.jit(lambda: {"w": jnp.arange(4096.0).reshape(64, 64), "s": jnp.int32(7)},
               out_shardings={"w": NamedSharding(mesh, P("x")), "s": NamedSharding(mesh, P())})
checkpoints = DiskCheckpoints(where, DiskConfig(keep=2))
checkpoints.prepare()
for step in (1, 2, 3):
    checkpoints.save(step, made(), {})
checkpoints.wait()
like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())), made())
read, _ = checkpoints.restore(3, like)
np.testing.assert_array_equal(read["w"].addressable_data(0), np.arange(4096.0).reshape(64, 64))
checkpoints.close()
jax.experimental.multihost_utils.sync_global_devices("closed")
if rank == 0:
    assert checkpoints.steps() == [2, 3], checkpoints.steps()
# What only process 1 wrote is cut short, so that only process 1 meets it when each reads its own.
if rank == 1:
    for file in (checkpoints.directory / "3" / "state" / "ocdbt.process_1" / "d").iterdir():
        file.write_bytes(file.read_bytes()[:100])
jax.experimental.multihost_utils.sync_global_devices("cut")
own = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), made())
try:
    checkpoints.restore(3, own)
except Damaged as error:
    print("DAMAGED", rank, error)
np.testing.assert_array_equal(checkpoints.restore(2, own)[0]["s"].addressable_data(0), 7)
print("DONE", rank)
"""


def test_two_processes_save_restore_and_agree_on_damage(tmp_path):
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    script = tmp_path / "script.py"
    script.write_text(_TOGETHER)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
    words = [str(port), str(tmp_path / "c")]
    both = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), *words],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    told = [process.communicate(timeout=120)[0] for process in both]
    for rank, text in enumerate(told):
        assert f"DONE {rank}" in text, text
        assert f"DAMAGED {rank}" in text, text
    assert "DAMAGED 0 rank 1: " in told[0]


def test_another_optimizers_state_is_called_that() -> None:
    def tree(*names: str) -> dict[str, jax.ShapeDtypeStruct]:
        return {name: jax.ShapeDtypeStruct((2,), np.float32) for name in names}

    with pytest.raises(InputError, match=r"put optimizer\.kind and optimizer\.state_dtype back"):
        check_matches(tree("params/w", "opt_state/mu/w"), tree("params/w", "opt_state/codes/w"), "it")
    with pytest.raises(InputError, match="use the model it was made with"):
        check_matches(tree("params/w", "opt_state/mu/w"), tree("params/v", "opt_state/mu/v"), "it")

"""Copies read straight from their store: what is needed and no more, on any mesh."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dsjax.checkpoint import DiskCheckpoints
from dsjax.checkpoint.ranged import RangedCopy, kvstore
from dsjax.checkpoint.remote import RemoteCheckpoints
from dsjax.config.checkpoint import RemoteConfig
from dsjax.errors import Damaged, InputError

pytest.importorskip("obstore")
SPLITS = {"w": ("x", None), "layers/kernel": (None, None, "x"), "step": (), "half": ("x",)}


def placed(devices: int, turned: bool = False) -> dict:
    """A state over so many devices, cut in the other dimensions if `turned`."""
    mesh = jax.make_mesh((devices,), ("x",), (AxisType.Auto,), devices=jax.devices()[:devices])
    key = jax.random.key(7)
    values = {
        "w": jax.random.normal(key, (512, 256)), "layers/kernel": jax.random.normal(key, (4, 64, 128)),
        "step": jnp.int32(5), "half": jax.random.normal(key, (64,), jnp.bfloat16),
    }  # fmt: skip

    def put(name: str) -> jax.Array:
        split = SPLITS[name][::-1] if turned else SPLITS[name]
        return jax.device_put(values[name], NamedSharding(mesh, PartitionSpec(*split)))

    whole = jax.device_put(key, NamedSharding(mesh, PartitionSpec()))
    w, kernel, step, half = map(put, values)
    return {"params": {"w": w, "layers": {"kernel": kernel}}, "step": step, "key": whole, "half": half}


def like(state: dict) -> dict:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def copied(tmp_path: Path, *urls: str) -> RemoteCheckpoints:
    disk = DiskCheckpoints(tmp_path / "run")
    disk.save(3, placed(8), {"mesh": "eight"})
    disk.close()
    remote = RemoteCheckpoints(RemoteConfig(urls=list(urls)))
    remote.copy(3, tmp_path / "run" / "3")
    assert remote.wait(60)
    return remote


def same(got: dict, want: dict) -> None:
    assert jax.random.key_data(got.pop("key")).tolist() == jax.random.key_data(want.pop("key")).tolist()
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(("devices", "turned"), [(8, False), (2, True), (1, False)])
def test_any_mesh_reads_a_copy_where_it_lies(devices: int, turned: bool, tmp_path: Path) -> None:
    remote = copied(tmp_path, f"file://{tmp_path}/a")
    assert remote.ranged and remote.latest_step() == 3 and remote.facts(3)["mesh"] == "eight"
    wanted = like(placed(devices, turned))
    got, facts = remote.restore(3, wanted)
    assert facts["mesh"] == "eight" and "digests" not in facts
    assert jax.tree.all(
        jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), got, wanted)
    )
    same(got, placed(1))


def test_a_damaged_copy_gives_way_to_the_other_store(tmp_path: Path) -> None:
    urls = [f"file://{tmp_path}/a", f"file://{tmp_path}/b"]
    remote = copied(tmp_path, *urls)
    for path in (tmp_path / "a" / "3" / "state").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:64])
    same(remote.restore(3, like(placed(4)))[0], placed(1))
    for path in (tmp_path / "b" / "3" / "state").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:64])
    with pytest.raises(Damaged) as refused:
        remote.restore(3, like(placed(4)))
    assert len(refused.value.faults) == 2 and all(url in str(refused.value) for url in urls)


def test_a_copy_of_another_model_is_refused(tmp_path: Path) -> None:
    remote = copied(tmp_path, f"file://{tmp_path}/a")
    wanted = like(placed(1))
    wanted["params"]["w"] = wanted["params"]["w"].update(shape=(512, 128))
    with pytest.raises(InputError, match="params/w: shape") as refused:
        remote.restore(3, wanted)
    assert not isinstance(refused.value, Damaged)


def read_so_far(driver: str) -> int:
    metrics = tensorstore.experimental_collect_matching_metrics(f"/tensorstore/kvstore/{driver}/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])


@pytest.mark.slow
def test_s3_gives_an_eighth_for_an_eighth(tmp_path: Path, server: int, s3: None) -> None:
    array = jax.device_put(jnp.ones((4096, 2048)), placed(8)["params"]["w"].sharding)
    disk = DiskCheckpoints(tmp_path / "run")
    disk.save(3, {"w": array}, {})
    disk.close()
    remote = RemoteCheckpoints(RemoteConfig(urls=["s3://bucket/ranged"]))
    remote.copy(3, tmp_path / "run" / "3")
    assert remote.wait(60)
    base = kvstore("s3://bucket/ranged")
    assert base is not None
    stored = RangedCopy(base, 3, "the copy").arrays()["w"]
    before = read_so_far("s3")
    stored[512:1024].read().result()
    assert read_so_far("s3") - before <= 1.1 / 8 * array.nbytes
    got, _ = remote.restore(3, {"w": jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)})
    np.testing.assert_array_equal(got["w"], array)
    remote.close()

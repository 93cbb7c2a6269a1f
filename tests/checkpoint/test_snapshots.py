"""Snapshots in memory, on one host: what is written comes back on any mesh, and nothing else ever does."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.checkpoint.snapshots import MemorySnapshots, copying, listing, memory
from dsjax.checkpoint.snapshots import file as file_module
from dsjax.checkpoint.snapshots.copying import stage
from dsjax.checkpoint.snapshots.file import SnapshotFile, file_bytes, lay_out, read_index, snapshot_files
from dsjax.checkpoint.snapshots.hosts import Hosts
from dsjax.config.checkpoint import MemoryConfig
from dsjax.errors import ConfigError, InputError


def mesh(**sizes: int) -> jax.sharding.Mesh:
    count = int(np.prod(list(sizes.values())))
    auto = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=auto, devices=jax.devices()[:count])


def numbers(step: int = 0) -> dict:
    """A state of every kind of array; each number says which one it is and of which step."""
    return {
        "kernel": jnp.arange(16 * 24, dtype=jnp.float32).reshape(16, 24) + 1000 * step,
        "half": (jnp.arange(64) + step).astype(jnp.bfloat16).reshape(8, 8),
        "small": {"bytes": jnp.arange(16, dtype=jnp.int8), "yes": jnp.arange(8) % 2 == 0},
        "step": jnp.int32(step),
        "key": jax.random.key(step),
        "none": jnp.zeros((0, 8)),
    }


def placed(tree: dict, on: jax.sharding.Mesh, *axes: str | None) -> dict:
    """Cut over the axes as far as dimensions go; what is too small is replicated."""

    def put(leaf: jax.Array) -> jax.Array:
        fits = leaf.ndim >= 1 and leaf.size and leaf.shape[0] >= 8
        return jax.device_put(leaf, NamedSharding(on, P(*axes[: leaf.ndim]) if fits else P()))

    return jax.tree.map(put, tree)


def like(tree: dict) -> dict:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def equal(a: dict, b: dict) -> bool:
    def plain(x: jax.Array) -> np.ndarray:
        return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.array_equal(plain(x), plain(y)) for x, y in pairs)


@pytest.fixture
def make(tmp_path: Path):
    """Makes the snapshots of a run anew, as a process that starts does."""
    made = []

    def one(name: str = "run", **settings) -> MemorySnapshots:
        (tmp_path / name).mkdir(exist_ok=True)
        config = MemoryConfig(path=str(tmp_path / "memory"), **settings)
        made.append(MemorySnapshots(config, tmp_path / name, every=1))
        return made[-1]

    yield one
    for snapshots in made:
        snapshots.close()


def saved(snapshots: MemorySnapshots, state: dict, *steps: int) -> None:
    for step in steps:
        snapshots.save(step, state, {"step": step})
    snapshots.wait()


CUTS = {
    "one": ({"fsdp": 1}, ("fsdp",)),
    "rows": ({"fsdp": 8}, ("fsdp",)),
    "columns": ({"fsdp": 4}, (None, "fsdp")),
    "both": ({"data": 2, "fsdp": 4}, ("data", "fsdp")),
    "replicas": ({"data": 4, "fsdp": 2}, (None, "fsdp")),
}


@pytest.mark.parametrize("after", CUTS)
@pytest.mark.parametrize("before", ["one", "rows", "both", "replicas"])
def test_comes_back_on_any_mesh(make, before: str, after: str) -> None:
    sizes, axes = CUTS[before]
    state = placed(numbers(7), mesh(**sizes), *axes)
    snapshots = make()
    snapshots.prepare(like(state), 0)
    saved(snapshots, state, 7)
    sizes, axes = CUTS[after]
    wanted = placed(numbers(0), mesh(**sizes), *axes)
    got, meta = make().restore(7, like(wanted))
    assert equal(got, numbers(7)) and meta == {"step": 7}
    assert jax.tree.map(lambda x: x.sharding, got) == jax.tree.map(lambda x: x.sharding, wanted)


def test_the_newest_are_kept_and_the_best_comes_first(make) -> None:
    state = placed(numbers(), mesh(fsdp=8), "fsdp")
    snapshots = make(keep=2)
    assert snapshots.newest() == []
    snapshots.prepare(like(state), 0)
    saved(snapshots, state, 1, 2, 3, 4, 5)
    # The third file holds the one that the next is to be written over.
    assert make().newest() == [5, 4, 3]
    assert [s.step for s in listing(snapshots.directory)] == [3, 4, 5]
    assert all(s.complete for s in listing(snapshots.directory))


def test_what_has_been_written_over_is_not_restored(make) -> None:
    state = placed(numbers(1), mesh(fsdp=8), "fsdp")
    snapshots = make(keep=1)
    snapshots.prepare(like(state), 0)
    saved(snapshots, state, 1, 2)
    assert snapshots.newest() == [2, 1]
    saved(snapshots, state, 3)
    with pytest.raises(InputError, match="no snapshot of step 1"):
        snapshots.restore(1, like(state))


def test_neither_the_restored_state_nor_the_file_follows_the_other(make) -> None:
    state = placed(numbers(1), mesh(fsdp=8), "fsdp")
    snapshots = make(keep=1)
    snapshots.prepare(like(state), 0)
    saved(snapshots, state, 1, 2)
    got, _ = snapshots.restore(2, like(state))
    other = placed(numbers(9), mesh(fsdp=8), "fsdp")
    saved(snapshots, other, 3, 4, 5)
    assert equal(got, numbers(1))


def test_saving_leaves_the_state_to_be_donated(make) -> None:
    big = {"kernel": jax.device_put(jnp.ones((1024, 1024)), NamedSharding(mesh(fsdp=8), P("fsdp")))}
    snapshots = make()
    snapshots.prepare(big, 0)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    for number in range(1, 6):
        where = [s.data.unsafe_buffer_pointer() for s in big["kernel"].addressable_shards]
        snapshots.save(number, big, {})
        big = step(big)
        assert [s.data.unsafe_buffer_pointer() for s in big["kernel"].addressable_shards] == where
    snapshots.wait()
    got, _ = snapshots.restore(5, like(big))
    assert float(got["kernel"][3, 3]) == 5.0


def test_what_is_not_in_the_hosts_memory_is_copied_behind(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_on_cpu", lambda piece: False)
    state = placed(numbers(4), mesh(data=2, fsdp=4), "data", "fsdp")
    snapshots = make()
    snapshots.prepare(like(state), 0)
    saved(snapshots, state, 4)
    assert equal(make().restore(4, like(state))[0], numbers(4))


def test_through_pinned_memory_the_state_may_be_donated_before_it_is_copied(make) -> None:
    array = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh(fsdp=2), P("fsdp")))
    expected = np.array(array)
    targets = [np.zeros(128, np.uint8) for _ in range(2)]
    staged = stage([s.data for s in array.addressable_shards], targets)
    jax.jit(lambda x: x * 0, donate_argnums=0)(array)
    staged.copy()
    assert np.array_equal(np.concatenate(targets).view(np.float32).reshape(8, 8), expected)


def test_a_damaged_array_is_refused_by_name_and_an_older_snapshot_still_serves(make) -> None:
    state = placed(numbers(3), mesh(fsdp=8), "fsdp")
    snapshots = make()
    snapshots.prepare(like(state), 0)
    saved(snapshots, state, 1, 2)
    path = next(p for p in snapshot_files(snapshots.directory) if (i := read_index(p)) and i.step == 2)
    record = next(r for r in read_index(path).records if r.name == "half")
    with path.open("r+b") as file:
        file.seek(record.offset + 1)
        file.write(b"\xff")
    again = make()
    with pytest.raises(InputError, match=rf"{path.name}: half is damaged"):
        again.restore(2, like(state))
    assert equal(again.restore(1, like(state))[0], numbers(3))


@pytest.mark.parametrize("bad", [0, 1])
def test_a_second_copy_serves_in_place_of_a_damaged_one(make, bad: int) -> None:
    state = placed(numbers(3), mesh(fsdp=8), "fsdp")
    snapshots = make(keep=1)
    snapshots.prepare(like(state), 0)
    saved(snapshots, state, 1)
    path = next(p for p in snapshot_files(snapshots.directory) if read_index(p))
    copies = [path, path.with_name(f"copy-{path.name}")]
    shutil.copy(*copies)
    with copies[bad].open("r+b") as file:
        file.seek(next(r.offset for r in read_index(path).records if r.name == "kernel"))
        file.write(b"damage")
    assert equal(make().restore(1, like(state))[0], numbers(3))


def test_another_model_is_refused(make) -> None:
    state = placed(numbers(), mesh(fsdp=8), "fsdp")
    snapshots = make()
    snapshots.prepare(like(state), 0)
    saved(snapshots, state, 1)
    other = {**state, "kernel": state["kernel"][:8]}
    with pytest.raises(InputError, match="kernel: shape"):
        snapshots.restore(1, like(other))
    with pytest.raises(InputError, match=r"no snapshot of step 5.*steps there: 1"):
        snapshots.restore(5, like(state))


def test_a_path_that_is_no_longer_is_forgotten(make) -> None:
    state = placed(numbers(), mesh(fsdp=8), "fsdp")
    first = make()
    first.prepare(like(state), 0)
    saved(first, state, 1, 2, 3)
    second = make()
    second.prepare(like(state), 2)
    assert second.newest() == [2, 1]
    saved(second, state, 3)
    assert second.newest() == [3, 2, 1]
    second.forget_after(1)
    assert second.newest() == [1]
    saved(second, state, 2)
    assert second.newest() == [2, 1]


def test_the_newest_of_another_layout_stays_until_there_is_a_newer_one(make) -> None:
    state = placed(numbers(1), mesh(fsdp=8), "fsdp")
    first = make()
    first.prepare(like(state), 0)
    saved(first, state, 1, 2)
    narrow = placed(numbers(2), mesh(fsdp=4), "fsdp")
    second = make()
    second.prepare(like(narrow), 2)
    second.wait()
    assert make().newest() == [2]  # 1 gave its memory to the new layout
    saved(second, narrow, 3)
    assert make().newest() == [3, 2]
    saved(second, narrow, 4)
    assert make().newest() == [4, 3]


def test_a_run_that_was_begun_anew_does_not_see_the_snapshots_of_the_old_one(make, tmp_path: Path) -> None:
    state = placed(numbers(1), mesh(fsdp=8), "fsdp")
    first = make()
    first.prepare(like(state), 0)
    saved(first, state, 1, 2)
    for path in (tmp_path / "run").iterdir():
        path.unlink()
    second = make()
    assert second.newest() == []
    second.prepare(like(state), 0)
    saved(second, state, 1)
    assert second.newest() == [1]
    assert make("other").newest() == []


def test_what_does_not_fit_is_refused_with_numbers(make) -> None:
    state = {
        "kernel": jax.ShapeDtypeStruct((1 << 20, 64), jnp.float32, sharding=NamedSharding(mesh(a=1), P()))
    }
    with pytest.raises(
        ConfigError, match=r"3 snapshot files.*0\.75 GiB.*0\.50 GiB are allowed.*memory\.keep"
    ):
        make(budget_gib=0.5).prepare(state, 0)


def test_an_error_in_the_background_is_raised_once(make) -> None:
    state = placed(numbers(), mesh(fsdp=8), "fsdp")
    snapshots = make()
    snapshots.prepare(like(state), 0)
    snapshots.save(1, state, {"not json": object()})
    deadline = time.monotonic() + 10
    with pytest.raises(Exception, match=r"the snapshot in .* failed: TypeError"):
        while time.monotonic() < deadline:
            snapshots.check()
    snapshots.check()
    saved(snapshots, state, 2)
    assert snapshots.newest() == [2]


def test_a_save_that_breaks_off_takes_nothing_with_it_but_the_oldest(
    make, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = placed(numbers(), mesh(fsdp=8), "fsdp")
    snapshots = make(keep=1)
    snapshots.prepare(like(state), 0)
    saved(snapshots, state, 1, 2)
    monkeypatch.setattr(memory, "take", lambda pieces, targets: targets[0].fill(1) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        snapshots.save(3, state, {})
    assert make().newest() == [2]


def test_clearing_frees_the_memory(make) -> None:
    state = placed(numbers(), mesh(fsdp=8), "fsdp")
    snapshots = make()
    snapshots.prepare(like(state), 0)
    saved(snapshots, state, 1)
    snapshots.clear()
    assert snapshot_files(snapshots.directory) == [] and snapshots.newest() == []
    snapshots.close()
    assert not snapshots.directory.exists()


@pytest.mark.parametrize("leads", [True, False])
def test_clearing_leaves_nothing_of_what_was_under_way(
    make, monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    monkeypatch.setattr(Hosts, "leads", leads)
    state = placed(numbers(), mesh(fsdp=8), "fsdp")
    snapshots = make()
    snapshots.prepare(like(state), 0)
    snapshots.clear()
    assert snapshot_files(snapshots.directory) == []
    snapshots.prepare(like(state), 0)
    snapshots.save(1, state, {})
    for path in snapshot_files(snapshots.directory):
        path.unlink()  # as the first process of the host does
    snapshots.clear()
    assert snapshot_files(snapshots.directory) == []


def test_a_file_counts_only_between_its_end_and_its_next_beginning(tmp_path: Path) -> None:
    records = lay_out([("a", "float32", (4,), (0,), (4,))])
    file = SnapshotFile(tmp_path / "x.snapshot", file_bytes(records))
    file.allocate()
    index = file_module.Index("run", "start", 3, 0, 1, 0, 0.0, {}, tuple(records))
    assert read_index(file.path) is None
    file.begin()
    file.bytes_of(records[0])[:] = 1
    assert read_index(file.path) is None
    file.finish(index)
    assert read_index(file.path).step == 3
    whole = file.path.read_bytes()
    offset = whole.index(b'{"run"')
    file.path.write_bytes(whole[:offset] + b" " + whole[offset + 1 :])
    assert read_index(file.path) is None
    file.path.write_bytes(whole[: offset + 5])
    assert read_index(file.path) is None
    file.path.write_bytes(whole)
    file.begin()
    assert read_index(file.path) is None


WRITER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("snapshot_file", sys.argv[1])
m = importlib.util.module_from_spec(spec); sys.modules["snapshot_file"] = m; spec.loader.exec_module(m)
from pathlib import Path
records = m.lay_out([(f"a{i}", "int32", (1 << 18,), (0,), (1 << 18,)) for i in range(4)])
files = [m.SnapshotFile(Path(sys.argv[2]) / f"{k}.snapshot", m.file_bytes(records)) for k in range(2)]
for file in files: file.allocate()
step = 0
while True:
    step += 1
    file = files[step % 2]
    file.begin()
    for record in records: file.bytes_of(record).view("int32")[:] = step
    file.finish(m.Index("run", "start", step, 0, 1, 0, 0.0, {}, tuple(records)))
    if step == 2: print("ready", flush=True)
"""


def test_a_writer_that_is_killed_leaves_no_file_that_is_wrong(tmp_path: Path) -> None:
    chance = random.Random(0)
    for _ in range(6):
        command = [sys.executable, "-c", WRITER, file_module.__file__, str(tmp_path)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        time.sleep(chance.random() * 0.05)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        valid = [(p, i) for p in snapshot_files(tmp_path) if (i := read_index(p)) is not None]
        assert valid  # the one that was not being written
        for path, index in valid:
            data = path.read_bytes()
            for record in index.records:
                raw = np.frombuffer(data, np.int32, record.nbytes // 4, record.offset)
                assert (raw == index.step).all()
                assert file_module.digest_of(raw) == record.digest

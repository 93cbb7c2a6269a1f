"""Saves that fail, fall due by the clock, or are damaged; snapshots in memory; which state a run goes on from."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from test_fit import Net, lines, loader, loss

import dsjax
from dsjax.checkpoint import listing
from dsjax.checkpoint.snapshots import snapshot_directory
from dsjax.checkpoint.snapshots.file import read_index
from dsjax.checkpoint.stored import metric_of
from dsjax.config.checkpoint import MemoryConfig
from dsjax.errors import ConfigError, InputError, Preempted
from dsjax.faults import VARIABLE, Faults

STEPS = 9
MESHES = ({"data": 2, "fsdp": 4}, {"fsdp": 8})


def fit(directory: Path, checkpoint: Any, mesh: Any = MESHES[0], **more: Any) -> dsjax.Trainer:
    trainer = dsjax.Trainer(
        lambda rngs: Net(rngs=rngs), loss, optax.adamw(1e-2, eps=1e-4), mesh=mesh, run={"dir": str(directory)},
        checkpoint=checkpoint, observe={"log_every": 1, "progress": "none"}, eval={"every": 3},
    )  # fmt: skip
    trainer.fit(loader(), steps=STEPS, eval_loader=[next(iter(loader()))], **more)
    return trainer


def losses(directory: Path) -> list[float]:
    records = [line for line in lines(directory) if "loss" in line]
    assert [line["step"] for line in records] == list(range(1, STEPS + 1))
    return [line["loss"] for line in records]


def kinds(directory: Path, *of: str) -> list[tuple[str, int]]:
    return [(e["kind"], e["step"]) for e in lines(directory, "events.jsonl") if e["kind"] in of]


def saved(directory: Path) -> list[int]:
    return [one.step for one in listing(directory / "checkpoints")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    directory = tmp_path_factory.mktemp("undisturbed")
    fit(directory, {"disk": {"every": 0}})
    return losses(directory)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[dict[str, Any]]:
    yield {"every": 2, "path": str(tmp_path / "memory")}


def stopped_in_memory(directory: Path, memory: Any, monkeypatch: pytest.MonkeyPatch, at: int = 7) -> Path:
    """A run that is lost before step `at`, with snapshots in memory; the directory that holds them."""

    class Lost(BaseException):
        pass

    def lost(faults: Faults, step: int) -> None:
        if step == at:
            raise Lost

    with monkeypatch.context() as patched, pytest.raises(Lost):
        patched.setattr(Faults, "before_step", lost)
        fit(directory, {"memory": memory, "disk": {"every": 3}})
    return snapshot_directory(MemoryConfig(**memory), directory)


@pytest.mark.parametrize("kind", ["save_error", "disk_full"])
def test_a_save_that_fails_is_made_up_for(
    kind: str, undisturbed: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"{kind}@step=4,times=2")
    fit(tmp_path, {"disk": {"every": 4}})
    told = kinds(tmp_path, "save_failed", "checkpoint_saved")
    assert told == [("save_failed", 4), ("save_failed", 5), *[("checkpoint_saved", n) for n in (6, 8, 9)]]
    assert losses(tmp_path) == undisturbed


def test_a_save_that_goes_on_failing_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "disk_full@step=4,times=9")
    with pytest.raises(InputError, match="the disk is full"):
        fit(tmp_path, {"disk": {"every": 2, "retries": 1}})
    assert kinds(tmp_path, "save_failed") == [("save_failed", 4)]
    assert saved(tmp_path) == [2]


def test_the_last_save_is_tried_again_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "save_error@step=9")
    fit(tmp_path, {"disk": {"every": 0}})
    assert kinds(tmp_path, "save_failed", "finished") == [("save_failed", 9), ("finished", 9)]
    assert saved(tmp_path) == [9]


def test_saves_fall_due_by_the_clock(tmp_path: Path) -> None:
    fit(tmp_path, {"disk": {"every": 0, "every_minutes": 1e-9, "keep": 9}})
    # Each is asked for in a step and granted when that step's metrics have come.
    assert saved(tmp_path) == [3, 6, 9]


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    fit(tmp_path, {"disk": {"every": 3, "keep": 1, "keep_best": 1}})
    evaluated = {line["step"]: line["eval"]["heldout"]["loss"] for line in lines(tmp_path) if "eval" in line}
    assert set(evaluated) == {3, 6, 9}
    assert saved(tmp_path) == sorted({9, min(evaluated, key=lambda step: evaluated[step])})
    for step in saved(tmp_path):
        found = metric_of(tmp_path / "checkpoints" / str(step), "heldout.loss")
        assert found == pytest.approx(evaluated[step], rel=1e-5)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_run_goes_on_from_memory(
    mesh: Any, memory: Any, undisturbed: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = stopped_in_memory(tmp_path / "run", memory, monkeypatch, at=8)
    fit(tmp_path / "run", {"memory": memory, "disk": {"every": 3}}, mesh)
    resumed = [e for e in lines(tmp_path / "run", "events.jsonl") if e["kind"] == "resumed"]
    assert [(e["step"], e["tier"]) for e in resumed] == [(6, "memory")]
    assert np.allclose(losses(tmp_path / "run"), undisturbed, rtol=1e-6)
    if mesh == MESHES[0]:
        assert losses(tmp_path / "run") == undisturbed
    assert not place.exists()  # a run that is done gives the memory back


def test_what_is_damaged_is_passed_over(
    memory: Any, undisturbed: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = stopped_in_memory(tmp_path / "run", memory, monkeypatch)
    for path in place.glob("*.snapshot"):  # all snapshots: the checkpoint of step 6 on disk is left
        index = read_index(path)
        for record in index.records if index else ():
            with path.open("r+b") as file:
                file.seek(record.offset)
                file.write(b"\xff" * record.nbytes)
    fit(tmp_path / "run", {"memory": memory, "disk": {"every": 3}})
    events = lines(tmp_path / "run", "events.jsonl")
    skipped = [(e["step"], e["tier"]) for e in events if e["kind"] == "checkpoint_skipped"]
    resumed = [(e["step"], e["tier"]) for e in events if e["kind"] == "resumed"]
    assert skipped == [(6, "memory")] and resumed == [(6, "disk")]
    assert losses(tmp_path / "run") == undisturbed


def test_a_damaged_checkpoint_on_disk_is_passed_over(undisturbed: list[float], tmp_path: Path) -> None:
    with pytest.raises(Preempted):
        fit(tmp_path, {"disk": {"every": 3}}, stop_after=7)
    assert saved(tmp_path) == [3, 6, 7]
    for path in (tmp_path / "checkpoints" / "7" / "state").rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(path.read_bytes()[:-500] + b"\0" * 500)
    fit(tmp_path, {"disk": {"every": 3}})
    told = kinds(tmp_path, "checkpoint_skipped", "resumed")
    assert told == [("checkpoint_skipped", 7), ("resumed", 6)]
    assert saved(tmp_path) == [3, 6, 9] and (tmp_path / "checkpoints" / "7.damaged").is_dir()
    assert losses(tmp_path) == undisturbed


def test_memory_counts_for_resume_never_and_must(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="must"):
        start(tmp_path / "none", memory, "must")
    assert not list(Path(memory["path"]).iterdir())  # a run that did not start leaves nothing in memory
    stopped_in_memory(tmp_path / "run", memory, monkeypatch, at=3)
    with pytest.raises(InputError, match="never"):
        start(tmp_path / "run", memory, "never")
    start(tmp_path / "run", memory, "must")


def test_a_start_without_snapshots_goes_on_from_those_there_are(
    memory: Any, undisturbed: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = stopped_in_memory(tmp_path / "run", memory, monkeypatch, at=6)
    with pytest.raises(Preempted):
        fit(tmp_path / "run", {"memory": {**memory, "every": 0}, "disk": {"every": 0}}, stop_after=1)
    assert kinds(tmp_path / "run", "resumed") == [("resumed", 4)] and saved(tmp_path / "run")[-1] == 5
    fit(tmp_path / "run", {"memory": memory, "disk": {"every": 0}})
    assert kinds(tmp_path / "run", "resumed")[-1] == ("resumed", 5)
    assert losses(tmp_path / "run") == undisturbed and not place.exists()


def test_a_run_that_is_done_in_memory_is_brought_to_disk(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_in_memory(tmp_path / "run", {**memory, "every": 1}, monkeypatch, at=9)
    monkeypatch.setattr("test_tiers.STEPS", 8)
    fit(tmp_path / "run", {"memory": memory, "disk": {"every": 3}})
    assert kinds(tmp_path / "run", "resumed")[-1] == ("resumed", 8) and saved(tmp_path / "run")[-1] == 8


def test_copies_are_told_of_while_training_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    remote = {"urls": f"file://{tmp_path}/store", "every_minutes": 1e-9}
    fit(tmp_path / "run", {"disk": {"every": 2}, "remote": remote})
    assert (tmp_path / "store" / "9").is_dir()


def start(directory: Path, memory: Any, resume: str) -> None:
    trainer = dsjax.Trainer(
        lambda rngs: Net(rngs=rngs), loss, optax.adamw(1e-2, eps=1e-4), mesh=MESHES[0],
        run={"dir": str(directory), "resume": resume}, observe={"log_every": 1, "progress": "none"},
        checkpoint={"memory": memory, "disk": {"every": 3}}, eval={"every": 3},
    )  # fmt: skip
    trainer.fit(loader(), steps=STEPS, eval_loader=[next(iter(loader()))])


SCRIPT = """
import sys; sys.path[:0] = [{tests!r}]
from pathlib import Path
from test_tiers import fit
fit(Path(sys.argv[1]), {{"memory": {{"every": 1, "path": sys.argv[2]}}, "disk": {{"every": 4}}}})
"""


def test_a_killed_process_loses_no_line(undisturbed: list[float], tmp_path: Path) -> None:
    script = SCRIPT.format(tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", script, str(tmp_path / "run"), str(tmp_path / "memory")]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", VARIABLE: "kill@step=7"}
    killed = subprocess.run(command, env=environment, check=False, capture_output=True)
    assert killed.returncode == -9
    again = subprocess.run(command, env={**environment, VARIABLE: ""}, check=False, capture_output=True)
    assert again.returncode == 0, again.stderr.decode()
    assert losses(tmp_path / "run") == undisturbed
    # The snapshot of step 6 may not have been finished yet.
    assert kinds(tmp_path / "run", "resumed") in ([("resumed", 5)], [("resumed", 6)])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "fire@step=1",
            "'fire@step=1' is of no known kind; there are kill, hang, slow, disk_full, save_error, nan, inf, "
            "spike, bitflip",
        ),
        ("kill@rank=1", "'kill@rank=1' needs step=N; kill takes step, rank, attempt"),
        ("kill@step=1,loud=2", "'kill@step=1,loud=2' knows no loud; kill takes step, rank, attempt"),
        (
            "slow@step=x",
            "'slow@step=x': takes numbers from 0 on, steps and times from 1, as in kill@step=7,rank=1",
        ),
        (
            "slow@step=1,seconds=nan",
            "'slow@step=1,seconds=nan': takes numbers from 0 on, steps and times from 1, as in kill@step=7,rank=1",
        ),
        (
            "kill@step=-1",
            "'kill@step=-1': takes numbers from 0 on, steps and times from 1, as in kill@step=7,rank=1",
        ),
    ],
)
def test_a_fault_that_is_not_understood_is_refused(text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Faults.of({VARIABLE: text}, 0)
    assert refused.value.faults == [f"{VARIABLE}: {fault}"]


def test_a_fault_of_numbers_may_have_a_place() -> None:
    text = "nan@step=3,steps=2,layer=1,op=ffn,pass=backward,device=0; inf@step=1,pass=forward; spike@step=4"
    nan, inf, spike = Faults.of({VARIABLE: text}, 0).wrong
    assert (nan.first, nan.last, nan.layer, nan.op, nan.backward, nan.device) == (2, 3, 1, "ffn", True, 0)
    assert (inf.op, inf.backward, inf.inside) == ("loss", False, True)
    assert (spike.factor, spike.inside, spike.device) == (100.0, False, None)


def test_faults_concern_a_rank_and_an_attempt() -> None:
    text = "kill@step=1,rank=1;slow@step=1,seconds=0;hang@step=1,attempt=1;save_error@step=2,attempt=any"
    mine = {rank: [f.kind for f in Faults.of({VARIABLE: text}, rank).faults] for rank in (0, 1)}
    assert mine == {0: ["slow", "save_error"], 1: ["kill", "slow", "save_error"]}
    later = Faults.of({VARIABLE: text, "DSJAX_ATTEMPT": "1"}, 0)
    assert [f.kind for f in later.faults] == ["hang", "save_error"]

"""Checkpoints in places of their own: a disk path, object stores; whose they are, and which is taken."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optax
import pytest
from test_fit import Net, lines, loader, loss

import dsjax
from dsjax.checkpoint import listing
from dsjax.errors import ConfigError, InputError, Preempted

STEPS = 6


def made(directory: Path, *, disk: Any = None, **sections: Any) -> dsjax.Trainer:
    return dsjax.Trainer(
        lambda rngs: Net(rngs=rngs), loss, optax.adamw(1e-2, eps=1e-4), mesh={"data": 2},
        **{
            "run": {"dir": str(directory)}, "observe": {"log_every": 1, "progress": "none"},
            "checkpoint": {"disk": {"every": 2, **(disk or {})}, **sections.pop("checkpoint", {})}, **sections,
        },
    )  # fmt: skip


def resumed(directory: Path) -> list[tuple[int, str]]:
    events = lines(directory, "events.jsonl")
    return [(e["step"], e["tier"]) for e in events if e["kind"] == "resumed"]


def test_checkpoints_of_other_settings_are_refused_wherever_they_lie(tmp_path: Path) -> None:
    elsewhere = {"path": str(tmp_path / "fast")}
    made(tmp_path / "one", disk=elsewhere).fit(loader(), steps=2)
    other = made(tmp_path / "two", disk=elsewhere, max_grad_norm=1.0)
    with pytest.raises(ConfigError, match=r"optimizer\.max_grad_norm"):
        other.fit(loader(), steps=4)
    # The same run, whose directory was lost.
    made(tmp_path / "three", disk=elsewhere).fit(loader(), steps=4)
    assert resumed(tmp_path / "three") == [(2, "disk")]


def test_two_runs_do_not_write_to_one_place(tmp_path: Path) -> None:
    elsewhere, told = {"path": str(tmp_path / "fast")}, []

    def second(step: int, record: Any) -> None:
        if step == 1:
            with pytest.raises(InputError) as refused:
                made(tmp_path / "two", disk=elsewhere).fit(loader(), steps=2)
            told.extend(refused.value.faults)

    made(tmp_path / "one", disk=elsewhere).fit(loader(), steps=2, on_step=second)
    assert told == [
        f"checkpoint.disk.path {tmp_path}/fast: another run is using this directory; wait for it, or choose "
        "another checkpoint.disk.path"
    ]


def test_parameters_come_from_a_run_whose_checkpoints_lie_elsewhere(tmp_path: Path) -> None:
    made(tmp_path / "one", disk={"path": str(tmp_path / "fast")}).fit(loader(), steps=2)
    begin = made(tmp_path / "two", run={"dir": str(tmp_path / "two"), "init_from": str(tmp_path / "one")})
    begin.fit(loader(), steps=1)
    # Of one seed and the same first batch: the loss is another one because the parameters are.
    assert lines(tmp_path / "two")[0]["loss"] != lines(tmp_path / "one")[0]["loss"]


def stored(directory: Path, *names: str) -> dict[str, Any]:
    return {"remote": {"urls": [f"file://{directory}/{name}" for name in names], "every_minutes": 1e-9}}


def test_the_newest_state_wins_even_if_it_is_stored_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    checkpoint = stored(tmp_path, "store")
    made(tmp_path / "run", checkpoint=checkpoint).fit(loader(), steps=STEPS)
    assert (tmp_path / "store" / str(STEPS)).is_dir()
    for step in (4, STEPS):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
    assert [one.step for one in listing(tmp_path / "run" / "checkpoints")] == [2]
    made(tmp_path / "run", checkpoint=checkpoint).fit(loader(), steps=STEPS + 1)
    assert resumed(tmp_path / "run") == [(STEPS, "remote")]


def test_a_store_that_cannot_be_asked_is_told_where_there_is_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    checkpoint = stored(tmp_path, "store")
    made(tmp_path / "run", checkpoint=checkpoint).fit(loader(), steps=2)

    def down(store: Any) -> Any:
        raise OSError("no route to host")

    monkeypatch.setattr("dsjax.checkpoint.copies.stored_steps", down)
    made(tmp_path / "run", checkpoint=checkpoint).fit(loader(), steps=3)
    assert resumed(tmp_path / "run") == [(2, "disk")]
    (told,) = [e["notes"] for e in lines(tmp_path / "run", "events.jsonl") if e["kind"] == "resumed"]
    assert len(told) == 1 and told[0].startswith(
        "whether a newer copy is stored elsewhere is not known: file://"
    )
    with pytest.raises(InputError, match="cannot be read"):
        made(tmp_path / "new", checkpoint=checkpoint).fit(loader(), steps=3)


def test_what_one_store_has_damaged_another_gives(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    checkpoint = stored(tmp_path, "a", "b")
    made(tmp_path / "run", checkpoint=checkpoint).fit(loader(), steps=2)
    for path in (tmp_path / "a" / "2").rglob("*"):
        if path.is_file() and path.stat().st_size > 300:
            path.write_bytes(path.read_bytes()[:-100] + b"\0" * 100)
    made(tmp_path / "again", checkpoint=checkpoint).fit(loader(), steps=3)
    assert resumed(tmp_path / "again") == [(2, "remote")]


def test_a_signal_breaks_an_evaluation_off_and_a_resume_makes_up_for_it(tmp_path: Path) -> None:
    batch, drawn = next(iter(loader())), []

    class HeldOut:
        def __iter__(self) -> Iterator[Any]:
            for index in range(40):
                drawn.append(index)
                if len(drawn) == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield batch

    with pytest.raises(Preempted, match="SIGTERM"):
        made(tmp_path, eval={"every": 2}).fit(loader(), steps=4, eval_loader=HeldOut())
    assert len(drawn) < 20 and not [line for line in lines(tmp_path) if "eval" in line]
    made(tmp_path, eval={"every": 2}).fit(loader(), steps=4, eval_loader=HeldOut())
    assert [line["step"] for line in lines(tmp_path) if "eval" in line] == [2, 4]

"""Runs that go astray go back to a good state and on past the batches that led there."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grain
import numpy as np
import optax
import pytest
from test_fit import Net, example, lines, loss

import dsjax
from dsjax.checkpoint import listing
from dsjax.errors import ConfigError, Diverged, Preempted

STEPS, ROWS = 40, 8


def batches(bad: Iterable[int] = (), value: float = np.inf, left_out: Iterable[int] = ()) -> grain.MapDataset:
    """Batches by number, some of them with a wrong answer; `left_out`: as if these had never been there."""
    numbers = [n for n in range(3 * STEPS) if n not in set(left_out)]
    wrong = set(bad)

    def batch(index: int) -> dict[str, np.ndarray]:
        number = numbers[int(index)]
        rows = [example(ROWS * number + row) for row in range(ROWS)]
        made = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        # As large as can be: its square is not finite, and it passes for data.
        made["y"] = made["y"] + np.float32(value if number in wrong else 0)
        return made

    return grain.MapDataset.range(len(numbers)).map(batch)


def fit(
    directory: Path,
    data: Any,
    steps: int = STEPS,
    mesh: Any = None,
    checkpoint: Any = None,
    on_step: Any = None,
    **stability: Any,
) -> Any:
    made = dsjax.Trainer(
        lambda rngs: Net(rngs=rngs), loss, optax.adam(1e-2, eps=1e-4), mesh=mesh or {"data": 2},
        run={"dir": str(directory)}, observe={"log_every": 1, "progress": "none"},
        checkpoint=checkpoint or {"disk": {"every": 5, "keep": 9}},
        stability={"on_nonfinite": "rollback", "rollback_after": 3, **stability},
    )  # fmt: skip
    return made.fit(data, steps=steps, on_step=on_step)


def losses(directory: Path) -> list[float]:
    records = lines(directory)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


def went_back(directory: Path) -> list[dict[str, Any]]:
    return [e for e in lines(directory, "events.jsonl") if e["kind"] == "rolled_back"]


@pytest.mark.parametrize("memory", [False, True], ids=["disk", "memory"])
def test_steps_in_a_row_that_are_not_finite_are_gone_back_over(memory: bool, tmp_path: Path) -> None:
    checkpoint: dict[str, Any] = {"disk": {"every": 5, "keep": 9}}
    if memory:
        checkpoint = {"memory": {"every": 4, "path": str(tmp_path / "memory")}, "disk": {"every": 0}}
    fit(tmp_path / "run", batches(range(22, 25), 3e38), checkpoint=checkpoint)
    (event,) = went_back(tmp_path / "run")
    assert event["step"] == 20 and event["tier"] == ("memory" if memory else "disk")
    # Known by the save after step 25, or two steps late: what was begun by then is left out too.
    assert event["bad_steps"] == [23, 25] and event["skipped_batches"] == [20, 26 if memory else 25]
    assert event["reason"] == "3 steps in a row were skipped"
    fit(tmp_path / "clean", batches(left_out=range(20, event["skipped_batches"][1] + 1)))
    assert losses(tmp_path / "run") == losses(tmp_path / "clean") and len(losses(tmp_path / "run")) == STEPS


def test_a_spike_is_gone_back_over_and_what_was_saved_since_does_not_count(tmp_path: Path) -> None:
    fit(tmp_path / "run", batches([29], 1e3), checkpoint={"disk": {"every": 1, "keep": 50}}, spike=20.0)
    (event,) = went_back(tmp_path / "run")
    assert (
        event["step"] == 29
        and event["bad_steps"] == [30, 30]
        and event["reason"].startswith("the loss rose to")
    )
    left_out = range(event["skipped_batches"][0], event["skipped_batches"][1] + 1)
    fit(tmp_path / "clean", batches(left_out=left_out))
    assert losses(tmp_path / "run") == losses(tmp_path / "clean")
    aside = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if "." in path.name}
    assert {name for name in aside if name.endswith("rolled_back")} <= {
        f"{s}.rolled_back" for s in range(30, 34)
    }
    assert [one.step for one in listing(tmp_path / "run" / "checkpoints")] == list(range(1, STEPS + 1))


def test_without_a_saved_state_it_goes_back_to_the_start(tmp_path: Path) -> None:
    fit(tmp_path / "run", batches(range(3, 6), 3e38), checkpoint={"disk": {"every": 0}})
    events = went_back(tmp_path / "run")
    assert [(e["step"], e["tier"]) for e in events] == [(0, "the start")]
    fit(
        tmp_path / "clean",
        batches(left_out=range(events[0]["skipped_batches"][1] + 1)),
        checkpoint={"disk": {"every": 0}},
    )
    assert losses(tmp_path / "run") == losses(tmp_path / "clean")


def test_going_back_again_and_again_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(Diverged) as told:
        fit(tmp_path / "run", batches(range(12, 200), 3e38), max_rollbacks=2)
    assert "it went astray there 3 times" in told.value.faults[0]
    assert f"the last good checkpoint is {tmp_path}/run/checkpoints/10" in told.value.faults[0]
    assert len(went_back(tmp_path / "run")) == 2


def test_one_bad_step_is_only_skipped_and_a_resume_goes_on_behind_what_was_left_out(tmp_path: Path) -> None:
    data = batches([7, *range(22, 26)], 3e38)
    fit(tmp_path / "run", data, steps=30)
    assert next(e["step"] for e in lines(tmp_path / "run", "events.jsonl") if e["kind"] == "skipped") == 8
    fit(tmp_path / "run", data)
    fit(tmp_path / "whole", data)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_the_learning_rate_is_lowered_for_a_while(tmp_path: Path) -> None:
    data = batches(range(22, 25), 3e38)
    fit(tmp_path / "run", data, rollback_learning_rate=0.5, rollback_steps=4)
    fit(tmp_path / "plain", data)
    slow, plain = losses(tmp_path / "run"), losses(tmp_path / "plain")
    # Another program, which may round otherwise.
    np.testing.assert_allclose(slow[:21], plain[:21], rtol=1e-5)
    assert abs(slow[21] - plain[21]) > 1e-3 * plain[21]


@pytest.mark.parametrize("kind", ["nan", "inf", "spike"])
def test_faults_on_demand_are_gone_back_over(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("DSJAX_FAULT", f"{kind}@step=24,steps=3")
        fit(tmp_path / "run", batches(), spike=20.0)
    (event,) = went_back(tmp_path / "run")
    assert event["bad_steps"] == ([24, 24] if kind == "spike" else [24, 26])
    first, last = event["skipped_batches"]
    fit(tmp_path / "clean", batches(left_out=range(first, last + 1)))
    # A spike lasts for three batches, of which two or three are left out; a program with faults in it rounds otherwise.
    same = STEPS if kind != "spike" or last >= 25 else 20
    np.testing.assert_allclose(losses(tmp_path / "run")[:same], losses(tmp_path / "clean")[:same], rtol=1e-5)


def test_a_run_of_a_pipeline_goes_back(tmp_path: Path) -> None:
    """Through the command line's own model, whose layers lie in slots."""
    from dsjax.config import load
    from dsjax.data import open_train
    from dsjax.train.assemble import assemble

    def train(directory: Path) -> list[float]:
        config = load(
            [Path(__file__).parents[2] / "configs" / "quickstart.yaml"],
            [
                "model.hidden_size=16", "model.num_hidden_layers=3", "model.num_attention_heads=2",
                "model.num_key_value_heads=1", "model.head_dim=8", "model.intermediate_size=32", "data.kind=synthetic",
                "data.paths=[]", "data.tokenizer=bytes", "train.steps=12", "train.global_batch_size=8",
                "train.sequence_length=16", "eval.every=0", "eval.compressors=[]", "eval.samples=[]",
                "optimizer.kind=adamw", "optimizer.schedule.warmup_steps=2", "optimizer.schedule.decay_steps=2",
                "mesh.pipeline=2", "mesh.fsdp=4", "stability.on_nonfinite=rollback", "stability.rollback_after=2",
                "checkpoint.disk.every=3", "observe.log_every=1", "observe.progress=none", f"run.dir={directory}",
            ],
            environ={},
        )  # fmt: skip
        trainer = assemble(config).trainer
        trainer.fit(open_train(config, trainer.rows(8)), 12)
        return losses(directory)

    clean = train(tmp_path / "clean")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DSJAX_FAULT", "nan@step=8,steps=2")
        got = train(tmp_path / "run")
    (event,) = went_back(tmp_path / "run")
    assert event["step"] == 6 and event["examples"]
    assert got[:6] == clean[:6] and len(got) == 12 and all(loss is not None for loss in got)


def test_a_spike_that_is_known_only_at_a_stop_is_gone_back_over_first(tmp_path: Path) -> None:
    def stop(step: int, record: Any) -> None:
        if step == 29:
            os.kill(os.getpid(), signal.SIGTERM)

    seldom = {"disk": {"every": 7, "keep": 9}}  # a save looks at all steps before it
    with pytest.raises(Preempted):
        fit(tmp_path / "run", batches([29], 1e3), checkpoint=seldom, spike=20.0, on_step=stop)
    (event,) = went_back(tmp_path / "run")
    assert event["step"] == 28 and [one.step for one in listing(tmp_path / "run" / "checkpoints")][-1] == 28
    fit(tmp_path / "run", batches([29], 1e3), checkpoint=seldom, spike=20.0)
    first, last = event["skipped_batches"]
    fit(tmp_path / "clean", batches(left_out=range(first, last + 1)))
    assert losses(tmp_path / "run") == losses(tmp_path / "clean")


def test_going_far_back_is_no_spike(tmp_path: Path) -> None:
    # The first losses are far above the late ones.
    fit(tmp_path / "run", batches(range(30, 33), 3e38), checkpoint={"disk": {"every": 0}}, spike=3.0)
    assert [e["step"] for e in went_back(tmp_path / "run")] == [0]


@pytest.mark.parametrize(
    ("stability", "setting"), [({"clip": "median"}, "clip"), ({"on_nonfinite": "recompute"}, "on_nonfinite")]
)
def test_what_is_of_one_gradient_is_refused_of_workers_that_train_apart(stability: Any, setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"stability\.{setting}: .*diloco\.inner_steps"):
        dsjax.Trainer(
            lambda rngs: Net(rngs=rngs), loss, optax.sgd(0.1), mesh={"data": 2}, diloco={"inner_steps": 2},
            stability=stability,
        )  # fmt: skip


def test_a_run_that_is_lost_after_it_went_back_leaves_the_same_batches_out(tmp_path: Path) -> None:
    class Lost(BaseException):
        pass

    def lose(step: int, record: Any) -> None:
        if step == 22 and went_back(tmp_path / "run"):
            raise Lost

    memory = {"memory": {"every": 4, "path": str(tmp_path / "memory")}, "disk": {"every": 0}}
    with pytest.raises(Lost):
        fit(tmp_path / "run", batches(range(22, 25), 3e38), checkpoint=memory, on_step=lose)
    fit(tmp_path / "run", batches(range(22, 25), 3e38), checkpoint=memory)
    (event,) = went_back(tmp_path / "run")
    (resumed,) = [e for e in lines(tmp_path / "run", "events.jsonl") if e["kind"] == "resumed"]
    assert (resumed["step"], resumed["tier"]) == (20, "memory")
    fit(tmp_path / "clean", batches(left_out=range(20, event["skipped_batches"][1] + 1)))
    assert losses(tmp_path / "run") == losses(tmp_path / "clean")

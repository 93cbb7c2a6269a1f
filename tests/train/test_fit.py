"""The loop: metrics, saving, resuming, evaluation, faults."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import dsjax

ROWS = 8


class Net(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs, width: int = 16):
        self.inner = nnx.Linear(8, width, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.outer = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(self.drop(jnp.tanh(self.inner(x))))[:, 0]


def loss(model: Any, batch: Any) -> Any:
    return jnp.sum((model(batch["x"]) - batch["y"]) ** 2), jnp.sum(jnp.ones_like(batch["y"]))


def example(index: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(int(index)).standard_normal(8).astype(np.float32)
    return {"x": x, "y": x[0] - 2 * x[1]}


def loader() -> grain.MapDataset:
    return grain.MapDataset.range(40).shuffle(seed=1).map(example).repeat().batch(ROWS, drop_remainder=True)


def trainer(directory: Path, mesh: Any = None, every: int = 0, width: int = 16, **more: Any) -> dsjax.Trainer:
    return dsjax.Trainer(
        lambda rngs: Net(rngs=rngs, width=width),
        loss,
        lambda rate: optax.adamw(rate, eps=1e-4),
        learning_rate=optax.linear_schedule(1e-2, 1e-3, 10),
        mesh=mesh or {"data": 2, "fsdp": 4},
        run={"dir": str(directory)},
        checkpoint={"disk": {"every": every}},
        observe={"log_every": 1, "progress": "none"},
        **more,
    )


def lines(directory: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def losses(directory: Path) -> list[float]:
    return [line["loss"] for line in lines(directory) if "loss" in line]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed")
    trainer(directory).fit(loader(), steps=9)
    return directory


def test_a_run_leaves_what_the_contract_names(undisturbed: Path) -> None:
    records = lines(undisturbed)
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 10))
    assert {
        "step", "loss", "tokens", "tokens_seen", "grad_norm", "learning_rate", "loss_scale", "step_seconds",
        "tokens_per_second", "tokens_per_second_per_device", "input_wait_seconds", "mfu", "peak_memory_bytes", "time",
    } <= set(records[0])  # fmt: skip
    assert records[0]["learning_rate"] == pytest.approx(1e-2)
    assert records[2]["learning_rate"] == pytest.approx(1e-2 - 2 * 9e-4)
    assert records[-1]["tokens_seen"] == 9 * ROWS
    kinds = [event["kind"] for event in lines(undisturbed, "events.jsonl")]
    assert kinds[0] in ("started", "compiled") and kinds[-1] == "finished"
    assert {"started", "compiled", "checkpoint_saved"} <= set(kinds)
    assert (undisturbed / "config.yaml").exists()
    assert "<svg" in (undisturbed / "report.html").read_text()


def test_a_checkpoint_opens_with_plain_orbax(undisturbed: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore((undisturbed / "checkpoints" / "9" / "state").absolute())
    assert int(tree["step"]) == 9
    assert tree["params"]["inner"]["kernel"].shape == (8, 16)


@pytest.mark.parametrize("mesh", [None, {"data": 8}, {"fsdp": 2, "data": 4}], ids=str)
def test_resuming_goes_on_as_if_nothing_had_happened(mesh: Any, undisturbed: Path, tmp_path: Path) -> None:
    with pytest.raises(dsjax.Preempted) as stopped:
        trainer(tmp_path, every=2).fit(loader(), steps=9, stop_after=5)
    assert stopped.value.code == 75
    trainer(tmp_path, mesh).fit(loader(), steps=9)
    got, want = losses(tmp_path), losses(undisturbed)
    assert len(got) == 9
    if mesh is None:
        assert got == want
    np.testing.assert_allclose(got, want, rtol=1e-6)
    kinds = [event["kind"] for event in lines(tmp_path, "events.jsonl")]
    assert "preempted" in kinds and "resumed" in kinds


def test_going_back_to_a_checkpoint_drops_the_lines_past_it(undisturbed: Path, tmp_path: Path) -> None:
    def crash(step: int, record: Any) -> None:
        if step == 7:
            raise RuntimeError("the power went out")

    with pytest.raises(RuntimeError, match="power"):
        trainer(tmp_path, every=4).fit(loader(), steps=9, on_step=crash)
    assert [r["step"] for r in lines(tmp_path)][-1] == 7
    trainer(tmp_path).fit(loader(), steps=9)
    assert [r["step"] for r in lines(tmp_path)] == list(range(1, 10))
    assert losses(tmp_path) == losses(undisturbed)


def test_a_signal_saves_and_stops(undisturbed: Path, tmp_path: Path) -> None:
    def interrupt(step: int, record: Any) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(dsjax.Preempted, match="SIGTERM"):
        trainer(tmp_path).fit(loader(), steps=9, on_step=interrupt)
    trainer(tmp_path).fit(loader(), steps=9)
    assert losses(tmp_path) == losses(undisturbed)


def test_more_steps_are_free_and_a_finished_run_is_done(tmp_path: Path, capsys: Any) -> None:
    trainer(tmp_path).fit(loader(), steps=3)
    state = trainer(tmp_path).fit(loader(), steps=3)
    assert int(state.step) == 3 and "done already" in capsys.readouterr().out
    assert int(trainer(tmp_path).fit(loader(), steps=5).step) == 5
    assert [r["step"] for r in lines(tmp_path)] == [1, 2, 3, 4, 5]


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    trainer(tmp_path).fit(loader(), steps=1)
    with pytest.raises(dsjax.InputError, match=r"inner/kernel.*\(8, 16\).*\(8, 32\)"):
        trainer(tmp_path, width=32).fit(loader(), steps=2)


def test_other_settings_are_refused_unless_allowed(tmp_path: Path) -> None:
    trainer(tmp_path).fit(loader(), steps=1)
    with pytest.raises(dsjax.ConfigError, match=r"optimizer\.max_grad_norm"):
        trainer(tmp_path, max_grad_norm=1.0).fit(loader(), steps=2)


def test_resume_must_and_never(tmp_path: Path) -> None:
    def of(resume: str) -> dsjax.Trainer:
        return dsjax.Trainer(
            lambda rngs: Net(rngs=rngs), loss, optax.sgd(0.1), run={"dir": str(tmp_path), "resume": resume}
        )

    with pytest.raises(dsjax.InputError, match=r"run\.resume is must"):
        of("must").fit(loader(), steps=1)
    of("never").fit(loader(), steps=1)
    with pytest.raises(dsjax.InputError, match=r"run\.resume is never"):
        of("never").fit(loader(), steps=2)


def test_a_bare_iterator_trains_and_says_that_it_cannot_resume(tmp_path: Path, capsys: Any) -> None:
    batches = (
        jax.tree.map(lambda *rows: np.stack(rows), *[example(i) for i in range(ROWS)]) for _ in range(3)
    )
    dsjax.Trainer(
        lambda rngs: Net(rngs=rngs),
        loss,
        optax.sgd(0.1),
        run={"dir": str(tmp_path)},
        observe={"progress": "plain"},
    ).fit(batches, steps=3)
    assert "cannot" in capsys.readouterr().out
    with pytest.raises(dsjax.InputError, match="ended before step"):
        trainer(tmp_path / "other").fit(iter([]), steps=1)


def poisoned(bad_steps: set[int], how: float) -> Any:
    """Batches of which some make the loss overflow, without NaN in the data."""

    def batch(step: int) -> dict[str, np.ndarray]:
        rows = jax.tree.map(lambda *r: np.stack(r), *[example(step * ROWS + i) for i in range(ROWS)])
        if step + 1 in bad_steps:
            rows["y"] = np.full(ROWS, how, np.float32)
        return rows

    return grain.MapDataset.range(20).map(batch)


def test_a_step_that_is_not_finite_changes_no_parameter(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    state = made.fit(poisoned({1, 3}, 3e38), steps=4)
    skipped = [e for e in lines(tmp_path, "events.jsonl") if e["kind"] == "skipped"]
    assert [e["step"] for e in skipped] == [1, 3]
    assert int(state.step) == 4 and int(state.updates) == 2
    assert lines(tmp_path)[0]["loss"] is None and lines(tmp_path)[1]["loss"] is not None


def test_giving_up_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    made = trainer(tmp_path, every=2, stability={"give_up_after": 3})
    with pytest.raises(dsjax.Diverged, match=r"step 5.*checkpoints/2") as error:
        made.fit(poisoned(set(range(3, 20)), 3e38), steps=12)
    assert error.value.exit_code == 3


def test_nan_in_the_data_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(dsjax.InputError, match="batch of step 2 holds NaN in y"):
        trainer(tmp_path).fit(poisoned({2}, np.nan), steps=4)


def test_weightless_evaluation_is_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    with pytest.raises(dsjax.InputError, match="no example of the set has weight"):
        made.evaluate(made.init(), [])


def test_evaluation_is_the_same_on_one_and_eight_devices(tmp_path: Path) -> None:
    def result(mesh: Any, devices: int) -> dict[str, float]:
        made = dsjax.Trainer(
            lambda rngs: Net(rngs=rngs), loss, optax.sgd(0.1), mesh=mesh, devices=jax.devices()[:devices]
        )
        finite = grain.MapDataset.range(43).map(example).batch(ROWS, drop_remainder=False)
        return made.evaluate(made.init(seed=0), finite)

    one, eight = result({"fsdp": 1}, 1), result({"data": 2, "fsdp": 4}, 8)
    assert one["tokens"] == eight["tokens"] == 43
    assert eight["loss"] == pytest.approx(one["loss"], rel=1e-6)


def test_two_trainers_do_not_share_a_directory(tmp_path: Path) -> None:
    def clash(step: int, record: Any) -> None:
        trainer(tmp_path).fit(loader(), steps=2)

    with pytest.raises(dsjax.InputError, match="another run is using"):
        trainer(tmp_path).fit(loader(), steps=2, on_step=clash)


def test_only_what_is_trainable_moves_and_takes_optimizer_memory(tmp_path: Path) -> None:
    made = trainer(tmp_path, trainable=["outer/*"])
    before = made.init(seed=0)
    frozen = np.asarray(before.model_state["inner"]["kernel"][...])
    assert set(before.params) == {"outer"}
    rows = jax.tree.map(lambda *r: np.stack(r), *[example(i) for i in range(ROWS)])
    state, _ = made.step(before, rows)
    np.testing.assert_array_equal(np.asarray(state.model_state["inner"]["kernel"][...]), frozen)
    with pytest.raises(dsjax.ConfigError, match="no parameter matches"):
        trainer(tmp_path, trainable=["nothing/*"])


def test_initialisation_from_another_run(tmp_path: Path) -> None:
    done = trainer(tmp_path / "first").fit(loader(), steps=2)
    kernel = np.asarray(done.params["inner"]["kernel"][...])
    rows = jax.tree.map(lambda *r: np.stack(r), *[example(i) for i in range(ROWS)])
    other = dsjax.Trainer(
        lambda rngs: Net(rngs=rngs), loss, optax.sgd(0.0),
        run={"dir": str(tmp_path / "second"), "init_from": str(tmp_path / "first")},
        observe={"progress": "none"},
    )  # fmt: skip
    state = other.fit(iter([rows]), steps=1)
    np.testing.assert_array_equal(np.asarray(state.params["inner"]["kernel"][...]), kernel)
    assert int(state.step) == 1


def test_the_stored_config_holds_what_the_script_set_and_nothing_else(undisturbed: Path) -> None:
    text = (undisturbed / "config.yaml").read_text()
    assert "steps: 9" in text and "max_grad_norm" in text
    assert "hidden_size" not in text and "data:" not in text.replace("  data:", "") and "llama" not in text
    assert "\n  learning_rate" not in text


def test_what_a_script_gets_wrong_is_told_before_anything_runs() -> None:
    with pytest.raises(dsjax.ConfigError, match=r"init=lambda rngs: Net\(rngs=rngs\)"):
        dsjax.Trainer(Net, loss, optax.sgd(0.1))
    with pytest.raises(
        dsjax.ConfigError, match="no parameter matches inner/kernal; did you mean inner/kernel"
    ):
        dsjax.Trainer(
            lambda rngs: Net(rngs=rngs), loss, optax.sgd(0.1), param_axes={"inner/kernal": ("embed", "mlp")}
        )
    mean = dsjax.Trainer(
        lambda rngs: Net(rngs=rngs), lambda model, batch: jnp.mean(batch["x"]), optax.sgd(0.1)
    )
    rows = jax.tree.map(lambda *r: np.stack(r), *[example(i) for i in range(ROWS)])
    with pytest.raises(dsjax.ConfigError, match=r"one array of shape \(\).*not a mean"):
        mean.step(mean.init(), rows)


def test_the_metrics_of_a_step_are_scalars(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    rows = jax.tree.map(lambda *r: np.stack(r), *[example(i) for i in range(ROWS)])
    _, metrics = made.step(made.init(), rows)
    assert {name: float(value) for name, value in metrics.items()}.keys() == {
        "loss", "tokens", "grad_norm", "applied", "learning_rate",
    }  # fmt: skip


def test_a_state_that_was_donated_is_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    rows = jax.tree.map(lambda *r: np.stack(r), *[example(i) for i in range(ROWS)])
    old = made.init()
    made.step(old, rows)
    for use in (lambda: made.step(old, rows), lambda: made.save(old), lambda: made.evaluate(old, [rows])):
        with pytest.raises(dsjax.InputError, match="donated to an earlier step"):
            use()


def test_numbers_that_a_device_cannot_hold_are_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    rows = jax.tree.map(lambda *r: np.stack(r), *[example(i) for i in range(ROWS)])
    for value in (np.full(ROWS, 2**40), np.full(ROWS, 1e300)):
        with pytest.raises(
            dsjax.InputError, match=r"y holds (int64|float64) numbers that (int32|float32) cannot"
        ):
            made.step(made.init(), {**rows, "y": value})


def test_a_loss_may_not_take_the_name_of_a_metric(tmp_path: Path) -> None:
    made = dsjax.Trainer(
        lambda rngs: Net(rngs=rngs), lambda m, b: (*loss(m, b), {"grad_norm": (1.0, 1.0)}), optax.sgd(0.1)
    )
    rows = jax.tree.map(lambda *r: np.stack(r), *[example(i) for i in range(ROWS)])
    with pytest.raises(dsjax.ConfigError, match="grad_norm: these names are taken"):
        made.step(made.init(), rows)


def test_an_evaluation_that_was_cut_off_is_made_up_for(tmp_path: Path) -> None:
    held_out = grain.MapDataset.range(8).map(example).batch(ROWS)
    trainer(tmp_path).fit(loader(), steps=3, eval_loader=held_out)
    whole = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert "eval" in json.loads(whole[-1])
    (tmp_path / "metrics.jsonl").write_text("\n".join(whole[:-1]) + "\n")
    trainer(tmp_path).fit(loader(), steps=3, eval_loader=held_out)
    again = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert again[-1]["eval"] == json.loads(whole[-1])["eval"] and len(again) == len(whole)


def test_nothing_is_saved_while_steps_are_skipped(tmp_path: Path) -> None:
    made = trainer(tmp_path, every=1, stability={"give_up_after": 4})
    with pytest.raises(dsjax.Diverged, match="checkpoints/2"):
        made.fit(poisoned(set(range(3, 20)), 3e38), steps=12)
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir()) == [1, 2]


def test_where_every_checkpoint_is_damaged_each_is_named(tmp_path: Path) -> None:
    trainer(tmp_path, every=2).fit(loader(), steps=4)
    (tmp_path / "checkpoints" / "007").mkdir()
    for step in (2, 4):
        folder = tmp_path / "checkpoints" / str(step) / "state" / "d"
        os.truncate(max(folder.iterdir(), key=lambda f: f.stat().st_size), 100)
    with pytest.raises(dsjax.InputError) as refused:
        trainer(tmp_path).fit(loader(), steps=5)
    told = refused.value.faults
    assert len(told) == 2 and "checkpoints/4 is damaged" in told[0] and "checkpoints/2 is damaged" in told[1]


def test_a_trainer_plans_for_another_cluster(tmp_path: Path) -> None:
    made = trainer(tmp_path, mesh={"fsdp": 2}, devices=jax.devices()[:2])
    rows = jax.tree.map(lambda *r: np.stack(r), *[example(i) for i in range(ROWS)])
    there = made.plan("cpu:8", rows, mesh={"data": 2, "fsdp": 4})
    assert there.memory.gradients == 4 * ((8 * 16 + 16 + 16) // 4 + 1)  # the last bias is one number
    assert {axis for traffic in there.traffic for axis in traffic.axes} == {"data", "fsdp"}
    with pytest.raises(dsjax.ConfigError, match="8"):
        made.plan("cpu:8", rows)

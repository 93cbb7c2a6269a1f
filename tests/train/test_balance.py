"""Stages that are timed and layers that move while a run goes on."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dsjax
from dsjax.pipelining.partition import balanced, even
from dsjax.train.balance import Balancer, _Timing
from dsjax.train.stacking import Found
from dsjax.train.stage_costs import Costs

WIDTH, LAYERS, SLEEP = 8, 6, 0.004


@jax.custom_vjp
def slow_on_stage_1(x):
    return x


def _slept(x, times):
    """x, later: a layer on stage 1 takes five times as long as elsewhere."""

    def sleep(stage, x):
        time.sleep(SLEEP * times * (5 if stage == 1 else 1))
        return np.asarray(x)

    return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.axis_index("pipeline"), x)


slow_on_stage_1.defvjp(lambda x: (_slept(x, 1), None), lambda _, g: (_slept(g, 2),))


class Layer(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.first = nnx.Linear(4, WIDTH, rngs=rngs)
        self.layers = dsjax.stacked(lambda rngs: Layer(rngs=rngs), LAYERS, rngs)
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs)


def _squares(model, x, batch):
    errors = (model.last(x)[:, 0] - batch["y"]) ** 2
    return errors.sum(), jnp.float32(errors.shape[0])


def _stages(slow: bool) -> dsjax.Stages:
    return dsjax.Stages(
        embed=lambda model, batch: model.first(batch["x"]),
        layer=lambda layer, x, batch: slow_on_stage_1(layer(x)) if slow else layer(x),
        head=_squares,
    )


def _batches():
    rng = np.random.default_rng(0)
    while True:
        x = rng.normal(size=(8, 4)).astype(np.float32)
        yield {"x": x, "y": x.sum(1)}


def _run(directory, steps, slow=True, **pipeline):
    trainer = dsjax.Trainer(
        init=lambda rngs: Net(rngs=rngs),
        stages=_stages(slow),
        optimizer=optax.adam,
        learning_rate=1e-2,
        mesh={"pipeline": 2},
        devices=jax.devices()[:2],
        pipeline=pipeline,
        run={"dir": str(directory)},
        observe={"log_every": 1, "progress": "none"},
    )
    state = trainer.fit(_batches(), steps=steps)
    told = {kind: [] for kind in ("rebalanced", "slow_stage")}
    for line in (directory / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        told.setdefault(event["kind"], []).append(event)
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return trainer, state, metrics, told


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("balance")
    moved = _run(directory / "moved", 18, microbatches=4, rebalance_every=4)
    still = _run(directory / "still", 18, slow=False, microbatches=4, rebalance_every=0)
    return moved, still, directory


def test_a_slow_stage_is_named_and_relieved(runs):
    (trainer, _, metrics, told), _, _ = runs
    assert {event["stage"] for event in told["slow_stage"]} == {1}
    assert any("stage_1_seconds" in line for line in metrics)
    first = told["rebalanced"][0]
    assert first["step"] <= 8 and first["before"]["layers a stage"] == "3+3"
    counts = trainer.program.stacking.partition.counts
    assert counts[0] > counts[1] and sum(counts) == LAYERS
    before = np.median([line["step_seconds"] for line in metrics[1:6]])
    assert np.median([line["step_seconds"] for line in metrics[-4:]]) < 0.85 * before


def test_the_losses_are_those_of_a_run_that_never_moved(runs):
    (moved, state, metrics, _), (still, other, unmoved, told), _ = runs
    assert not told["rebalanced"] and not any("stage_0_seconds" in line for line in unmoved)
    np.testing.assert_allclose(
        [line["loss"] for line in metrics], [line["loss"] for line in unmoved], rtol=1e-6
    )
    a, b = (jax.tree.leaves(nnx.state(t.model(s), nnx.Param)) for t, s in ((moved, state), (still, other)))
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


def test_a_moved_run_goes_on_with_the_stages_that_it_found(runs):
    (moved, *_), _, directory = runs
    trainer, _, metrics, told = _run(directory / "moved", 20, slow=False, microbatches=4, rebalance_every=0)
    assert told["resumed"][0]["step"] == 18 and metrics[-1]["step"] == 20
    assert trainer.program.stacking.partition == moved.program.stacking.partition


def test_layers_set_by_hand_stay(tmp_path):
    trainer, _, _, told = _run(tmp_path / "hand", 12, microbatches=2, rebalance_every=3, layers=[3, 3])
    assert told["slow_stage"] and not told["rebalanced"]
    assert trainer.program.stacking.partition.counts == (3, 3)


def test_nothing_is_timed_that_could_not_pay_any_more(tmp_path):
    _, _, metrics, told = _run(tmp_path / "short", 5, slow=False, microbatches=2, rebalance_every=3)
    assert "probe" not in str(told["compiled"])
    assert not any("stage_0_seconds" in line for line in metrics)


def test_more_microbatches_where_they_pay():
    """The decision alone: a stage's times at half the rows are half, so a longer pipeline has a smaller bubble."""
    trainer = dsjax.Trainer(
        init=lambda rngs: Net(rngs=rngs), stages=_stages(False), optimizer=optax.sgd, learning_rate=0.1,
        mesh={"pipeline": 2}, devices=jax.devices()[:2],
    )  # fmt: skip
    lines = []
    recorder = SimpleNamespace(
        progress=SimpleNamespace(busy=lambda what: _nothing(lines, what)), start_clock=lambda: 0
    )
    program = trainer.program
    balancer = Balancer(program, recorder, lambda program: None, last=1000)
    batch = program.place({"x": np.zeros((64, 4), np.float32), "y": np.zeros(64, np.float32)})
    # From 8 microbatches the first other number is 4, the second 16.
    fewer = balancer._next_trial(program, batch)
    balancer._trial = more = balancer._next_trial(program, batch)
    assert (fewer.microbatches, program.microbatches, more.microbatches) == (4, 8, 16)
    assert balancer._next_trial(program, batch) is None
    assert (
        balancer._resized(program, batch, np.ones(2), np.full(2, 0.51)) is None
    )  # as good as twice the time
    wanted, gain = balancer._resized(program, batch, np.ones(2), np.full(2, 0.45))
    assert wanted is more and gain == pytest.approx(1 - 17 * 0.45 / 9, abs=0.02)


def test_other_microbatches_are_timed_once_and_that_is_remembered():
    trainer = dsjax.Trainer(
        init=lambda rngs: Net(rngs=rngs), stages=_stages(False), optimizer=optax.sgd, learning_rate=0.1,
        mesh={"pipeline": 2}, devices=jax.devices()[:2],
    )  # fmt: skip
    progress = SimpleNamespace(busy=lambda what: _nothing([], what), message=lambda line: None)
    recorder = SimpleNamespace(progress=progress, start_clock=lambda: 0, event=lambda *a, **more: None)
    program = trainer.program
    balancer = Balancer(program, recorder, lambda program: None, last=1000)
    batch = program.place({"x": np.zeros((64, 4), np.float32), "y": np.zeros(64, np.float32)})
    balancer._trial = balancer._next_trial(program, batch)
    balancer._probes = {4: SimpleNamespace(get=lambda: None)}
    # Twice the rows take three times as long.
    slow = SimpleNamespace(seconds=lambda probe: {d.id: 1.0 + 2 * probe for d in jax.devices()})
    kept, _ = balancer._decide(5, program, None, batch, slow)
    assert kept is program and program.found == Found(tried=(4,))
    assert program.going_on(json.loads(json.dumps(program.facts()))).found == Found(tried=(4,))
    again = Balancer(program, recorder, lambda program: None, last=1000)
    assert again._next_trial(program, batch).microbatches == 16
    assert again._next_trial(program, batch) is None


def test_a_run_goes_on_with_all_that_it_found_and_says_so(tmp_path, capsys):
    def trainer():
        return dsjax.Trainer(
            init=lambda rngs: Net(rngs=rngs), stages=_stages(False), optimizer=optax.sgd, learning_rate=0.1,
            mesh={"pipeline": 2}, devices=jax.devices()[:2], run={"dir": str(tmp_path)},
            observe={"progress": "none"},
        )  # fmt: skip

    first = trainer()
    first.go_on_with(replace(first.program, found=Found((2, 4), 4, (4,))))
    first.fit(_batches(), steps=2)
    second = trainer()
    assert any("stages of 3+3 layers, 8 microbatches" in note for note in second.notes)
    second.fit(_batches(), steps=4)
    assert second.program.found == Found((2, 4), 4, (4,))
    told = [note for note in second.notes if note.startswith("pipeline:")]
    assert len(told) == 1 and "stages of 2+4 layers, 4 microbatches" in told[0]
    second.fit(_batches(), steps=6)
    assert [note for note in second.notes if note.startswith("pipeline:")] == told


def test_microbatches_that_were_asked_for_stay(runs):
    (trainer, _, _, told), _, _ = runs
    assert trainer.program.microbatches == 4
    assert all(event["after"]["microbatches"] == 4 for event in told["rebalanced"])


class _nothing:
    def __init__(self, lines, what):
        lines.append(what)

    def __enter__(self):
        return None

    def __exit__(self, *error):
        return None


def test_times_are_those_between_one_probe_and_the_next():
    timing = _Timing(due=3)
    # Two devices; when each was done with the mark, three runs of one probe and three of another.
    ends = [(0.0, 0.5), (2.0, 1.5), (3.0, 3.5), (6.0, 4.5), (11.0, 9.5), (15.0, 13.5), (21.0, 19.5)]
    timing._done = [dict(enumerate(end)) for end in ends]
    assert timing.seconds(0) == {0: 1.0, 1: 1.0} and timing.seconds(1) == {0: 4.0, 1: 4.0}
    timing.watch(jnp.zeros(2))
    timing._threads[-1].join()
    assert timing._done[-1].keys() == {jnp.zeros(2).devices().pop().id}


def test_layers_are_shared_out_by_what_the_head_costs():
    costs = Costs(layer=1.0, first=0.0, last=3.0)
    kept = costs.partition(16, 4, 1, recompute=False, pace=[1.0] * 4)
    assert kept.counts == (4, 5, 5, 2)
    # With recomputation the last stage's forward is left out, so it takes more layers.
    assert costs.partition(16, 4, 1, recompute=True, pace=[1.0] * 4).counts[-1] >= kept.counts[-1]
    # Not measured yet, a stage of few layers is not made longer: all stages would get its slots.
    assert costs.partition(16, 4, 1, recompute=False).counts == (4, 4, 4, 4)
    assert costs.partition(17, 4, 1, recompute=False).counts == (5, 5, 5, 2)
    longer = costs.partition(40, 4, 1, recompute=False).counts
    assert max(longer) == 11 and min(longer) == longer[-1] == 8
    assert balanced([1.0] * 8, 4).counts == even(8, 4).counts == (2, 2, 2, 2)
    table = costs.of_stages(kept, recompute=False)
    assert table == [[12.0, 15.0, 15.0, 15.0]]

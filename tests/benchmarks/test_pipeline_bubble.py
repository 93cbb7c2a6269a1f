"""The benchmark of pipelines: what it runs, that its sleeps are the pipeline's work, what it makes of times."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def pipeline(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("pipeline", "start")
    before = {name: sys.modules.pop(name, None) for name in names}
    yield importlib.import_module("pipeline")
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update({name: module for name, module in before.items() if module})


def test_all_schedules_are_run_from_few_microbatches_to_many(pipeline):
    listed = list(pipeline.cases(quick=False))
    assert len(set(listed)) == len(listed)
    for stages in (2, 4, 8):
        for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble"):
            counts = [c.microbatches for c in listed if (c.schedule, c.stages) == (schedule, stages)]
            assert {stages, 13, 4 * stages, 64} <= set(counts)
    assert pipeline.Case("interleaved", 8, 13, 4) in listed
    assert set(pipeline.cases(quick=True)) <= set(listed)


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)])
def test_a_layer_that_sleeps_is_differentiated_as_any_other(pipeline, schedule, virtual):
    run = pipeline.Run(pipeline.Case(schedule, 2, 3, virtual), pace=0.0)
    run()
    (sums, of_rest), of_layers = run.step(*run.arguments)
    product = 1.01 ** (2 * virtual)  # of all layers; the microbatches weigh 1, 2 and 3
    np.testing.assert_allclose(sums[0], 4 * 6 * product, rtol=1e-6)
    np.testing.assert_allclose(of_rest, np.full(4, 2 * 6 * product), rtol=1e-6)
    np.testing.assert_allclose(of_layers, np.full((2 * virtual, 4), 6 * product / 1.01), rtol=1e-6)


def test_idle_time_is_never_less_than_the_schedule_has(pipeline):
    chosen = [pipeline.Case("1f1b", 2, 4), pipeline.Case("zero_bubble", 2, 4)]
    found = pipeline.measure(chosen, rounds=1, pace=0.2)
    for one, formula in zip(found, (0.2, 1 / 13), strict=True):
        assert one["bubble_formula"] == pytest.approx(formula)
        assert formula - 0.02 < one["bubble_measured"] < 1
        assert one["seconds"] >= one["ideal_seconds"] * 0.98
        assert one["over_ideal"] == pytest.approx(one["seconds"] / one["ideal_seconds"])
    assert "1f1b" in found[0]["schedule"] and pipeline.table(found).row_count == 2


def test_work_that_the_compiler_drops_is_noticed(pipeline, monkeypatch):
    monkeypatch.setattr(pipeline.Sleeps, "after", lambda self, kind, seconds, x: jnp.zeros(()))
    with pytest.raises(RuntimeError, match=r"slept \{\} times, not \{'forward': 6, 'backward': 6\}"):
        pipeline.Run(pipeline.Case("1f1b", 2, 3), pace=0.0)


def test_shares_are_medians_of_the_passes(pipeline):
    case = pipeline.Case("1f1b", 8, 13)
    found = pipeline.figures(case, [(4.0, 2.0), (4.0, 2.4), (10.0, 1.0)])
    assert found["bubble_measured"] == pytest.approx(0.5)
    assert found["over_ideal"] == pytest.approx(0.65 / 0.5)
    said = list(pipeline.remarks([found]))
    assert "1f1b 50.0% (35.0%)" in said[0] and "+30.0%" in said[-1]


def test_two_processes_take_turns_with_one(pipeline, monkeypatch):
    monkeypatch.setattr(pipeline.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    speeds = iter([180.0, 100.0, 190.0, 100.0, 90.0, 60.0])
    monkeypatch.setattr(pipeline, "tokens_per_second", lambda *_, **__: next(speeds))
    found = pipeline.processes(rounds=3)
    assert (found["tokens_per_second"], found["one_process_tokens_per_second"]) == (180.0, 100.0)
    assert found["speedup"] == pytest.approx(1.8) and found["ideal"] == pytest.approx(32 / 17)
    assert "1.80x (ideal 1.88x)" in pipeline.told(found)


def test_processes_that_cannot_run_say_why(pipeline, monkeypatch):
    monkeypatch.setattr(pipeline.os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert "two cores" in pipeline.processes(rounds=1)["skipped"]
    monkeypatch.setattr(pipeline.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(pipeline, "LLAMA", {**pipeline.LLAMA, "mesh": {"fsdp": 3}})
    skipped = pipeline.processes(rounds=1)["skipped"]
    assert "failed" in skipped and skipped in pipeline.told({"skipped": skipped})
    json.dumps(skipped)


@pytest.mark.slow
def test_two_processes_train(pipeline, monkeypatch):
    model = {**pipeline.LLAMA["model"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    monkeypatch.setattr(pipeline, "LLAMA", {**pipeline.LLAMA, "model": model})
    found = pipeline.processes(rounds=1)
    assert found.get("speedup", 0) > 0, found

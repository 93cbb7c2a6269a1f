"""The search over layouts, against all of them."""

from __future__ import annotations

import itertools

import pytest
from plan_runs import small

from dsjax import aot
from dsjax.config import dump, load
from dsjax.errors import ConfigError, OutOfDeviceMemory
from dsjax.plan import analytic
from dsjax.plan.search import layouts, search
from dsjax.plan.settings import with_settings


@pytest.fixture
def by_formulas(monkeypatch):
    monkeypatch.setattr(aot, "missing_for", lambda kind: "nothing is compiled in this test")


def test_every_layout_is_possible_once():
    target = aot.parse_target("2x4xH100")
    config = small(global_batch_size=16, sequence_length=128)
    found = [tuple(settings.values()) for settings in layouts(config, target)]
    assert len(found) == len(set(found))
    for data, fsdp, context, tensor, micro, _ in found:
        assert data * fsdp * context * tensor == 8 and tensor <= 4 and 16 % (data * fsdp * micro) == 0
    assert (1, 8, 1, 1, 2, "full") in found and (2, 1, 1, 4, 8, "none") in found


def test_the_winner_is_the_best_of_all_by_brute_force(by_formulas):
    config = small(global_batch_size=8, sequence_length=512)
    target = aot.parse_target("2x2xL40S")
    found = search(config, target)
    best = None
    sizes, micros = (1, 2, 4), (1, 2, 4, 8)
    for data, fsdp, context, tensor, micro, remat in itertools.product(
        sizes, sizes, sizes, (1, 2), micros, ("none", "dots", "full")
    ):
        if data * fsdp * context * tensor != 4 or 8 % (data * fsdp * micro):
            continue
        settings = {
            "mesh.data": data, "mesh.fsdp": fsdp, "mesh.context": context, "mesh.tensor": tensor,
            "train.gradient_accumulation_steps": micro, "train.remat": remat,
        }  # fmt: skip
        laid = analytic.lay_out(with_settings(config, settings), target, None)
        if analytic.memory(laid).fits:
            time = analytic.forecast(laid).step_seconds
            best = time if best is None else min(best, time)
    assert found.best.forecast.step_seconds == pytest.approx(best, rel=1e-12)


def test_the_best_few_are_compiled_ranked_and_explained(tmp_path):
    told = []
    config = small(global_batch_size=8, sequence_length=64)
    found = search(config, aot.parse_target("cpu:2"), compiles=2, progress=told.append)
    assert len(told) == len(found.ranked) == len(found.why) == 2
    first, second = (candidate.plan for candidate in found.ranked)
    assert first.compiled and second.compiled
    assert first.forecast.step_seconds <= second.forecast.step_seconds
    assert "slower" in found.why[1] and found.ranked[1].words in found.why[1]
    (tmp_path / "best.yaml").write_text(dump(found.config))
    again = load([tmp_path / "best.yaml"], environ={})
    assert (
        again == found.config
        and again.mesh.fsdp * again.mesh.data * again.mesh.context * again.mesh.tensor == 2
    )


def test_what_cannot_be_is_one_line(by_formulas, tmp_path):
    with pytest.raises(ConfigError, match=r"no layout divides train.global_batch_size 7") as refused:
        search(small(global_batch_size=7, sequence_length=127), aot.parse_target("5xH100"))
    assert len(refused.value.faults) == 1
    chips = tmp_path / "chips.yaml"
    chips.write_text("tiny:\n  extends: cpu\n  memory: {bytes: 1000}\n")
    target = aot.parse_target("tiny:2", aot.load_chips(chips))
    with pytest.raises(OutOfDeviceMemory, match="no layout fits: the smallest takes about"):
        search(small(), target)

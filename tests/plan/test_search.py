"""The search over layouts, against all of them."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
from plan_runs import MODEL, small

from dsjax import aot
from dsjax.config import dump, from_dict, load
from dsjax.errors import ConfigError, OutOfDeviceMemory
from dsjax.plan import analytic, estimate, plan
from dsjax.plan.layouts import layouts, pipelines
from dsjax.plan.result import Forecast, MemoryUse
from dsjax.plan.search import Candidate, _explored, search
from dsjax.plan.settings import with_settings

# Large enough that time is arithmetic, memory and links, small enough to compile many layouts of it.
WIDE = MODEL | {
    "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8,
    "vocab_size": 16384,
}  # fmt: skip


@pytest.fixture
def by_formulas(monkeypatch):
    monkeypatch.setattr(aot, "missing_for", lambda kind: "nothing is compiled in this test")


def test_every_layout_is_possible_once():
    target = aot.parse_target("2x4xH100")
    config = small(global_batch_size=16, sequence_length=128)
    found = [tuple(settings.values()) for settings in layouts(config, target, 0)]
    assert len(found) == len(set(map(str, found)))
    for data, fsdp, context, tensor, micro, _ in found:
        parts = math.prod(tensor) if isinstance(tensor, list) else tensor
        assert data * fsdp * context * parts == 8 and parts <= 4 and 16 % (data * fsdp * micro) == 0
    assert (1, 8, 1, 1, 2, "full") in found and (2, 1, 1, 4, 8, "none") in found
    assert (1, 2, 1, [2, 2], 1, "dots") in found


def test_experts_are_shared_out_in_every_way_that_divides():
    target = aot.parse_target("2x4xH100")
    config = small(global_batch_size=16, sequence_length=128)
    found = [tuple(settings.values()) for settings in layouts(config, target, 12)]
    assert len(found) == len(set(map(str, found)))
    for data, fsdp, expert, context, tensor, micro, _ in found:
        parts = math.prod(tensor) if isinstance(tensor, list) else tensor
        assert data * fsdp * expert * context * parts == 8 and 12 % expert == 0
        assert 16 % (data * fsdp * expert * micro) == 0
    assert {settings[2] for settings in found} == {1, 2, 4}
    staged = list(pipelines(config, target, 4, 12))
    assert {settings["mesh.expert"] for settings in staged} == {1, 2, 4}
    axes = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
    assert all(math.prod(settings[f"mesh.{axis}"] for axis in axes) == 8 for settings in staged)


def test_the_best_layout_of_a_mixture_is_found_and_written(by_formulas, tmp_path):
    mixture = {**WIDE, "kind": "mixtral", "num_local_experts": 8}
    train = {"steps": 10, "global_batch_size": 16, "sequence_length": 512}
    config, target = from_dict({"model": mixture, "train": train}), aot.parse_target("2x4xH100")
    found = search(config, target)
    possible = [
        analytic.lay_out(with_settings(config, settings), target, None)
        for settings in layouts(config, target, 8)
    ]
    fastest = min(estimate.forecast(laid).step_seconds for laid in possible if analytic.memory(laid).fits)
    assert found.best.forecast.step_seconds <= fastest
    assert found.config.mesh.expert == found.best.mesh.get("expert", 1)
    assert "mesh.expert=" in found.ranked[0].words


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
            time = estimate.forecast(laid).step_seconds
            best = time if best is None else min(best, time)
    assert found.best.forecast.step_seconds == pytest.approx(best, rel=1e-12)


@pytest.fixture(scope="module")
def all_compiled(gpu_compiler):
    """Every layout of a small run on four H100s, compiled: settings, predicted seconds, bytes."""
    train = {"steps": 10, "global_batch_size": 4, "sequence_length": 1024}
    config, target = from_dict({"model": WIDE, "train": train}), aot.parse_target("4xH100")
    found = []
    for settings in layouts(config, target, 0):
        if settings["train.remat"] != "dots":
            try:
                one = plan(with_settings(config, settings), target, suggest=False)
            except ConfigError:
                continue  # the model does not divide so
            found.append((settings, one.forecast.step_seconds, one.memory.total))
    return config, found


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_the_winner_is_the_best_of_all_that_were_compiled(all_compiled, monkeypatch, tmp_path, share):
    """Brute force with the real compiler, for memories from one that fits the smallest only to one that fits all."""
    config, every = all_compiled
    monkeypatch.setattr("dsjax.plan.layouts.REMATS", ("none", "full"))
    least, most = (pick(total for *_, total in every) for pick in (min, max))
    room = int((least + share * (most - least)) * 1.001 / 0.75)
    (tmp_path / "chips.yaml").write_text(f"small:\n  extends: H100\n  memory: {{bytes: {room}}}\n")
    target = aot.parse_target("4xsmall", aot.load_chips(tmp_path / "chips.yaml"))
    best = min(seconds for _, seconds, total in every if total <= 0.75 * room)
    found = search(config, target)
    assert found.best.fits
    assert found.best.forecast.step_seconds <= 1.01 * best


def candidate(seconds: float, total: int, remat: str, fsdp: int) -> Candidate:
    """A layout by formulas, of a limit of 100 bytes."""
    memory = MemoryUse(0, 0, 0, 0, 0, 0, 0, total=total, capacity=100, limit=100)
    settings = {"mesh.fsdp": fsdp, "train.remat": remat}
    return Candidate(settings, SimpleNamespace(forecast=Forecast(seconds, seconds, 0.0), memory=memory,
        mesh={"fsdp": fsdp}, fits=total <= 100, pipeline=None))  # fmt: skip


def test_what_was_compiled_corrects_the_formulas_of_its_kind():
    # By formulas `none` is fastest, but it takes twice the time and the memory that they say.
    truth = {"none": (2.0, 2.0), "dots": (1.0, 1.0), "full": (1.0, 0.5)}
    every = [candidate(1.0 + n / 100, 60, "none", n) for n in range(2, 9)]
    every += [candidate(1.5 + n / 100, 80, "dots", n) for n in range(2, 5)]
    every += [candidate(1.9, 40, "full", 2)]

    def compiled(one: Candidate) -> Candidate:
        slower, larger = truth[one.settings["train.remat"]]
        plan, fsdp = one.plan, one.settings["mesh.fsdp"]
        return candidate(
            plan.forecast.step_seconds * slower,
            int(plan.memory.total * larger),
            one.settings["train.remat"],
            fsdp,
        )

    tried = _explored(every, every[-1], 2, compiled)
    assert tried[0].settings["train.remat"] == "full"  # the config's own comes first
    assert [c.settings["train.remat"] for c in tried].count("none") == 1  # one is enough to know of all
    fastest = min((c for c in tried if c.plan.fits), key=lambda c: c.plan.forecast.step_seconds)
    assert fastest.settings == {"mesh.fsdp": 2, "train.remat": "dots"}


def test_the_best_few_are_compiled_ranked_and_explained(tmp_path):
    told = []
    config = small(global_batch_size=8, sequence_length=64)
    found = search(config, aot.parse_target("cpu:2"), compiles=2, progress=told.append)
    assert 2 <= len(told) == len(found.ranked) == len(found.why) <= 6
    first, second = (candidate.plan for candidate in found.ranked[:2])
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
    with pytest.raises(OutOfDeviceMemory, match="no layout fits: the smallest, by formulas, takes"):
        search(small(), target)


def test_a_run_with_adapters_finds_a_layout_that_it_could_not_have_without(by_formulas):
    """Of frozen matrices there are neither gradients nor moments, so fewer shards do."""
    model = {
        **WIDE,
        "num_hidden_layers": 48,
        "hidden_size": 4096,
        "intermediate_size": 11264,
        "head_dim": 256,
    }
    train = {"steps": 10, "global_batch_size": 8, "sequence_length": 512}
    fields = {"model": model, "train": train, "precision": {"params": "bfloat16"}}
    target = aot.parse_target("2xH100")
    with pytest.raises((ConfigError, OutOfDeviceMemory), match="no layout fits"):
        search(from_dict(fields), target)
    found = search(from_dict({**fields, "lora": {"rank": 8}}), target)
    assert found.best.fits and found.best.memory.optimizer < 0.05 * found.best.memory.parameters

"""What was measured on a kind of device: kept in a file, and corrects what plans say."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from plan_runs import small

from dsjax.aot import Work, parse_target
from dsjax.errors import InputError
from dsjax.mesh import make_mesh
from dsjax.plan import cost, measured, report
from dsjax.plan.cost import Reached, link_seconds, work_seconds
from dsjax.plan.measured import Measured, Shares, correction, load, path_of, record_shares, record_step, save
from dsjax.plan.replan import replan
from dsjax.plan.result import Forecast

H100 = "NVIDIA H100 80GB HBM3"
TARGET = parse_target("2x8xH100")
SHARES = Shares(
    products={"bf16": 0.5}, memory=0.25, node=0.5, network=0.1, how="by hand", count=3, date="2026-01-02", jax="0.10.2"
)  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv(measured.DIRECTORY, str(tmp_path))
    return tmp_path


def test_what_is_saved_is_what_is_loaded(elsewhere):
    assert load(H100) is None and correction(TARGET) == measured.Correction()
    record_shares(H100, SHARES)
    assert load(H100) == Measured(device_kind=H100, shares=SHARES)
    assert [file.name for file in elsewhere.iterdir()] == ["nvidia-h100-80gb-hbm3.json"]
    told = json.loads(path_of(H100).read_text())
    assert told["version"] == 1 and told["shares"]["products"] == {"bf16": 0.5}
    assert load(H100, elsewhere / "other") is None
    save(Measured(device_kind="cpu", shares=SHARES), elsewhere / "other")
    assert load("cpu") is None and load("cpu", elsewhere / "other") is not None


def test_measured_shares_take_the_place_of_the_assumed_ones():
    record_shares(H100, SHARES)
    found = correction(TARGET)
    assert found.reached == Reached(0.75, 0.25, 0.5, 0.1, {"bf16": 0.5}, 1.0)
    told = "bf16 50%, device memory 25%, links inside nodes 50%, links between nodes 10% (2026-01-02, jax 0.10.2)"
    assert told in found.notes[0]
    second = 989.5e12
    assert work_seconds(Work({"bf16": second}, 0), TARGET, found.reached) == pytest.approx(2.0)
    # A type that was not measured keeps the model's share.
    assert work_seconds(Work({"f8e4m3fn": 2 * second}, 0), TARGET, found.reached) == pytest.approx(4 / 3)
    assert work_seconds(Work({}, 3352e9), TARGET, found.reached) == pytest.approx(4.0)
    inside = link_seconds(TARGET, "all-gather", 450e9, 8, 8, found.reached)
    between = link_seconds(TARGET, "all-to-all", 50e9, 16, 8, found.reached)
    assert (inside, between) == (pytest.approx(2.0, rel=1e-4), pytest.approx(10.0, rel=1e-4))


def test_a_share_that_was_not_measured_is_assumed():
    record_shares(H100, SHARES.model_copy(update={"memory": None, "network": None}))
    reached = correction(TARGET).reached
    assert (reached.memory, reached.links, reached.network) == (Reached().memory, 0.5, Reached().network)
    assert (reached.link(False), reached.link(True)) == (0.5, Reached().network)


def test_only_plans_for_that_chip_are_corrected():
    record_shares(H100, SHARES)
    for other in ("8xH200", "8xA100-80", "cpu:8", "v5p:2x2x2"):
        assert correction(parse_target(other)) == measured.Correction()
    assert measured.device_kind(parse_target("v5e:2x2").chip) == "TPU v5 lite"


def test_steps_are_a_geometric_mean_whatever_the_plan_knew():
    forecast = Forecast(step_seconds=1.0, compute_seconds=0.9, exposed_seconds=0.1)
    assert record_step(H100, forecast, 2.0).steps.ratio == pytest.approx(2.0)
    # A plan made with that ratio says 2 s where the model alone says 1 s.
    later = Forecast(step_seconds=2.0, compute_seconds=1.8, exposed_seconds=0.2, ratio=2.0)
    found = record_step(H100, later, 0.5)
    assert found.steps.ratio == pytest.approx(math.sqrt(2.0 * 0.5)) and found.steps.count == 2
    assert record_step(H100, forecast, 8.0).steps.ratio == pytest.approx(2.0)
    assert "steps 2.00 times as long as the model's (3 measured" in correction(TARGET).notes[0]
    # What steps took against older shares says nothing of the new ones.
    assert record_shares(H100, SHARES).steps is None
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="more than 0 seconds"):
            record_step(H100, forecast, wrong)


def test_a_plan_is_corrected_and_says_so_once():
    def planned():
        return report(jax.jit(lambda x: x @ x.T), (x,), target, tokens_per_step=64)

    target = parse_target("cpu:2")
    sharding = NamedSharding(make_mesh({"fsdp": 2}, target.devices()), PartitionSpec(None, "fsdp"))
    x = jax.ShapeDtypeStruct((64, 64), "float32", sharding=sharding)
    plain = planned()
    assert plain.forecast.ratio == 1.0 and not any("measur" in note for note in plain.notes)
    record_step("cpu", plain.forecast, 3 * plain.forecast.step_seconds)
    longer = planned()
    for part in ("step_seconds", "compute_seconds", "exposed_seconds"):
        assert getattr(longer.forecast, part) == pytest.approx(3 * getattr(plain.forecast, part))
    assert longer.forecast.tokens_per_second == pytest.approx(plain.forecast.tokens_per_second / 3)
    assert (longer.roofline, longer.memory) == (plain.roofline, plain.memory)
    assert (
        len([note for note in longer.notes if note.startswith("times corrected by measurements of cpu")]) == 1
    )
    # Recording what was predicted changes nothing, though the plan knew of the first step.
    assert record_step("cpu", longer.forecast, longer.forecast.step_seconds).steps.ratio == pytest.approx(3.0)
    half = {"products": {"fp32": 0.75 / 2}, "memory": 0.85 / 2, "node": 0.85 / 2}
    record_shares("cpu", SHARES.model_copy(update=half))
    halved = planned()
    assert halved.forecast.compute_seconds == pytest.approx(2 * plain.forecast.compute_seconds)
    assert halved.forecast.ratio == 1.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Invalid JSON"),
        ('{"version": 1, "device_ki', "Invalid JSON"),
        ("[]", "object"),
        ('{"version": 2, "device_kind": "cpu"}', "version"),
        ('{"version": 1, "device_kind": "cpu", "steps": {"ratio": 0, "count": 1, "date": "", "jax": ""}}',
         "steps.ratio"),
        ('{"version": 1, "device_kind": "cpu", "shares": {"products": {"bf17": 0.5}, "how": "", "count": 1, '
         '"date": "", "jax": ""}}', "bf17"),
        ('{"version": 1, "device_kind": "TPU v5"}', "is of TPU v5, not of cpu"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_left_out_and_said(text, says):
    path_of("cpu").write_text(text)
    found = correction(parse_target("cpu:2"))
    assert found.reached == Reached()
    assert len(found.notes) == 1 and says in found.notes[0] and str(path_of("cpu")) in found.notes[0]
    assert "\n" not in found.notes[0]
    with pytest.raises(InputError):
        record_step("cpu", Forecast(1.0, 1.0, 0.0), 1.0)
    assert path_of("cpu").read_text() == text


def test_a_place_that_cannot_be_written_is_said(elsewhere):
    (elsewhere / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        record_shares(H100, SHARES, elsewhere / "file")
    assert correction(TARGET, elsewhere / "file").reached == Reached()


def test_a_forecast_knows_the_ratio_it_was_made_with():
    assert cost.corrected(2.0, 1.5, Reached(step=3.0)) == Forecast(6.0, 4.5, 1.5, ratio=3.0)
    assert dataclasses.asdict(cost.corrected(2.0, 1.5, Reached()))["ratio"] == 1.0


def test_a_new_plan_at_a_step_boundary_is_ranked_by_what_was_measured(monkeypatch, elsewhere):
    monkeypatch.setattr("dsjax.plan.search._varied", lambda fitting, number: fitting[:1])
    config = small(global_batch_size=2, sequence_length=32)
    slow = Measured(device_kind="cpu", shares=SHARES.model_copy(update={"products": {"fp32": 1e-9}}))
    found = replan(config, "cpu:2", slow)
    assert any(note == slow.note() for note in found.best.notes)
    assert found.best.forecast.step_seconds > 1e4
    assert found.config.train.global_batch_size == 2 and not list(elsewhere.iterdir())

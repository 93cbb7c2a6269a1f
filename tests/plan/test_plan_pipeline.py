"""Plans of pipelined runs: what is counted, what is simulated, what is drawn."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from plan_runs import MODEL

from dsjax import aot
from dsjax.cli import main
from dsjax.config import from_dict
from dsjax.errors import ConfigError
from dsjax.pipelining.schedule import make_schedule
from dsjax.pipelining.simulate import simulate
from dsjax.plan import analytic, plan
from dsjax.plan.compiled import compile_step, describe
from dsjax.plan.cost import Reached
from dsjax.plan.layouts import layouts, pipelines
from dsjax.plan.planner import summary
from dsjax.plan.search import search
from dsjax.plan.stages import PipelinedStep
from dsjax.plan.timetable import timetable

LAYERS, SEQUENCE, ROWS = 5, 64, 48


def run(mesh=None, pipeline=None, **train):
    """A run of five small layers; two passes of six microbatches over stages of two and three."""
    settings = {"steps": 10, "global_batch_size": ROWS, "sequence_length": SEQUENCE, "remat": "none", **train}
    return from_dict(
        {
            "model": MODEL | {"num_hidden_layers": LAYERS},
            "mesh": mesh or {"pipeline": 2, "data": 2},
            "pipeline": pipeline or {"microbatches": 6, "layers": [3, 2]},
            "train": settings,
        }
    )


@pytest.fixture(scope="module")
def planned():
    """The plan of two passes, compiled for simulated devices, and the step it was read from."""
    config, target = run(gradient_accumulation_steps=2), aot.parse_target("cpu:4")
    described = describe(config, target, None)
    step = compile_step(described)
    work = described.program.stacking.pipelining.work
    return summary(described, step, None), PipelinedStep(step.inspection, work, 2, target, Reached())


@pytest.fixture
def by_formulas(monkeypatch):
    monkeypatch.setattr(aot, "missing_for", lambda kind: "nothing is compiled in this test")


def test_flops_are_those_of_the_schedule(planned):
    found, step = planned
    h, f, v = MODEL["hidden_size"], MODEL["intermediate_size"], MODEL["vocab_size"]
    tokens = ROWS * SEQUENCE
    once = 2 * tokens * (4 * h * h + 3 * h * f)
    # Backward is two forwards; it computes the layers again, and the last stage does not compute them before.
    layers = once * (3 * 4 + 2 * 3)
    attention = 4 * ROWS * SEQUENCE**2 * h * (3 * 4.5 + 2 * 3.5)
    head = 3 * 2 * tokens * h * v
    assert layers + head < found.flops.hardware <= layers + head + attention
    busiest = step.inspection.flops * 2
    assert layers * 12 / 18 < busiest < layers * 12 / 18 + head + attention


def test_what_is_handed_on_is_counted_by_ticks(planned):
    found, step = planned
    handed = [t for t in found.traffic if t.kind == "collective-permute"]
    ticks = make_schedule("1f1b", 2, 6).ticks
    assert {t.times for t in handed} <= {2 * ticks, 4 * ticks} and handed
    assert not step.inspection.collectives.hanging()
    # Rows 48 / (12 microbatches x 2 of data), fp32 on a CPU.
    activation = 2 * SEQUENCE * MODEL["hidden_size"] * 4
    assert sum(t.sent for t in handed) == 2 * ticks * 2 * activation
    slots = 2 * 2 - 1
    assert found.pipeline.stash_bytes == (slots + 1) * activation


def test_the_step_is_the_schedule_run_with_its_own_units(planned):
    found, step = planned
    told = found.pipeline
    assert (told.schedule, told.stages, told.virtual, told.passes) == ("1f1b", 2, 1, 2)
    assert (told.microbatches, told.layers, told.ticks) == (6, (3, 2), make_schedule("1f1b", 2, 6).ticks)
    forward, backward = np.array(told.forward_seconds), np.array(told.backward_seconds)
    assert forward[0, 1] < forward[0, 0] / 10  # the last stage leaves its layers to the backward
    assert backward[0, 0] > 2 * forward[0, 0]
    assert told.weight_seconds is None
    one = simulate(make_schedule("1f1b", 2, 6), forward, backward, 0.0, told.link_seconds)
    assert told.bubble == pytest.approx(one.bubble)
    assert told.bubble_formula == pytest.approx(1 / 7)
    forecast = found.forecast
    assert 2 * one.total < forecast.step_seconds < 2 * one.total * 1.5
    parts = forecast.compute_seconds + forecast.exposed_seconds + forecast.idle_seconds
    assert parts == pytest.approx(forecast.step_seconds)
    assert step.busiest == int((forward + backward)[0].argmax())


def test_a_plan_as_json_has_the_pipeline(planned):
    told = json.loads(json.dumps(planned[0].as_dict()))["pipeline"]
    assert set(told) >= {
        "schedule", "stages", "microbatches", "virtual", "layers", "ticks", "bubble", "bubble_formula",
        "stash_bytes", "forward_seconds", "backward_seconds", "weight_seconds",
    }  # fmt: skip
    assert told["layers"] == [3, 2] and len(told["forward_seconds"][0]) == 2


def test_formulas_tell_of_the_same_pipeline(planned, by_formulas):
    compiled = planned[0]
    found = plan(run(gradient_accumulation_steps=2), "cpu:4")
    assert not found.compiled
    assert found.memory.parameters == compiled.memory.parameters
    assert found.memory.optimizer == compiled.memory.optimizer
    mine, theirs = found.pipeline, compiled.pipeline
    same = ("schedule", "stages", "microbatches", "passes", "virtual", "layers", "ticks", "stash_bytes")
    assert all(getattr(mine, name) == getattr(theirs, name) for name in same)
    sent = {t.kind: t.times for t in found.traffic if t.axes == ("pipeline",)}
    assert sent["collective-permute"] == 2 * 2 * mine.ticks


@pytest.mark.parametrize(
    ("schedule", "slots"),
    # Stage inputs and one gradient, which is handed on; zero_bubble: what is kept of two microbatches.
    [("gpipe", 8 + 1), ("1f1b", 3 + 1), ("interleaved", 5 + 1)],
)
def test_stashes_are_slots_of_activations(schedule, slots):
    pipeline = {"schedule": schedule, "microbatches": 8}
    laid = analytic.lay_out(run(pipeline=pipeline), aot.parse_target("4xH100"), None)
    work = laid.stacking.pipelining.work
    assert work.slots.inputs + work.slots.gradients == slots
    activation = ROWS // 2 // 8 * SEQUENCE * MODEL["hidden_size"] * 2
    assert analytic.memory(laid).fits
    from dsjax.plan.analytic_stages import stash

    assert stash(laid) == slots * activation


# ---- the command ---------------------------------------------------------------------------------

PIPELINED = """
model:
  {kind: llama, hidden_size: 64, num_hidden_layers: 4, num_attention_heads: 2, intermediate_size: 128, vocab_size: 256}
mesh: {pipeline: 2, data: 4}
pipeline: {schedule: interleaved, microbatches: 4}
train: {global_batch_size: 16, sequence_length: 64, steps: 20, remat: none}
"""


@pytest.fixture
def dsjax(capfd, tmp_path, monkeypatch):
    """Run the command line in this process, in a directory of its own: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(PIPELINED)

    def call(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(argv)
        out, err = capfd.readouterr()
        return ended.value.code, out, err

    return call


def test_the_schedule_is_drawn_without_a_compiler(dsjax, tmp_path, by_formulas):
    code, out, err = dsjax("plan", "c.yaml", "--on", "8xH100", "--schedule", "s.svg", "--html", "p.html")
    assert code == 0, err
    assert "NOT COMPILED" in out and re.search(r"stage 1 \| +F.*B", out)
    assert re.search(r"bubble by formula.*11\.1%", out) and "stash: what is kept" in out
    drawn = (tmp_path / "s.svg").read_text()
    # Every forward and backward of four microbatches in two chunks on two stages has its box.
    assert len(re.findall("<title>(?:forward|backward) of microbatch", drawn)) == 2 * 4 * 2 * 2
    assert "stashed a device" in drawn and drawn in (tmp_path / "p.html").read_text()


def test_the_picture_lies_beside_the_page(dsjax, tmp_path, by_formulas):
    code, out, _ = dsjax("plan", "c.yaml", "--on", "8xH100", "--schedule", "--html", "p.html")
    assert code == 0 and "written: p.svg" in out
    assert (tmp_path / "p.svg").read_text().startswith("<svg")


def test_a_schedule_is_of_one_plan_of_a_pipeline(dsjax):
    code, _, err = dsjax("plan", "c.yaml", "--on", "8xH100", "--schedule", "mesh.pipeline=1", "mesh.data=8")
    assert code == 2 and "set mesh.pipeline" in err
    code, _, err = dsjax("plan", "c.yaml", "--on", "8xH100", "--schedule", "a.svg", "b.svg")
    assert code == 2 and "takes one file" in err
    code, _, err = dsjax("plan", "c.yaml", "--on", "8xH100", "--schedule", "--search")
    assert code == 2 and "search first" in err


# ---- the search ----------------------------------------------------------------------------------


def test_the_search_looks_at_stages_and_schedules():
    config, target = run(global_batch_size=64), aot.parse_target("2x4xH100")
    found = list(pipelines(config, target, LAYERS, 0))
    assert len({str(settings) for settings in found}) == len(found) < len(list(layouts(config, target, 0)))
    kinds = {(s["pipeline.schedule"], s["pipeline.virtual_stages"]) for s in found}
    assert kinds == {("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)}  # four chunks want eight layers
    for s in found:
        sizes = [s[f"mesh.{axis}"] for axis in ("pipeline", "data", "fsdp", "context", "tensor")]
        assert np.prod(sizes) == 8 and s["mesh.pipeline"] in (2, 4)
        rows = 64 // (s["mesh.data"] * s["mesh.fsdp"])
        assert rows % s["pipeline.microbatches"] == 0
        assert s["pipeline.schedule"] == "1f1b" or s["pipeline.microbatches"] >= s["mesh.pipeline"]


def test_a_pipeline_is_found_where_the_rest_does_not_fit(by_formulas, tmp_path):
    # Nodes of one device each: shards of parameters are gathered over the slow links, stages are not.
    chips = tmp_path / "chips.yaml"
    chips.write_text("H100: {memory: {bytes: 900000000}, network: {bandwidth: 1.0e8}}\n")
    target = aot.parse_target("4x1xH100", aot.load_chips(chips))
    model = MODEL | {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "vocab_size": 1024,
    }
    train = {"steps": 10, "global_batch_size": 32, "sequence_length": 512}
    found = search(from_dict({"model": model, "train": train}), target)
    assert found.config.mesh.pipeline > 1 and found.best.pipeline is not None
    assert found.best.fits and found.best.pipeline.stages == found.config.mesh.pipeline


def test_what_a_schedule_cannot_do_is_refused_by_formulas_too(by_formulas):
    with pytest.raises(ConfigError, match="need 10 layers"):
        plan(
            run(
                {"pipeline": 2, "data": 2},
                {"schedule": "interleaved", "virtual_stages": 5, "microbatches": 4},
            ),
            "cpu:4",
        )


def test_a_plans_schedule_can_be_run_again(planned):
    schedule, simulated = timetable(planned[0].pipeline)
    assert schedule.ticks == planned[0].pipeline.ticks
    assert simulated.bubble == pytest.approx(planned[0].pipeline.bubble)

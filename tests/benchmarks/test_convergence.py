"""The benchmark of codecs' convergence: what it trains, what it makes of losses, what it draws."""

from __future__ import annotations

import importlib
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from dsjax.errors import ConfigError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# The tests' eight devices, three steps.
TINY = (
    "mesh.data=8", "train.steps=3", "eval.every=3", "eval.steps=1", "train.sequence_length=16",
    "optimizer.schedule.warmup_steps=1", "optimizer.schedule.decay_steps=1", "observe.progress=none",
)  # fmt: skip


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("convergence", "curves")
    before = {name: sys.modules.pop(name, None) for name in names}
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update({name: module for name, module in before.items() if module})


def test_each_codec_is_trained_with_error_feedback_and_without(benchmark):
    convergence = benchmark("convergence")
    listed = convergence.cases(only="codecs")
    codecs = ("int8", "int4", "e2m4", "topk", "topk_int4")
    assert listed[0] == convergence.Case("dense") and listed[-1] == convergence.Case("diloco")
    assert listed[1:-1] == [
        *(convergence.Case(codec, feedback) for codec in codecs for feedback in (True, False)),
        *(convergence.Case(codec, True, convergence.WARMUP) for codec in ("topk", "topk_int4")),
    ]
    assert set(convergence.cases(quick=True)) <= set(convergence.cases())
    policies = convergence.cases(only="policies")
    assert convergence.cases() == listed + policies[1:] and [one.policy for one in policies[1:]] == [
        "bf16",
        *["fp16"] * 4,
        *["fp8"] * 3,
        *[None] * 4,
    ]
    quickstart = convergence.config_of(listed[2], convergence.FULL, Path("somewhere"))
    assert (quickstart.grad_sync.codec, quickstart.grad_sync.error_feedback) == ("int8", False)
    assert quickstart.model.fields["hidden_size"] == 192 and quickstart.optimizer.kind == "muon"


def test_a_number_format_is_trained_in_two_halves(benchmark):
    convergence = benchmark("convergence")
    chosen = [
        convergence.Case("dense"),
        convergence.Case(policy="fp16", scale=2.0**24),
        convergence.Case(policy="fp16", scale=2.0**24, resumed=True),
    ]
    longer = (*convergence.QUICK, *TINY, "train.steps=20", "eval.every=20")
    dense, whole, halves = convergence.measure(chosen, longer)
    assert whole["final_loss"] == halves["final_loss"] != dense["final_loss"]
    assert whole["overflow_rate"] == halves["overflow_rate"] > 0 and dense["overflow_rate"] is None
    assert "fp16 from 16777216 resumed" in convergence.named(halves)


def test_cases_are_compared_with_the_first(benchmark, capsys):
    convergence = benchmark("convergence")
    chosen = [convergence.Case("dense"), convergence.Case("topk", False)]
    dense, sparse = json.loads(json.dumps(convergence.measure(chosen, (*convergence.QUICK, *TINY))))
    assert "1/2: grad_sync.codec=dense" in capsys.readouterr().out
    assert dense["ratio_to_reference"] == 1 and dense["coded_share"] == 0 and dense["overflow_rate"] is None
    assert sparse["ratio_to_reference"] == sparse["final_loss"] / dense["final_loss"] != 1
    assert sparse["error_feedback"] is False and sparse["coded_share"] > 0.99
    assert [step for step, _ in sparse["curve"]] == [1, 2, 3]
    # The same parameters and examples: nothing was exchanged before the first loss.
    assert sparse["curve"][0][1] == pytest.approx(dense["curve"][0][1], rel=1e-6)
    assert sparse["curve"][2][1] != dense["curve"][2][1]


def test_what_cannot_run_says_why(benchmark, monkeypatch):
    convergence = benchmark("convergence")
    lines = convergence.lines([{"codec": "int4", "error_feedback": True, "skipped": "why"}])
    assert lines == []

    def refuse(*_):
        raise ConfigError("no such thing here")

    monkeypatch.setattr(convergence, "config_of", refuse)
    found = convergence.measure([convergence.Case("dense"), convergence.Case("int4", True)], ())
    assert all(one["skipped"] == "no such thing here" for one in found)
    assert convergence.table(found).row_count == 2


@pytest.mark.parametrize(
    ("codec", "feedback", "warmup", "ratio", "said"),
    [
        ("int4", True, 0, 1.009, "1%: met"), ("int4", True, 0, 1.011, "1%: missed"),
        ("topk", True, 60, 1.029, "3%: met"),
        ("topk", True, 60, 1.031, "3%: missed"), ("int4", False, 0, 1.2, ""), ("dense", None, 0, 1.0, ""),
        ("topk", True, 0, 1.2, ""),
    ],
)  # fmt: skip
def test_aims_are_for_error_feedback(benchmark, codec, feedback, warmup, ratio, said):
    one = {"codec": codec, "error_feedback": feedback, "warmup_steps": warmup, "ratio_to_reference": ratio}
    assert benchmark("convergence").aim(one) == said


def test_curves_are_means_beside_the_reference(benchmark):
    curves = benchmark("curves")
    dense = [[step, 4.0] for step in range(1, 7)]
    coded = [[1, 5.0], [2, 3.0], [3, 5.0], [4, 5.0], [5, None], [6, 4.0], [7, 4.0]]
    assert curves.means(coded, 2) == [(2, 4.0), (4, 5.0), (6, None)]
    assert curves.above(coded, dense, 2) == [(2, 0.0), (4, 25.0), (6, None)]


def test_curves_are_drawn_as_svg(benchmark):
    curves = benchmark("curves")
    curve = [[step, 5.0 - 0.02 * step] for step in range(1, 101)]
    lines = [
        curves.Line("dense", None, curve), curves.Line("int4", True, curve), curves.Line("int4", False, curve),
        curves.Line("diloco", None, curve),
    ]  # fmt: skip
    drawn = ElementTree.fromstring(curves.page(lines, "a < b"))
    paths = drawn.findall(".//{*}path")
    # Losses of three, int4 with feedback, int4 without, and three in the legend.
    assert len(paths) == 3 + 1 + 1 + 3
    words = "".join(drawn.itertext())
    assert "a < b" in words and "mean of 4 steps" in words and "without error feedback" in words
    assert ElementTree.fromstring(curves.page([], "")).tag.endswith("svg")

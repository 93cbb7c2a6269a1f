"""The benchmarks of planning: what they list, what they skip and why, what they keep."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsjax.plan import measured

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("plan", "gpu_truth", "gpu_train", "start")
    before = {name: sys.modules.pop(name, None) for name in names}
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update({name: module for name, module in before.items() if module})


def test_the_clusters_that_are_planned_for(benchmark):
    plan = benchmark("plan")
    listed = [(case.model, case.target) for case in plan.cases(quick=False)]
    assert listed == [
        ("llama3-8b", "8xH100"), ("llama3-8b", "16x8xH100"), ("llama3-8b", "128x8xH100"),
        ("llama3-70b", "32x8xH100"), ("llama3-405b", "128x8xH100"),
    ]  # fmt: skip
    assert "mesh.data=128" in list(plan.cases(quick=False))[2].settings


def test_a_plan_is_timed_and_compared_with_the_formulas(benchmark, tmp_path):
    config = tmp_path / "small.yaml"
    config.write_text(
        "model: {hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 16,"
        " intermediate_size: 64, vocab_size: 64}\n"
    )
    plan = benchmark("plan")
    small = ("train.global_batch_size=1", "train.sequence_length=16")
    found = plan.measure(plan.Case("small", "cpu:1", config, small))
    assert {"model", "target", "seconds", "bytes_per_device", "fits", "analytic_error"} <= set(found)
    assert 0 < found["compile_seconds"] < found["seconds"] and found["fits"] is True
    assert found["analytic_error"] > -1
    wrong = plan.measure(plan.Case("small", "cpu:1", config, ("mesh.fsdp=3",)))
    assert set(wrong) == {"model", "target", "skipped"} and "mesh" in wrong["skipped"]


def test_without_the_compiler_a_case_is_listed_with_the_reason(benchmark, monkeypatch):
    plan = benchmark("plan")
    monkeypatch.setattr(plan, "missing_for", lambda kind: "wheels are missing")
    assert plan.measure(plan.Case("llama3-70b", "32x8xH100")) == {
        "model": "llama3-70b", "target": "32x8xH100", "skipped": "wheels are missing",
    }  # fmt: skip


def truth(tmp_path, *words):
    answer = tmp_path / "truth.json"
    command = [sys.executable, str(BENCHMARKS / "gpu_truth.py"), *words, "--json", str(answer)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(answer.read_text()), done.stdout


def test_without_a_gpu_all_is_skipped_and_said(tmp_path):
    found, said = truth(tmp_path)
    assert len(found["cases"]) == 4 and all("no GPU here" in case["skipped"] for case in found["cases"])
    assert "no GPU here" in found["shares"]["skipped"] and "no GPU here" in said


@pytest.mark.slow
def test_on_simulated_devices_the_bytes_are_those_of_the_live_arrays(tmp_path):
    found, said = truth(tmp_path, "--quick", "--record")
    assert len(found["cases"]) == 3 and not any("skipped" in case for case in found["cases"])
    for case in found["cases"]:
        assert case["argument_bytes"] == case["live_argument_bytes"]
        assert case["output_bytes"] == case["live_output_bytes"]
        assert case["step_seconds"] > 0 and case["predicted_seconds"] > 0
    assert found["recorded"] is False and "only an accelerator's are" in said


def test_shares_are_measured(benchmark):
    found = benchmark("gpu_truth").shares(quick=True)
    # A CPU multiplies both types in the same units.
    assert set(found["products"]) == {"fp32"}
    assert all(share > 0 for share in (*found["products"].values(), found["memory"], found["node"]))
    assert found["count"] == 6 and "512 x 512" in found["how"]


def test_what_a_gpu_showed_is_kept(benchmark, tmp_path, monkeypatch):
    module = benchmark("gpu_truth")
    monkeypatch.setenv(measured.DIRECTORY, str(tmp_path))
    forecast = {"step_seconds": 1.0, "compute_seconds": 0.9, "exposed_seconds": 0.1, "ratio": 1.0}
    answers = {
        "look": {"platform": "gpu", "device": "NVIDIA H200", "devices": 1, "target": "1xH200"},
        "shares": {"products": {"bf16": 0.8}, "memory": 0.9, "how": "by hand", "count": 7},
        "plan": {"planned_bytes": 5, "planned_by": "compiling"},
        "run": {"step_seconds": 2.0, "predicted_seconds": 1.0, "forecast": forecast},
    }
    monkeypatch.setattr(module, "child", lambda work, platform: dict(answers[work["do"]]))
    result = module.compare(quick=False, recording=True)
    assert result["recorded"] and [case["planned_bytes"] for case in result["cases"]] == [5] * 4
    known = measured.load("NVIDIA H200")
    assert known.shares.products == {"bf16": 0.8} and known.shares.node is None
    assert (known.steps.count, known.steps.ratio) == (4, pytest.approx(2.0))
    json.dumps(result)
    # What could not run says why, and keeps nothing.
    answers["run"] = {"skipped": "run ended with 1: out of memory"}
    result = module.compare(quick=False, recording=True)
    assert all(case["skipped"].endswith("out of memory") for case in result["cases"])
    assert measured.load("NVIDIA H200").steps is None

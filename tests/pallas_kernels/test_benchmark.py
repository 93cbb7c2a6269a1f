"""benchmarks/kernels_gpu.py where there is no GPU, and its measuring with interpreted kernels."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def kernels_gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("kernels_gpu")
    for name in ("kernels_gpu", "gpu_truth", "gpu_train", "start"):
        sys.modules.pop(name, None)


def test_it_says_that_there_is_no_gpu(kernels_gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kernels_gpu.aot, "missing_for", lambda kind: "nothing to compile with")
    monkeypatch.setattr(sys, "argv", ["kernels_gpu.py", "--quick", "--json", str(tmp_path / "told.json")])
    kernels_gpu.main()
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["not_compiled"] == "nothing to compile with"
    assert all("skipped" in case for case in told["cases"])
    assert {"encode int4, feedback", "top-k select, 1%", "matmul", "fp8 matmul", "all_gather int4"} <= {
        case["kernel"] for case in told["cases"]
    }
    assert "no GPU here" in capsys.readouterr().out


def test_what_it_measures(kernels_gpu):
    listed = [*kernels_gpu._bytes(1 << 13), *kernels_gpu._products(128, 128, 128)]
    chosen = [case for case in listed if case.quick or case.kernel == "matmul gated, gradient"]
    for case in chosen:
        told = kernels_gpu.measure(replace(case, implementation="interpret"), 1, 1)
        assert told["equal"], told
        assert told["seconds"] > 0
        assert told["bound_by"] == ("tensor cores" if case.flops else "memory")


def test_what_differs_is_seen(kernels_gpu):
    x = jnp.ones((4, 4))
    assert kernels_gpu.difference([x, x.astype(int)], [x, x.astype(int)]) == 0
    assert kernels_gpu.difference(x, x.at[0, 0].set(2)) == pytest.approx(1 / jnp.sqrt(19))
    assert kernels_gpu.difference(x.astype(int), x.at[0].set(2).astype(int)) == 0.25
    assert kernels_gpu.difference(x.at[0, 0].set(jnp.nan), x) == float("inf")
    assert kernels_gpu.difference(*[x.at[0, 0].set(jnp.nan)] * 2) == 0


def test_a_kernel_that_fails_is_a_row(kernels_gpu):
    def fails() -> dict:
        raise RuntimeError("no such instruction\nmore")

    told = kernels_gpu._guarded({"kernel": "k"}, fails)
    assert told == {"kernel": "k", "skipped": "RuntimeError: no such instruction", "failed": True}


def test_cases_have_kernels(kernels_gpu):
    for case in kernels_gpu.cases(quick=False):
        assert 90 in kernels_gpu._generations(case)
        jax.eval_shape(case.function, *(jax.ShapeDtypeStruct(*shape) for shape in case.shapes))


@pytest.mark.parametrize("call", ["all_gather", "reduce_scatter"])
def test_what_it_measures_between_devices(kernels_gpu, call: str):
    told = kernels_gpu._exchange(call, nvlink=False, quick=True)
    assert told["equal"]
    assert told["shape"].startswith(f"{len(jax.devices())}x")

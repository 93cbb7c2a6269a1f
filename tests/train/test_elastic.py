"""Fewer nodes than a job was made for: another mesh, the same batch, the same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsjax.config import from_dict
from dsjax.errors import ConfigError
from dsjax.train.elastic import padded_rows, replanned

SETTINGS = {
    "runtime": {"platform": "cpu"},
    "model": {
        "kind": "llama", "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "intermediate_size": 48, "vocab_size": 259, "attention_dropout": 0.0,
    },
    "train": {"steps": 4, "global_batch_size": 8, "sequence_length": 32},
    "data": {"kind": "synthetic", "log_examples": True},
    "eval": {"every": 4, "steps": 2},
    "observe": {"log_every": 1, "progress": "none"},
}  # fmt: skip


def plan(devices: int, here: int, wanted: int, mesh: Any, batch: int = 24, accumulation: int = 1) -> Any:
    train = {"global_batch_size": batch, "gradient_accumulation_steps": accumulation}
    config = from_dict({"mesh": mesh, "train": train})
    environ = {"DSJAX_NODES": str(here), "DSJAX_NODES_WANTED": str(wanted)}
    changed, notes = replanned(config, devices, environ)
    sizes = {axis: size for axis, size in changed.mesh.model_dump().items() if size != 1}
    return sizes, changed.train.gradient_accumulation_steps, bool(notes)


@pytest.mark.parametrize(
    ("devices", "here", "wanted", "mesh", "batch", "before", "result"),
    [
        # All are there, or nobody told: as it is.
        (8, 4, 4, {"data": 2, "fsdp": 4}, 24, 1, ({"data": 2, "fsdp": 4}, 1, False)),
        (8, 0, 0, {"fsdp": -1}, 24, 1, ({"fsdp": -1}, 1, False)),
        # Three of four nodes with two devices each: fsdp 4 does not divide 6, so it grows.
        (6, 3, 4, {"data": 2, "fsdp": 4}, 24, 1, ({"fsdp": 6}, 2, True)),
        (6, 3, 4, {"data": 4, "fsdp": 2}, 24, 1, ({"data": 3, "fsdp": 2}, 2, True)),
        (6, 3, 4, {"data": 4, "fsdp": -1}, 32, 2, ({"data": 3, "fsdp": 2}, 3, True)),
        # A cut of the model stays.
        (4, 2, 4, {"tensor": 2, "data": 4}, 16, 1, ({"data": 2, "tensor": 2}, 2, True)),
        (2, 1, 4, {"tensor": 2, "fsdp": 4}, 16, 1, ({"tensor": 2}, 4, True)),
    ],
)
def test_the_mesh_is_planned_anew(
    devices: int, here: int, wanted: int, mesh: Any, batch: int, before: int, result: Any
) -> None:
    assert plan(devices, here, wanted, mesh, batch, before) == result


def test_a_cut_of_the_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 of 4 nodes there are 6 devices.*4 devices"):
        plan(6, 3, 4, {"tensor": 4, "data": 2})


def test_a_batch_is_filled_up() -> None:
    assert [padded_rows(8, parts) for parts in (1, 3, 8, 6)] == [8, 9, 8, 12]


def run(directory: Path, devices: int, environ: dict[str, str]) -> tuple[list[Any], dict[int, list[str]]]:
    config = directory.with_suffix(".json.yaml")
    config.write_text(json.dumps({**SETTINGS, "run": {"dir": str(directory)}}))
    command = [sys.executable, "-m", "dsjax", "train", str(config), f"runtime.cpu_devices={devices}"]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    logged = (directory / "examples-0.jsonl").read_text().splitlines()
    examples = {line["step"]: sorted(line["ids"]) for line in map(json.loads, logged)}
    found = [(r["loss"], r["tokens"], r["grad_norm"]) for r in lines if "loss" in r]
    evals = [tuple(r["eval"]["heldout"][k] for k in ("loss", "tokens")) for r in lines if "eval" in r]
    return [*np.ravel(found).tolist(), *np.ravel(evals).tolist()], examples


def test_three_of_four_nodes_make_the_same_steps(tmp_path: Path) -> None:
    whole, examples = run(tmp_path / "whole", 4, {})
    environ = {"DSJAX_NODES": "3", "DSJAX_NODES_WANTED": "4"}
    fewer, same = run(tmp_path / "fewer", 3, environ)
    assert same == examples
    np.testing.assert_allclose(fewer, whole, rtol=1e-5)

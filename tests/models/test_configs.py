"""The shapes in configs/models are of the sizes that their names say; the tiny ones train."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from dsjax.cli import main
from dsjax.config import load
from dsjax.models import build

MODELS = Path(__file__).parents[2] / "configs" / "models"
# Parameters in billions, without padding: of the papers and model cards; those that look ahead are counted apart.
SIZES = {
    "deepseek-v3-671b": 671.0, "deepseek-v3-16b": 16.0, "llama3-8b": 8.03, "llama3-70b": 70.6, "llama3-405b": 405.9,
    "llama3.2-1b": 1.24,
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_a_shape_is_of_its_size(name: str) -> None:
    config = load([MODELS / f"{name}.yaml"], environ={})
    spec = build(config.model, platform="cpu")
    model = nnx.eval_shape(lambda: spec.init(nnx.Rngs(0)))
    leaves = nnx.state(model, nnx.Param).flat_state()
    size = sum(int(np.prod(jax.tree.leaves(leaf)[0].shape)) for path, leaf in leaves if path[0] != "ahead")
    assert abs(size / 1e9 / SIZES[name] - 1) < 0.01


def test_the_tiny_deepseek_trains_through_the_command(tmp_path: Path) -> None:
    words = [
        "data.kind=synthetic", f"run.dir={tmp_path}", "train.steps=30", "train.global_batch_size=8",
        "train.sequence_length=64", "mesh.fsdp=2", "mesh.expert=2", "mesh.tensor=2", "observe.progress=none",
        "observe.log_every=1", "optimizer.learning_rate=1e-2", "eval.every=30", "optimizer.schedule.warmup_steps=5",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as end:
        main(["train", str(MODELS / "deepseek-v3-tiny.yaml"), *words])
    assert not end.value.code
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]
    assert {"router_entropy", "expert_load_max_over_mean", "dropped", "ahead_loss"} <= steps[-1].keys()
    assert all(line["dropped"] == 0 for line in steps)
    # The evaluation is of the next token alone; training adds what tokens further ahead weigh.
    held_out = next(line["eval"]["heldout"]["loss"] for line in lines if "eval" in line)
    assert held_out < steps[-1]["loss"]

"""Runs to plan: a small one, and the layouts of `measured.json`.

    python tests/plan/plan_runs.py [NAME ...]

compiles the layouts again (those named, or all; half a minute each) and writes their bytes into
`measured.json`. It needs the `aot` extra.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from dsjax import aot
from dsjax.config import Config, from_dict
from dsjax.plan.compiled import compile_step, describe

MODEL = {
    "kind": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 512, "vocab_size": 1024,
}  # fmt: skip
STORE = Path(__file__).parent / "measured.json"
MEASURED = json.loads(STORE.read_text())


def small(mesh: dict[str, int] | None = None, **train: Any) -> Config:
    """A run of a small Llama on a mesh."""
    settings = {"steps": 10, "global_batch_size": 16, "sequence_length": 128, **train}
    return from_dict({"model": MODEL, "mesh": mesh or {}, "train": settings})


def config_of(case: dict[str, Any]) -> Config:
    """The config of a layout of `measured.json`."""
    model = MEASURED["models"][case["model"]]
    settings = {name: case.get(name, {}) for name in ("mesh", "pipeline", "train", "lora", "precision")}
    return from_dict({"model": model, **settings})


def compiled_bytes(case: dict[str, Any]) -> int:
    """Bytes of a device that XLA gives a layout's step: argument + output - alias + temporary."""
    target = aot.parse_target(case["target"])
    return compile_step(describe(config_of(case), target, None)).inspection.memory.total


class Other(nnx.Module):
    """A model that is no Llama."""

    def __init__(self, rngs: nnx.Rngs):
        self.matrix = nnx.Linear(8, 8, rngs=rngs)


def other() -> Any:
    """As `model.kind` names it."""
    return lambda rngs: Other(rngs)


def _stored() -> str:
    """`measured.json`: a model and a case a line."""
    models = ",\n  ".join(f'"{name}": {json.dumps(model)}' for name, model in MEASURED["models"].items())
    cases = ",\n  ".join(json.dumps(case) for case in MEASURED["cases"])
    head = f'{{"jax": {json.dumps(MEASURED["jax"])},\n "models": {{\n  {models}}},\n'
    return head + f' "cases": [\n  {cases}]}}\n'


def main() -> None:
    """Compiles layouts again and stores what XLA says."""
    names = set(sys.argv[1:])
    for case in MEASURED["cases"]:
        if not names or case["name"] in names:
            case["bytes"] = compiled_bytes(case)
            MEASURED["jax"] = jax.__version__
            STORE.write_text(_stored())
            print(case["name"], case["bytes"], flush=True)


if __name__ == "__main__":
    main()

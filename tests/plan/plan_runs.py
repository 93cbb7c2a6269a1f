"""A small run to plan."""

from __future__ import annotations

from typing import Any

from flax import nnx

from dsjax.config import Config, from_dict

MODEL = {
    "kind": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 512, "vocab_size": 1024,
}  # fmt: skip


def small(mesh: dict[str, int] | None = None, **train: Any) -> Config:
    """A run of a small Llama on a mesh."""
    settings = {"steps": 10, "global_batch_size": 16, "sequence_length": 128, **train}
    return from_dict({"model": MODEL, "mesh": mesh or {}, "train": settings})


class Other(nnx.Module):
    """A model that is no Llama."""

    def __init__(self, rngs: nnx.Rngs):
        self.matrix = nnx.Linear(8, 8, rngs=rngs)


def other() -> Any:
    """As `model.kind` names it."""
    return lambda rngs: Other(rngs)

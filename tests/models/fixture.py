"""The tiny Hugging Face models of fixtures/ (see make_fixtures.py), as models of ours."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from dsjax.config.schema import ModelConfig
from dsjax.mesh import named_leaves
from dsjax.models import FAMILIES, ModelSpec, build
from dsjax.models.weights import WeightMap

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.name for path in FIXTURES.iterdir() if path.name.partition("-")[0] in FAMILIES)


def spec_of(name: str, **fields: Any) -> ModelSpec:
    return build(ModelConfig(config=str(FIXTURES / name), **fields), platform="cpu")


def tensors_of(name: str) -> dict[str, np.ndarray]:
    return load_file(FIXTURES / name / "model.safetensors")


@cache
def expected(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURES / name / "expected.npz"))


def load(spec: ModelSpec, tensors: dict[str, np.ndarray], padding: float = 50.0) -> tuple[Any, WeightMap]:
    """The model with these weights, evaluating. Padding holds large numbers: any of them that leaked would be seen."""
    weights = spec.family.weights()
    params = weights.from_theirs(tensors)
    for table, rows in {"embed/embedding": spec.vocab_size, "head/kernel": spec.vocab_size}.items():
        if table in params:
            value = params[table] if table.startswith("embed") else params[table].T
            value[rows:] = padding
    model = spec.init(nnx.Rngs(0))
    state = nnx.state(model, nnx.Any(nnx.Param, *spec.family.saved))
    assert named_leaves(state).keys() == params.keys()
    paths = jax.tree_util.tree_leaves(named(state))
    nnx.update(
        model, jax.tree.unflatten(jax.tree.structure(state), [jnp.asarray(params[path]) for path in paths])
    )
    model.eval()
    return model, weights


def named(tree: Any) -> list[str]:
    return list(named_leaves(tree))


def worst(got: Any, want: np.ndarray) -> float:
    return float(np.max(np.abs(np.asarray(got) - want)))

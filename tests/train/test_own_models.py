"""Flax models that know nothing of dsjax train in every data/fsdp layout as on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dsjax
from dsjax.mesh import named_leaves

ROWS = 16
LAYOUTS = [{"fsdp": 8}, {"data": 8}, {"data": 2, "fsdp": 4}, {"data": 4, "fsdp": 2}]


class Mlp(nnx.Module):
    """Regression; 13 features and 24 hidden units, of which only the latter divide."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.inner = nnx.Linear(13, 24, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.outer = nnx.Linear(24, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(self.drop(jnp.tanh(self.inner(x))))[:, 0]


class ConvNet(nnx.Module):
    """A classifier with BatchNorm state."""

    def __init__(self, *, rngs: nnx.Rngs):
        # No bias before BatchNorm: it has no true gradient, and Adam makes whole steps of its rounding.
        self.conv = nnx.Conv(3, 8, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.conv(x)))
        return self.head(x.mean(axis=(1, 2)))


class LinenMlp(nn.Module):
    """A Linen module as people have them."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.LayerNorm()(nn.relu(nn.Dense(32)(x)))
        return nn.Dense(1)(x)[:, 0]


def linen(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.bridge.ToNNX(LinenMlp(), rngs=rngs).lazy_init(jnp.zeros((1, 13)))


def squared(model: Any, batch: Any) -> Any:
    error = model(batch["x"]) - batch["y"]
    return jnp.sum(error**2), jnp.float32(error.shape[0])


def classified(model: Any, batch: Any) -> Any:
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    right = jnp.sum(jnp.argmax(logits, -1) == batch["label"]).astype(jnp.float32)
    count = jnp.float32(losses.shape[0])
    return jnp.sum(losses), count, {"accuracy": (right, count)}


def numbers(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    x = rng.standard_normal((ROWS, 13)).astype(np.float32)
    return {"x": x, "y": x[:, 0] * 2 - x[:, 3]}


def images(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    label = rng.integers(0, 5, ROWS).astype(np.int32)
    image = rng.standard_normal((ROWS, 6, 6, 3)).astype(np.float32) + label[:, None, None, None]
    return {"image": image, "label": label}


MODELS = {
    "mlp": (lambda rngs: Mlp(rngs=rngs), squared, numbers),
    "conv": (lambda rngs: ConvNet(rngs=rngs), classified, images),
    "linen": (linen, squared, numbers),
}


def trained(kind: str, mesh: dict[str, int], devices: int, directory: Path, accumulation: int = 1) -> Any:
    init, loss, batches = MODELS[kind]
    trainer = dsjax.Trainer(
        init,
        loss,
        lambda rate: optax.adamw(rate, eps=1e-4),
        learning_rate=1e-2,
        mesh=mesh,
        devices=jax.devices()[:devices],
        gradient_accumulation_steps=accumulation,
        run={"dir": str(directory)},
    )
    state = trainer.init(seed=1)
    losses = []
    for step in range(5):
        state, metrics = trainer.step(state, batches(step))
        losses.append(float(metrics["loss"]))
    return trainer, state, losses


@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_an_unannotated_model_trains_as_on_one_device(
    kind: str, mesh: dict[str, int], tmp_path: Path
) -> None:
    _, alone, want = trained(kind, {"fsdp": 1}, 1, tmp_path)
    _, state, got = trained(kind, mesh, 8, tmp_path)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for part in ("params", "model_state"):
        expected = named_leaves(getattr(alone, part))
        for name, leaf in named_leaves(getattr(state, part)).items():
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                continue
            np.testing.assert_allclose(np.asarray(leaf), np.asarray(expected[name]), atol=2e-5, err_msg=name)
    if mesh.get("fsdp", 1) > 1:
        cut = [leaf for leaf in jax.tree.leaves(state.params) if "fsdp" in str(leaf.sharding.spec)]
        assert cut, "no parameter is sharded over fsdp"


@pytest.mark.parametrize("kind", ["mlp", "linen"])
def test_accumulation_changes_nothing(kind: str, tmp_path: Path) -> None:
    _, _, want = trained(kind, {"fsdp": 1}, 1, tmp_path)
    _, _, got = trained(kind, {"data": 2, "fsdp": 2}, 4, tmp_path, accumulation=4)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_batchnorm_statistics_move_and_serve_evaluation(tmp_path: Path) -> None:
    trainer, state, _ = trained("conv", {"data": 2, "fsdp": 4}, 8, tmp_path)
    model = trainer.model(state)
    assert float(jnp.max(jnp.abs(model.norm.mean[...]))) > 0.01
    result = trainer.evaluate(state, [images(9), {k: v[:5] for k, v in images(10).items()}])
    alone, other, _ = trained("conv", {"fsdp": 1}, 1, tmp_path)
    want = alone.evaluate(other, [images(9), {k: v[:5] for k, v in images(10).items()}])
    assert result["tokens"] == ROWS + 5
    assert result == pytest.approx(want, rel=1e-5)
    assert 0 <= result["accuracy"] <= 1

"""Schedules by their numbers; optimizers decay matrices only, and lie where their parameters lie."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.config.schema import OptimizerConfig, ScheduleConfig
from dsjax.mesh import Layout, make_mesh, named_leaves
from dsjax.train.optimizers import make_optimizer, make_schedule

NAMES = {
    "layers/norm": ("layers", "embed"),
    "layers/up": ("layers", "embed", "mlp"),
    "layers/out": ("layers", "heads", "head_dim", "embed"),
    "embed": ("vocab", "embed"),
    "bias": ("mlp",),
}
SHAPES = {
    "layers/norm": (2, 8),
    "layers/up": (2, 8, 16),
    "layers/out": (2, 2, 4, 8),
    "embed": (32, 8),
    "bias": (16,),
}
KINDS = ["adamw", "lion", "adafactor", "muon", "sgd"]


def params() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    ("kind", "points"),
    [
        ("constant", {0: 0.1, 9: 1.0, 10: 1.0, 99: 1.0}),
        ("cosine", {0: 0.1, 9: 1.0, 10: 1.0, 55: 0.6, 100: 0.2, 500: 0.2}),
        ("linear", {0: 0.1, 9: 1.0, 10: 1.0, 55: 0.6, 100: 0.2, 500: 0.2}),
        ("wsd", {0: 0.1, 9: 1.0, 89: 1.0, 95: 0.6, 100: 0.2}),
    ],
)
def test_a_schedule_takes_these_values(kind: str, points: dict[int, float]) -> None:
    schedule = make_schedule(ScheduleConfig(kind=kind, warmup_steps=10, min_lr_ratio=0.2), 1.0, 100)
    for update, value in points.items():
        assert float(schedule(update)) == pytest.approx(value, abs=1e-6), update


def test_no_warm_up_and_given_decay() -> None:
    schedule = make_schedule(
        ScheduleConfig(kind="linear", warmup_steps=0, decay_steps=4, min_lr_ratio=0.0), 2.0, 100
    )
    assert [float(schedule(u)) for u in range(6)] == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.0, 0.0])


@pytest.mark.parametrize("kind", KINDS)
def test_decay_shrinks_matrices_and_nothing_else(kind: str) -> None:
    optimizer = make_optimizer(OptimizerConfig(kind=kind, weight_decay=0.5), 0.1, NAMES.get)
    before = params()
    zeros = jax.tree.map(jnp.zeros_like, before)
    updates, _ = optimizer.update(zeros, optimizer.init(before), before)
    for name, update in updates.items():
        vector = name in ("layers/norm", "bias")
        want = jnp.zeros_like(update) if vector else -0.05 * before[name]
        np.testing.assert_allclose(update, want, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_descends(kind: str) -> None:
    optimizer = make_optimizer(OptimizerConfig(kind=kind, weight_decay=0.0), 3e-2, NAMES.get)
    now = params()
    state = optimizer.init(now)

    def loss(tree: dict[str, jax.Array]) -> jax.Array:
        return sum(jnp.mean((leaf - 0.5) ** 2) for leaf in tree.values())

    first = float(loss(now))

    @jax.jit
    def step(now: dict[str, jax.Array], state: object) -> tuple[dict[str, jax.Array], object]:
        updates, state = optimizer.update(jax.grad(loss)(now), state, now)
        return jax.tree.map(jnp.add, now, updates), state

    for _ in range(60):
        now, state = step(now, state)
    assert float(loss(now)) < 0.7 * first


def test_muon_orthogonalises_each_layer_and_leaves_the_embedding_to_adamw() -> None:
    optimizer = make_optimizer(OptimizerConfig(kind="muon", weight_decay=0.0, beta1=0.0), 1.0, NAMES.get)
    before = params()
    updates, _ = optimizer.update(before, optimizer.init(before), before)
    for layer in range(2):
        singular = np.linalg.svd(np.asarray(updates["layers/up"][layer]), compute_uv=False)
        assert singular.max() / singular.min() < 2.5
    assert np.linalg.svd(np.asarray(before["layers/up"][0]), compute_uv=False).min() > 0
    np.testing.assert_allclose(np.abs(updates["embed"]), 1.0, rtol=1e-3)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_moments_are_fp32(kind: str) -> None:
    optimizer = make_optimizer(OptimizerConfig(kind=kind), 1.0, NAMES.get)
    for name, leaf in named_leaves(optimizer.init(params())).items():
        assert leaf.dtype in (jnp.float32, jnp.int32), name


def test_vectors_of_stacked_layers_are_no_matrices_although_nobody_names_their_dimensions() -> None:
    layout = Layout(make_mesh({}, jax.devices()[:1]), {"first/*": ("embed", "mlp")}, layers="layers")
    shapes = {
        "layers/bias": (2, 8),
        "layers/kernel": (2, 8, 8),
        "first/kernel": (8, 8),
        "last/kernel": (8, 8),
    }
    now = {name: jnp.ones(shape) for name, shape in shapes.items()}
    for kind in ("adamw", "muon"):
        config = OptimizerConfig(kind=kind, weight_decay=0.5)
        optimizer = make_optimizer(config, 1.0, layout.optimizer_names)
        still = jax.tree.map(jnp.zeros_like, now)
        updates, _ = optimizer.update(still, optimizer.init(now), now)
        decayed = {name for name, update in updates.items() if np.any(update)}
        assert decayed == {"layers/kernel", "first/kernel", "last/kernel"}, kind

"""Workers that train apart and meet: as many runs on one device, averaged, would do it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dsjax
from dsjax.config.exchange import DilocoConfig, GradSyncConfig
from dsjax.errors import ConfigError
from dsjax.mesh import named_leaves

sys.path.insert(0, str(Path(__file__).parent.parent))
import oracle

APART = DilocoConfig(inner_steps=2, outer_learning_rate=0.7, outer_momentum=0.9)


def program(case, grad_sync=None, diloco=APART):
    made = oracle.program_of({**oracle.PLAIN, "layers": 2, **case})
    return replace(made, grad_sync=GradSyncConfig(**(grad_sync or {})), diloco=diloco)


def named(tree):
    return {name: np.asarray(leaf) for name, leaf in named_leaves(jax.device_get(tree)).items()}


def rows_of(batch, worker, workers, microbatches=1):
    """A worker's rows of each microbatch."""

    def cut(x):
        parts = x.reshape(microbatches, workers, -1, *x.shape[1:])
        return parts[:, worker].reshape(-1, *x.shape[1:])

    return {name: cut(x) for name, x in batch.items()}


def by_hand(workers, steps, optimizer, microbatches):
    """Parameters after some steps of DiLoCo, from runs of one device each."""
    alone = oracle.program_of(
        {**oracle.PLAIN, "layers": 2, "optimizer": optimizer, "gradient_accumulation_steps": microbatches}
    )
    states = [alone.init(seed=3) for _ in range(workers)]
    met = named(states[0].params)
    momentum = {name: np.zeros_like(p) for name, p in met.items()}
    for step in range(steps):
        for worker in range(workers):
            batch = alone.place(rows_of(oracle.batch_of("full", step), worker, workers, microbatches))
            states[worker], _ = alone.step(batch)(states[worker], batch, alone.votes())
        if (step + 1) % APART.inner_steps == 0:
            own = [named(state.params) for state in states]
            for name in met:
                move = np.mean([met[name] - o[name] for o in own], axis=0)
                momentum[name] = APART.outer_momentum * momentum[name] + move
                met[name] = met[name] - APART.outer_learning_rate * (
                    move + APART.outer_momentum * momentum[name]
                )
            states = [replace(state, params=_like(state.params, met)) for state in states]
    return met


def _like(params, values):
    pairs = zip(named_leaves(params), jax.tree.leaves(params), strict=True)
    leaves = [jax.device_put(values[name], leaf.sharding) for name, leaf in pairs]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


@pytest.mark.parametrize(
    "case, workers",
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, 2),
        ({"data": 4, "gradient_accumulation_steps": 2, "fsdp_gather": "step"}, 4),
    ],
)
def test_workers_do_what_runs_of_their_own_do(case, workers):
    made = program({**case, "optimizer": "adamw"})
    state = made.init(seed=3)
    for step in range(5):
        batch = made.place(oracle.batch_of("full", step))
        state, metrics = made.step(batch)(state, batch, made.votes())
        assert bool(metrics["applied"])
    want = by_hand(workers, 5, "adamw", case.get("gradient_accumulation_steps", 1))
    for name, value in named(state.params).items():
        np.testing.assert_allclose(value, want[name], rtol=1e-4, atol=2e-6, err_msg=name)
    # One step after they met they have parted again.
    own = named(state.workers["params"])["head/kernel"]
    assert np.abs(own[0] - own[1]).max() > 1e-5


def test_near_replicas_are_one_worker():
    pairs = {"topology": {"node": {"devices": 2}}, "route": "hierarchical"}
    made = program({"data": 4, "optimizer": "sgd"}, pairs)
    assert made.parts.exchange.route.parts == (2, 2)
    state = made.init(seed=3)
    for step in range(3):
        batch = made.place(oracle.batch_of("full", step))
        state, _ = made.step(batch)(state, batch, made.votes())
    own = named(state.workers["params"])["head/kernel"]
    np.testing.assert_array_equal(own[0], own[1])
    assert np.abs(own[1] - own[2]).max() > 1e-6
    want = by_hand(2, 3, "sgd", 1)
    for name, value in named(state.params).items():
        np.testing.assert_allclose(value, want[name], rtol=1e-4, atol=2e-6, err_msg=name)


def test_moves_go_through_the_codec_and_leave_residuals():
    made = program({"data": 2}, {"codec": "int4", "min_size": 1, "dense": []})
    state = made.init(seed=3)
    batch = made.place(oracle.batch_of("full", 0))
    state, _ = made.step(batch)(state, batch, made.votes())
    assert not any(np.abs(r).max() for r in named(state.residuals).values())
    state, _ = made.step(batch)(state, batch, made.votes())
    assert all(np.abs(r).max() for name, r in named(state.residuals).items() if name.startswith("sent/"))
    own = named(state.workers["params"])
    for name, value in named(state.params).items():
        np.testing.assert_array_equal(own[name][0], value)


def test_a_worker_that_is_not_finite_stops_all():
    made = program({"data": 2})
    state = made.init(seed=3)
    batch = made.place(oracle.batch_of("full", 0))
    before = named(state.workers["params"])
    weights = np.array(jax.device_get(batch["weights"]))
    weights[0, -1] = np.inf
    bad = {**batch, "weights": jax.device_put(weights, batch["weights"].sharding)}
    state, metrics = made.step(bad)(state, bad, made.votes())
    assert not bool(metrics["applied"])
    for name, value in named(state.workers["params"]).items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize(
    "steps, said",
    [
        (5, r"train\.steps: 5 .* use 4 or 6"),
        (1, r"diloco\.inner_steps: 2 .* train\.steps=2, or diloco\.inner_steps=1"),
    ],
)
def test_a_run_that_would_not_end_with_a_meeting_is_refused(tmp_path, steps, said):
    trainer = dsjax.Trainer(
        init=lambda rngs: nnx.Linear(2, 1, rngs=rngs),
        loss=lambda model, batch: (jnp.sum((model(batch["x"]) - 1) ** 2), jnp.float32(len(batch["x"]))),
        optimizer=optax.sgd(0.1),
        mesh={"data": 2},
        devices=jax.devices()[:2],
        diloco={"inner_steps": 2},
        run={"dir": str(tmp_path / "run")},
        observe={"progress": "none"},
    )
    batches = iter([{"x": np.ones((4, 2), np.float32)}] * 4)
    with pytest.raises(ConfigError, match=said):
        trainer.fit(batches, steps=steps)
    assert not (tmp_path / "run").exists()
    state = trainer.fit(batches, steps=4)
    for name, leaf in named_leaves(state.params).items():
        np.testing.assert_array_equal(named_leaves(state.workers["params"])[name][0], leaf)


def test_one_replica_may_end_where_it_likes():
    program({"fsdp": 2}).check_steps(5)


def test_a_pipeline_is_refused():
    with pytest.raises(ConfigError, match=r"diloco\.inner_steps: .* mesh\.pipeline=1"):
        program({"data": 2, "pipeline": (2, "1f1b")})

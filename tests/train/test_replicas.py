"""Statistics, frozen parameters and draws of a model whose replicas compute apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dsjax
from dsjax.aot.inspection import inspect
from dsjax.mesh import named_leaves
from dsjax.train.host_batch import abstract

CODED = {"codec": "int8", "min_size": 0}


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.last = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jax.nn.relu(self.norm(self.first(x))))


def loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    return losses.sum(), jnp.float32(losses.size)


def trainer(tmp_path, **more):
    return dsjax.Trainer(
        init=lambda rngs: Net(rngs), loss=loss, optimizer=optax.sgd(0.1), mesh={"data": 4, "fsdp": 2},
        run={"dir": str(tmp_path)}, **more,
    )  # fmt: skip


def batch():
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(32, 16)).astype(np.float32), "y": rng.integers(0, 4, 32, dtype=np.int32)}


@pytest.mark.parametrize(
    "more", [{"grad_sync": CODED}, {"diloco": {"inner_steps": 2}}], ids=["coded", "apart"]
)
def test_running_averages_are_averaged_over_replicas(tmp_path, more):
    plain, apart = trainer(tmp_path / "a"), trainer(tmp_path / "b", **more)
    # Dense gradients: the statistics are of all replicas together, and nothing is exchanged replica by replica.
    assert plain.program.parts.exchange is None and apart.program.parts.exchange is not None
    states = [t.step(t.init(seed=0), batch())[0] for t in (plain, apart)]
    means, variances = (
        [np.asarray(named_leaves(s.model_state)[f"norm/{name}"]) for s in states] for name in ("mean", "var")
    )
    # The mean of the replicas' means is the mean of all; their variances leave out how the means differ.
    np.testing.assert_allclose(means[1], means[0], rtol=1e-4, atol=1e-6)
    assert np.all(variances[1] <= variances[0] + 1e-6) and np.abs(variances[1] - variances[0]).max() > 1e-4
    for leaf in jax.tree.leaves(states[1].model_state):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            for shard in leaf.addressable_shards:
                np.testing.assert_array_equal(shard.data, leaf.addressable_shards[0].data)


def test_frozen_parameters_do_not_travel(tmp_path):
    made = trainer(tmp_path, grad_sync={**CODED, "dense": []}, trainable=["last/*"])
    program = made.program
    placed = abstract(program.place(batch()))
    compiled = program.lower_step(placed).compile()
    sums = inspect(compiled, program.mesh).collectives.touching("data")
    frozen = 4 * 16 * 32 // 2
    assert sums and not sums.of("all-reduce").at_least(frozen)
    assert all(c.operand_bytes < frozen for c in sums)

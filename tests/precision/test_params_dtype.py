"""Parameters and sums of gradients in bf16: odds that keep means, the same on any mesh, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dsjax
from dsjax.checkpoint import DiskCheckpoints
from dsjax.config import from_dict
from dsjax.mesh import make_mesh, named_leaves
from dsjax.plan.compiled import parts_of
from dsjax.precision.rounding import stochastically_rounded
from dsjax.train.formats import summed
from dsjax.train.lay_out import lay_out
from dsjax.train.program import Program
from dsjax.train.resume import restore
from dsjax.train.state import Numbers

BF16 = Numbers(params=jnp.bfloat16)
BOTH = Numbers(params=jnp.bfloat16, gradients=jnp.bfloat16)


def program_of(numbers: Numbers, **settings: Any) -> Program:
    return replace(oracle.program_of({**oracle.PLAIN, **settings}), numbers=numbers)


def stepped(program: Program, state: Any, number: int) -> tuple[Any, dict[str, Any]]:
    batch = program.place(oracle.batch_of("full", number))
    return program.step(batch)(state, batch, program.votes())


def host(tree: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}


def test_updates_far_below_a_step_of_bf16_are_made_on_average() -> None:
    params = {"kernel": jnp.ones((256, 256), jnp.bfloat16), "scale": jnp.ones(8)}
    updates = {"kernel": jnp.full((256, 256), 1e-4), "scale": jnp.full(8, 1e-4)}  # 1/78 of a step

    @jax.jit
    def many(params: Any) -> Any:
        def one(count: Any, params: Any) -> Any:
            key = jax.random.fold_in(jax.random.key(0), count)
            return dsjax.apply_updates_stochastic_rounding(params, updates, key)

        return jax.lax.fori_loop(0, 100, one, params)

    moved = many(params)
    assert moved["kernel"].dtype == jnp.bfloat16 and moved["scale"].dtype == jnp.float32
    mean = float(jnp.mean(moved["kernel"].astype(jnp.float32)))
    # Each number is 1 plus steps of 1/128, about 100/78 of them: its deviation is at most sqrt(1.28) / 128.
    assert abs(mean - 1.01) < 5 * np.sqrt(1.28) / 128 / 256
    nearest = optax.apply_updates(params, updates)["kernel"]
    assert float(jnp.mean(nearest.astype(jnp.float32))) == 1.0  # what rounding to the nearest makes of them


def test_rounding_does_not_depend_on_how_an_array_is_cut() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 64, 32)), jnp.float32)
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    rounded = jax.jit(stochastically_rounded)
    whole = rounded(x, jax.random.key(3))
    for spec in (P("a", "b"), P(None, "b", "a"), P(("b", "a"))):
        cut = rounded(jax.device_put(x, NamedSharding(mesh, spec)), jax.random.key(3))
        np.testing.assert_array_equal(np.asarray(whole), np.asarray(cut))
    assert not np.array_equal(np.asarray(whole), np.asarray(rounded(x, jax.random.key(4))))


def test_sums_over_microbatches_keep_what_is_small() -> None:
    grads = {"kernel": jnp.ones((128, 128), jnp.bfloat16)}
    more = {"kernel": jnp.full((128, 128), 1e-3, jnp.bfloat16)}
    found = grads
    for microbatch in range(64):
        found = summed(BOTH, found, more, jnp.int32(0), microbatch)
    mean = float(jnp.mean(found["kernel"].astype(jnp.float32)))
    assert abs(mean - 1 - 64e-3) < 1e-3 and found["kernel"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("numbers", "layout"),
    [
        (BF16, {"fsdp": 2, "data": 2}),
        (BOTH, {"fsdp": 2, "data": 2}),
        (BOTH, {"fsdp": 2, "data": 2, "remat": "full", "exchange": "groups"}),
        (BF16, {"pipeline": (2, "1f1b"), "fsdp": 2}),
    ],
    ids=["params", "both", "groups", "pipeline"],
)
def test_a_mesh_trains_as_one_device_does(numbers: Numbers, layout: Any) -> None:
    accumulated = {"gradient_accumulation_steps": 2}
    alone, mesh = (program_of(numbers, **accumulated, **more) for more in ({}, layout))
    one, other = alone.init(seed=3), mesh.init(seed=3)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(one.params)} == {"float32", "bfloat16"}
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(one.opt_state) if leaf.ndim)
    (one, first), (other, second) = stepped(alone, one, 0), stepped(mesh, other, 0)
    assert float(first["loss"]) == pytest.approx(float(second["loss"]), rel=1e-5)
    assert float(first["grad_norm"]) == pytest.approx(float(second["grad_norm"]), rel=1e-2)
    expected, got = host(one.params), host(mesh.in_order(other.params))
    for name, value in expected.items():
        assert value.dtype == got[name].dtype
        a, b = value.astype(np.float32), got[name].astype(np.float32)
        assert np.abs(a - b).max() <= max(2**-7 * np.abs(a).max(), 1e-3), name
        if numbers is BF16 and "pipeline" not in layout and value.dtype != np.float32:
            # The draws are the same; each replica's gradient is rounded to bf16 alone, so few fall on another side.
            assert (a != b).mean() < 0.05, name


def test_gradients_of_a_frequent_token_are_summed_whole() -> None:
    from dsjax.models.layers import Embedding

    def gradient(dtype: Any) -> np.ndarray:
        layer = Embedding(4, 8, init=jax.nn.initializers.ones, rngs=nnx.Rngs(0))
        layer.embedding.value = layer.embedding[...].astype(dtype)
        tokens = jnp.ones((4, 1024), jnp.int32)
        found = nnx.grad(lambda layer: jnp.sum(layer(tokens).astype(jnp.float32)))(layer)
        return np.asarray(found.embedding[...], np.float32)

    assert gradient(jnp.float32)[1].tolist() == gradient(jnp.bfloat16)[1].tolist() == [4096.0] * 8


def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    program = program_of(BOTH, fsdp=2, gradient_accumulation_steps=2)
    state, _ = stepped(program, program.init(seed=3), 0)
    store = DiskCheckpoints(tmp_path)
    store.save(1, state, program.facts())
    store.wait()
    back, _ = restore(program, store)
    on, again = (host(stepped(program, one, 1)[0].params) for one in (state, back))
    for name, value in on.items():
        np.testing.assert_array_equal(value, again[name])
    with pytest.raises(
        dsjax.InputError, match=r"bfloat16 in the checkpoint, float32 in this model .*precision"
    ):
        restore(program_of(Numbers(), fsdp=2), store)
    store.close()


def test_a_plan_counts_what_is_held() -> None:
    plain, small = (parts_of(program_of(numbers, fsdp=2), {}) for numbers in (Numbers(), BOTH))
    for part in ("parameters", "gradients"):
        assert 0.5 < small[part] / plain[part] < 0.52
    assert small["optimizer"] == plain["optimizer"]


def test_fp32_is_as_it_was() -> None:
    plain = oracle.program_of({**oracle.PLAIN, "gradient_accumulation_steps": 2})
    batch = plain.place(oracle.batch_of("full", 0))
    text = plain.lower_step(batch).as_text()
    assert "bf16" not in text and "threefry" not in text


def test_what_does_not_go_together_is_refused() -> None:
    for section, line in (
        (
            {"mesh": {"pipeline": 2}, "precision": {"gradients": "bfloat16"}},
            r"^precision\.gradients: .*pipeline",
        ),
        (
            {"diloco": {"inner_steps": 2}, "precision": {"params": "bfloat16"}},
            r"^precision\.params: .*diloco",
        ),
    ):
        config = from_dict({**section, "train": {"steps": 4}})
        mesh = make_mesh(config.mesh, jax.devices()[:2])
        with pytest.raises(dsjax.ConfigError, match=line):
            lay_out(oracle.program_of(oracle.PLAIN).recipe, config, mesh)

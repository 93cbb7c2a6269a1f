"""Optimizer state in bf16 and in 8 bits: what is rounded how, and that training with it goes as it should."""

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

from dsjax.checkpoint import DiskCheckpoints
from dsjax.mesh import named_leaves
from dsjax.precision.small_state import BLOCK, decoded, encoded, small_state
from dsjax.train.optimizers import make_optimizer
from dsjax.train.resume import restore


@pytest.mark.parametrize("square", [False, True])
def test_eight_bits_keep_large_and_small_numbers(square: bool) -> None:
    rng = np.random.default_rng(0)
    x = np.exp(rng.normal(size=(4, 512)) * 3).astype(np.float32)
    x[0, :BLOCK] = 0
    x = x if square else x * rng.choice([-1, 1], x.shape)
    codes, scales = encoded(jnp.asarray(x), square)
    assert codes.dtype == (jnp.uint8 if square else jnp.int8) and scales.shape == (4, 512 // BLOCK)
    got = np.asarray(decoded(codes, scales, square))
    part = np.abs(x) / np.repeat(np.asarray(scales), BLOCK, axis=1).clip(1e-30)
    # The largest power of ten has 2^7 (2^6) values, a smaller one half as many: of width 0.9 x 10^-k / 2^(7-k).
    bits = 8 if square else 7
    for power in range(4):
        inside = (part > 10.0 ** -(power + 1)) & (part <= 10.0**-power)
        width = 0.9 * 10.0**-power / 2 ** (bits - 1 - power)
        error = np.abs(got - x) / np.repeat(np.asarray(scales), BLOCK, axis=1).clip(1e-30)
        assert inside.any() and error[inside].max() <= width * 0.76
    assert (got[0, :BLOCK] == 0).all() and (np.sign(got) == np.sign(x))[part > 1e-6].all()
    if square:
        assert ((got > 0) == (x > 0)).all()  # what is divided by is not made 0


def test_bf16_is_rounded_up_and_down_with_the_right_odds() -> None:
    third = jnp.full((64, 1024), 1 + 1 / 384, jnp.float32)  # a third of the way to the next number of bf16
    small = small_state(optax.trace(1.0), "bfloat16")
    state = small.init(third)
    _, state = small.update(third, state)
    held = np.asarray(named_leaves(state.codes)["trace"].astype(jnp.float32))
    assert set(np.unique(held)) == {1.0, 1 + 1 / 128}
    # 65536 draws: the mean is within five standard deviations of the number.
    assert abs(held.mean() - float(third[0, 0])) < 5 * (1 / 128) * np.sqrt(2 / 9 / held.size)
    _, again = small.update(jnp.zeros_like(third), state)
    assert np.array_equal(np.asarray(named_leaves(again.codes)["trace"].astype(jnp.float32)), held)


@pytest.mark.parametrize("kind", ["adamw", "lion", "muon", "sgd"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_small_state_trains_about_as_fp32(kind: str, dtype: str) -> None:
    from dsjax.config import from_dict

    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 64)).astype(np.float32)
    wanted = rng.normal(size=(64, 128)).astype(np.float32)

    def loss(params: Any) -> jax.Array:
        return jnp.mean((x @ params["kernel"] + params["bias"] - x @ wanted) ** 2)

    def trained(state_dtype: str) -> tuple[float, Any]:
        section = {"kind": kind, "state_dtype": state_dtype, "weight_decay": 0.0}
        config = from_dict({"optimizer": section}).optimizer
        rate = {"sgd": 2.0, "lion": 3e-2}.get(kind, 0.1)
        schedule = optax.linear_schedule(rate, 0.0, 200)
        optimizer = make_optimizer(config, schedule, lambda path: None)

        @jax.jit
        def step(params: Any, state: Any) -> Any:
            updates, state = optimizer.update(jax.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        params = {"kernel": jnp.zeros((64, 128)), "bias": jnp.zeros(128)}
        state = optimizer.init(params)
        for _ in range(200):
            params, state = step(params, state)
        return float(loss(params)), state

    (plain, full), (small, held) = trained("float32"), trained(dtype)
    start = float(loss({"kernel": jnp.zeros((64, 128)), "bias": jnp.zeros(128)}))
    assert plain < 0.05 * start and abs(small - plain) < 0.005 * start
    size = {
        name: sum(leaf.nbytes for leaf in jax.tree.leaves(s)) for name, s in (("full", full), ("small", held))
    }
    assert size["small"] < {"bfloat16": 0.6, "int8": 0.35}[dtype] * size["full"]


@pytest.mark.parametrize(
    "layout", [{"fsdp": 4}, {"data": 2, "tensor": 2, "exchange": "pairs"}, {"pipeline": (2, "1f1b")}], ids=str
)
def test_small_state_lies_where_its_parameters_lie_and_comes_back(layout: Any, tmp_path: Path) -> None:
    program = oracle.program_of({**oracle.PLAIN, **layout})
    optimizer = small_state(optax.adamw(1e-3), "int8")
    program = replace(program, recipe=replace(program.recipe, make_optimizer=lambda names: optimizer))
    state = program.init(seed=3)
    params = named_leaves(state.params)

    def stepped(state: Any, number: int) -> Any:
        batch = program.place(oracle.batch_of("full", number))
        return program.step(batch)(state, batch, program.votes())[0]

    state = stepped(state, 0)
    adam = state.opt_state.codes[0]
    for name, code in named_leaves(adam.nu).items():
        if code.dtype == jnp.uint8:
            assert code.sharding.is_equivalent_to(params[name].sharding, code.ndim)
    assert sum(code.dtype == jnp.uint8 for code in jax.tree.leaves(adam.nu)) == 6
    store = DiskCheckpoints(tmp_path)
    store.save(1, state, program.facts())
    store.wait()
    back, _ = restore(program, store)
    store.close()
    on, again = (named_leaves(stepped(one, 1).params) for one in (state, back))
    for name, value in on.items():
        np.testing.assert_array_equal(value, again[name])

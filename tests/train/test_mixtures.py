"""Training mixtures of experts: biases of routers, formats of experts, what metrics tell."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from dsjax.mesh import named_leaves
from dsjax.models.moe.router import RouterBias

BIAS = "layers/mlp/router/bias"
MIXTRAL = {**oracle.PLAIN, "model": "mixtral", "layers": 2}


def steps(settings: dict[str, Any], batches: list[dict[str, np.ndarray]]) -> Any:
    program = oracle.program_of({**MIXTRAL, **settings})
    state, told = program.init(seed=3), []
    for batch in batches:
        placed = program.place(batch)
        state, metrics = program.step(placed)(state, placed, program.votes())
        told.append({name: float(value) for name, value in metrics.items() if jnp.ndim(value) == 0})
    return program, state, told


def bias_of(state: Any) -> np.ndarray:
    return np.asarray(named_leaves(state.model_state)[BIAS])


def test_biases_move_once_a_step_and_are_the_same_on_every_layout():
    batches = [oracle.batch_of("ragged", step) for step in range(2)]
    _, one, _ = steps({}, batches)
    moved = bias_of(one)
    assert moved.shape == (2, 8)
    assert (
        set(np.abs(moved).astype(float).round(4).ravel().tolist()) <= {0, 0.01, 0.02}
        and np.abs(moved).max() > 0.01
    )
    _, cut, _ = steps(
        {"data": 2, "expert": 2, "gradient_accumulation_steps": 2, "exchange": "groups"}, batches
    )
    np.testing.assert_array_equal(bias_of(cut), moved)
    assert named_leaves(cut.model_state)[BIAS].sharding.is_fully_replicated


def test_a_skipped_step_leaves_biases_as_they_were():
    batch = oracle.batch_of("full", 0)
    _, state, told = steps({"expert": 2}, [batch, {**batch, "weights": batch["weights"] * 0}])
    assert [m["applied"] for m in told] == [1, 0]
    first = steps({"expert": 2}, [batch])[1]
    np.testing.assert_array_equal(bias_of(state), bias_of(first))


def test_what_metrics_tell():
    _, _, told = steps({"expert": 2, "remat": "full"}, [oracle.batch_of("full", 0)])
    extras = {name.removeprefix("extra/"): m for name, m in told[0].items() if name.startswith("extra/")}
    assert extras.keys() == {"router_entropy", "router_balance", "dropped", "expert_load_max_over_mean"}
    assert 0 < extras["router_entropy"] <= np.log(8)
    assert extras["dropped"] == 0 and 1 < extras["expert_load_max_over_mean"] < 8
    assert extras["router_balance"] == pytest.approx(2, abs=0.2)


def test_evaluation_has_the_loss_of_tokens_alone():
    program, _, told = steps({}, [oracle.batch_of("full", 0)])
    batch = program.place_eval(oracle.batch_of("full", 0))
    start = program.init(seed=3)
    found = program.evaluation(batch)(start.params, start.model_state, batch)
    evaluated = float(found["loss"] / found["weight"])
    added = told[0]["loss"] - evaluated
    assert added == pytest.approx(0.1 * told[0]["extra/router_balance"] + 0.01 * np.log(8) ** 2, rel=0.02)


@pytest.mark.parametrize("cut", [{"expert": 4}, {"pipeline": (2, "1f1b"), "expert": 2, "tensor": 2}])
def test_bf16_reaches_the_experts(cut):
    batches = [oracle.batch_of("packed", step) for step in range(2)]
    program, _, told = steps({**cut, "format": "bf16"}, batches)
    assert {f"layers/mlp/experts/{x}_proj" for x in ("gate", "up", "down")} <= program._applied.narrow
    assert "layers/mlp/router" not in program._applied.narrow
    _, _, exact = steps({}, batches)
    for got, want in zip(told, exact, strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=3e-3)
        assert got["loss"] != want["loss"]


@pytest.mark.parametrize("scaling", ["tensor", "delayed", "block"])
def test_experts_multiply_in_fp8_with_scales_of_the_moment(scaling):
    program = oracle.program_of({**MIXTRAL, "format": f"fp8_{scaling}"})
    assert {"layers/mlp/experts", "layers/attention/q_proj"} <= set(program._applied.in_fp8)
    # A history is of one product; those of experts are in a loop.
    histories = {path for path in named_leaves(program.abstract_state.model_state) if "dot_general" in path}
    assert bool(histories) == (scaling == "delayed") and not any("experts" in path for path in histories)
    said = [note for note in program.notes if "by tensor" in note]
    assert bool(said) == (scaling == "delayed") and all("layers/mlp/experts" in note for note in said)


def test_biases_get_no_gradient_and_no_weight_decay():
    program = oracle.program_of(MIXTRAL)
    assert not any("bias" in name for name in named_leaves(program.abstract_state.params))
    leaves = jax.tree.leaves(program.abstract_state.model_state, is_leaf=lambda x: isinstance(x, RouterBias))
    assert any(isinstance(leaf, RouterBias) for leaf in leaves)


def test_codecs_reach_the_experts(monkeypatch):
    monkeypatch.setitem(oracle.EXCHANGES, "int4", {"codec": "int4", "min_size": 0})
    batches = [oracle.batch_of("ragged", step) for step in range(2)]
    program, _, told = steps({"data": 2, "expert": 2, "exchange": "int4"}, batches)
    assert program.parts.exchange.tensors["layers/mlp/experts/up_proj/kernel"].coded
    _, _, exact = steps({}, batches)
    assert told[0]["grad_norm"] == pytest.approx(exact[0]["grad_norm"], rel=0.03)
    assert told[0]["grad_norm"] != exact[0]["grad_norm"]
    assert told[1]["loss"] == pytest.approx(exact[1]["loss"], rel=1e-4)

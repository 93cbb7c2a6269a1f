"""The first steps dense, then a codec: on every path that gradients take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from flax import nnx

import dsjax
from dsjax.mesh import named_leaves

TOPK = {"codec": "topk", "fraction": 0.05, "min_size": 0, "dense": []}
PATHS = {
    "replicas": {"data": 4, "fsdp": 2},
    "groups": {"data": 2, "tensor": 2, "remat": "full"},
    "pipeline": {"data": 2, "pipeline": (2, "1f1b")},
}


@pytest.mark.parametrize("path", PATHS)
def test_the_first_steps_are_those_of_a_dense_run(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    overlap = {"overlap": True, "bucket_bytes": 20_000} if path == "groups" else {}
    exchanges = {"plain": {}, "warm": {**TOPK, **overlap, "warmup_steps": 2}}
    monkeypatch.setattr(oracle, "EXCHANGES", exchanges)
    losses: dict[str, list[float]] = {}
    owed = []
    for exchange in exchanges:
        program = oracle.program_of({**oracle.PLAIN, **PATHS[path], "layers": 2, "exchange": exchange})
        state, losses[exchange] = program.init(seed=3), []
        for number in range(1, 5):
            batch = program.place(oracle.batch_of("full", number))
            state, metrics = program.step(batch, number)(state, batch, program.votes())
            losses[exchange].append(float(metrics["loss"]))
            owed.append(any(np.any(leaf) for leaf in jax.tree.leaves(jax.device_get(state.residuals))))
    # The loss of step 4 is the first that follows from a coded gradient.
    np.testing.assert_allclose(losses["warm"][:3], losses["plain"][:3], rtol=1e-5)
    assert abs(losses["warm"][3] - losses["plain"][3]) > 1e-5
    assert owed[4:] == [False, False, True, True]


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.last = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)


def loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    logits = model.last(jax.nn.relu(model.first(batch["x"])))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.sum(), jnp.float32(losses.size)


def batches() -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    while True:
        yield {"x": rng.normal(size=(8, 16)).astype(np.float32), "y": rng.integers(0, 4, 8, dtype=np.int32)}


def trainer(place: Path, **more: Any) -> dsjax.Trainer:
    return dsjax.Trainer(
        init=Net, loss=loss, optimizer=optax.sgd(0.1), mesh={"data": 8}, run={"dir": str(place)},
        grad_sync={**TOPK, "warmup_steps": 3}, observe={"progress": "none", "log_every": 1}, **more,
    )  # fmt: skip


def test_a_run_and_steps_by_hand_change_over_alike_and_tell_of_it(tmp_path: Path) -> None:
    ran = trainer(tmp_path / "ran")
    end = ran.fit(batches(), steps=5)
    hand = trainer(tmp_path / "hand")
    state = hand.init()
    for _, batch in zip(range(5), batches(), strict=False):
        state, _ = hand.step(state, batch)
    for name, leaf in named_leaves(jax.device_get(end.params)).items():
        np.testing.assert_array_equal(named_leaves(jax.device_get(state.params))[name], leaf)
    events = [json.loads(line) for line in (tmp_path / "ran" / "events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["kind"] == "compiled" and e["what"] == "step"] == [0, 3]
    assert any("dense in the first 3 steps" in note for note in ran.notes)


def test_workers_that_train_apart_have_no_gradients_to_warm_up(tmp_path: Path) -> None:
    with pytest.raises(dsjax.ConfigError, match=r"grad_sync\.warmup_steps: workers that train apart"):
        trainer(tmp_path, diloco={"inner_steps": 2})

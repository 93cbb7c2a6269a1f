"""A gradient that is computed twice: the same unless a device computes wrong, which is named."""

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

import dsjax
from dsjax.config import from_dict
from dsjax.errors import ConfigError, FaultyDevice
from dsjax.faults import Faults
from dsjax.mesh import make_mesh
from dsjax.train.lay_out import lay_out
from dsjax.train.recheck import Recomputed
from dsjax.train.state import Numbers


class Net(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.layer = nnx.Linear(8, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def loss(model: Any, batch: Any) -> Any:
    return jnp.sum(model.dropout(model.layer(batch["x"])) ** 2), jnp.float32(batch["x"].shape[0])


def trainer_of(directory: Path, **more: Any) -> dsjax.Trainer:
    return dsjax.Trainer(
        lambda rngs: Net(rngs=rngs), loss, optax.sgd(1e-3), mesh={"data": 8}, run={"dir": str(directory)},
        observe={"progress": "none"}, stability={"check_recompute_every": 2}, **more,
    )  # fmt: skip


def data() -> Any:
    return ({"x": np.ones((8, 8), np.float32)} for _ in range(20))


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"data": 2, "fsdp": 2},
        {"data": 2, "tensor": 2, "exchange": "pairs"},
        {"fsdp": 2, "fsdp_gather": "step"},
    ],
    ids=str,
)
def test_the_device_that_computes_otherwise_is_named(layout: Any) -> None:
    program = oracle.program_of({**oracle.PLAIN, "dropout": 0.1, "gradient_accumulation_steps": 2, **layout})
    program = replace(program, numbers=Numbers(params=jnp.bfloat16))
    state, batch = program.init(seed=1), program.place(oracle.batch_of("ragged", 0))
    check = Recomputed(program, batch)
    assert check.differing(state, batch) == []
    last = program.mesh.devices.flat[-1].id
    assert check.differing(state, batch, struck=last) == [last]


def test_a_run_ends_and_names_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSJAX_FAULT", "bitflip@step=4,device=5,where=compute")
    with pytest.raises(FaultyDevice, match=r"step 4: .* device 5 computed .* goes on from step 2 or before$"):
        trainer_of(tmp_path).fit(data(), steps=8)
    assert '"recompute_differs"' in (tmp_path / "events.jsonl").read_text()


def test_a_check_changes_nothing_in_a_run(tmp_path: Path) -> None:
    checked = trainer_of(tmp_path / "a").fit(data(), steps=4)
    plain = dsjax.Trainer(
        lambda rngs: Net(rngs=rngs), loss, optax.sgd(1e-3), mesh={"data": 8}, run={"dir": str(tmp_path / "b")},
        observe={"progress": "none"},
    ).fit(data(), steps=4)  # fmt: skip
    for one, other in zip(jax.tree.leaves(checked.params), jax.tree.leaves(plain.params), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_a_pipeline_is_refused() -> None:
    config = from_dict({"mesh": {"pipeline": 2}, "stability": {"check_recompute_every": 2}})
    mesh = make_mesh(config.mesh, jax.devices()[:2])
    with pytest.raises(ConfigError, match=r"^stability\.check_recompute_every: .*mesh\.pipeline=1"):
        lay_out(oracle.program_of(oracle.PLAIN).recipe, config, mesh)


def test_a_fault_of_computing_does_not_turn_bits_in_memory() -> None:
    faults = Faults.of({"DSJAX_FAULT": "bitflip@step=4,device=5,where=compute"}, 0)
    assert faults.bit_to_flip(4) is None and faults.bit_to_flip(4, "compute") == 5
    with pytest.raises(ConfigError, match="where=disk"):
        Faults.of({"DSJAX_FAULT": "bitflip@step=4,where=disk"}, 0)

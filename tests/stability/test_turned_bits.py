"""Replicas that differ by a bit are found, and the device is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dsjax
from dsjax.config import from_dict
from dsjax.errors import FaultyDevice
from dsjax.mesh import make_mesh
from dsjax.stability.replicas import Replicas, flipped


@pytest.fixture(scope="module")
def tree() -> dict[str, jax.Array]:
    mesh = make_mesh(from_dict({"mesh": {"data": 4, "fsdp": 2}}).mesh, jax.devices())

    def on(array: Any, *spec: Any) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, P(*spec)))

    return {
        "whole": on(jnp.arange(12.0)),
        "cut": on(jnp.arange(24.0).reshape(4, 6), "fsdp"),
        "alone": on(jnp.arange(16.0), ("data", "fsdp")),
        "codes": on(jnp.arange(8, dtype=jnp.uint8)),
        "narrow": on(jnp.arange(8, dtype=jnp.bfloat16), "fsdp"),
    }


def test_arrays_that_are_alike_are_found_to_be(tree: dict[str, jax.Array]) -> None:
    assert Replicas(tree["whole"].sharding.mesh, tree).differing(tree) == {}


@pytest.mark.parametrize("bit", [0, 20, 31])
@pytest.mark.parametrize("device", [0, 5])
def test_a_turned_bit_names_array_and_device(tree: dict[str, jax.Array], bit: int, device: int) -> None:
    replicas = Replicas(tree["whole"].sharding.mesh, tree)
    for name in ("whole", "cut"):
        wrong = {**tree, name: flipped(tree[name], device, bit)}
        assert replicas.differing(wrong) == {name: [device]}
    # Nobody else holds these numbers.
    assert replicas.differing({**tree, "alone": flipped(tree["alone"], device, bit)}) == {}


def test_of_two_that_differ_both_are_named() -> None:
    mesh = make_mesh(from_dict({"mesh": {"data": 2, "fsdp": 4}}).mesh, jax.devices())
    array = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("fsdp")))
    assert Replicas(mesh, {"x": array}).differing({"x": flipped(array, 1)}) == {"x": [1, 5]}


def test_a_run_ends_and_names_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.layer = nnx.Linear(8, 4, rngs=rngs)

    def loss(model: Any, batch: Any) -> Any:
        return jnp.sum(model.layer(batch["x"]) ** 2), jnp.float32(batch["x"].shape[0])

    monkeypatch.setenv("DSJAX_FAULT", "bitflip@step=5,device=3")
    trainer = dsjax.Trainer(
        lambda rngs: Net(rngs=rngs), loss, optax.sgd(1e-3), mesh={"data": 8}, run={"dir": str(tmp_path)},
        observe={"progress": "none"}, stability={"check_replicas_every": 2},
    )  # fmt: skip
    data = ({"x": np.ones((8, 8), np.float32)} for _ in range(20))
    with pytest.raises(
        FaultyDevice, match=r"step 6: replicas differ, which no program does: device 3 holds other"
    ):
        trainer.fit(data, steps=20)

"""Faults inside a model strike the layer, the operator and the device that they name, and nothing else."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dsjax
from dsjax.errors import ConfigError
from dsjax.models.calls import intercepted
from dsjax.models.stack import run_stacked, stacked

ROWS = 8


class Block(nnx.Module):
    """x + mlp(norm(x)), as people write it."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.attn = nnx.Linear(4, 4, rngs=rngs)
        self.mlp = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(x)
        return x + jnp.tanh(self.mlp(self.norm(x)))


class Listed(nnx.Module):
    """A list of blocks."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


class Looped(nnx.Module):
    """The same in a loop."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = stacked(Block, 3, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return run_stacked(self.layers, x, lambda layer, x: layer(x))


def loss(model: Any, batch: Any) -> Any:
    return jnp.sum((model(batch["x"]) - batch["y"]) ** 2), jnp.float32(len(batch["y"]))


def batch(step: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(step)
    return {n: draw.standard_normal((ROWS, 4)).astype(np.float32) for n in ("x", "y")}


def trainer(model: Any = Listed, mesh: Any = None, **more: Any) -> dsjax.Trainer:
    mesh = mesh or {"fsdp": 1}
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    return dsjax.Trainer(lambda rngs: model(rngs), loss, optax.sgd(0.01), mesh=mesh, devices=devices, **more)


def trained(
    monkeypatch: pytest.MonkeyPatch, fault: str, *args: Any, **more: Any
) -> list[tuple[float, float, bool]]:
    """(loss, norm, applied) of four steps."""
    monkeypatch.setenv("DSJAX_FAULT", fault)
    made = trainer(*args, **more)
    state, told = made.init(0), []
    for step in range(4):
        state, metrics = made.step(state, batch(step))
        told.append((float(metrics["loss"]), float(metrics["grad_norm"]), bool(metrics["applied"])))
    assert len([what for what, _ in made.compiles if what == "step"]) == 1
    return told


@pytest.mark.parametrize("model", [Listed, Looped])
@pytest.mark.parametrize("where", ["layer=1", "layer=1,op=ffn", "op=norm", "op=loss"])
def test_the_step_that_is_named_goes_wrong_and_no_other(
    model: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = trained(monkeypatch, "", model)
    forward = trained(monkeypatch, f"nan@step=2,{where}", model)
    assert [one[2] for one in forward] == [True, False, True, True] and np.isnan(forward[1][0])
    np.testing.assert_allclose(forward[0], clean[0], rtol=1e-6)
    backward = trained(monkeypatch, f"inf@step=2,{where},pass=backward", model)
    assert [one[2] for one in backward] == [True, False, True, True]
    np.testing.assert_allclose(backward[1][0], clean[1][0], rtol=1e-6)


@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 2}, {"fsdp": 4}], ids=str)
def test_only_the_rows_on_a_device_go_wrong(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of a step is what it is where the same rows are made as large by hand."""
    told = trained(monkeypatch, "spike@step=1,op=blocks/2,device=2,factor=10", Listed, mesh)
    monkeypatch.setenv("DSJAX_FAULT", "")
    made = trainer()
    model = made.model(made.init(0))
    rows = np.where(np.arange(ROWS) // 2 == 2, 10.0, 1.0)[:, None]
    want = jnp.sum((model(batch(0)["x"]) * rows - batch(0)["y"]) ** 2) / ROWS
    np.testing.assert_allclose(told[0][0], want, rtol=1e-5)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (
            "nan@step=1,op=conv",
            "means no module that is called; there are attention, ffn, norm, loss, blocks/0, ",
        ),
        ("nan@step=1,layer=3", "means no module that is called in layer 3; there are attention, ffn,"),
        ("nan@step=1,layer=1,op=ffn,device=9", "the mesh has no device 9; it has 0"),
        ("nan@step=1,device=1", "device needs op or layer, as in nan@step=12,layer=1,op=ffn,device=0"),
        ("nan@step=1,layer=1,op=loss", "the loss is of no layer and of no device; leave those out"),
        ("nan@step=1,pass=both", "pass is forward or backward, got both"),
        ("nan@step=1,layer=-1", "takes numbers from 0 on"),
        ("kill@step=1,layer=1", "knows no layer; kill takes step, rank, attempt"),
    ],
)
def test_a_place_that_there_is_not_is_refused(fault: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as refused:
        trained(monkeypatch, fault)
    assert told in refused.value.faults[0]


def test_a_model_that_is_not_opened_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSJAX_FAULT", "")
    made, seen = trainer(), []
    model = made.model(made.init(0))
    with intercepted(lambda call, run, args, kwargs: seen.append(call) or run(*args, **kwargs)):
        model(batch(0)["x"])
    assert not seen and type(model) is Listed

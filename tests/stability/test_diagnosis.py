"""A step that is not finite is traced to the layer, the operator and the device that were the first."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from test_injected import Listed, Looped, batch, loss, trainer

import dsjax
from dsjax.errors import Diverged

STEPS = 6


def located(directory: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["kind"] == "nonfinite_located"]


def told(
    tmp_path: Path,
    model: Any = Listed,
    mesh: Any = None,
    data: Callable[[int], Any] = batch,
    **more: Any,
) -> list[dict[str, Any]]:
    """The events of a run."""
    made = trainer(
        model, mesh, run={"dir": str(tmp_path)}, checkpoint={"disk": {"every": 0}},
        observe={"progress": "none", "log_every": 1}, **more,
    )  # fmt: skip
    made.fit((data(step) for step in range(STEPS)), steps=STEPS)
    return located(tmp_path)


def what(event: dict[str, Any]) -> tuple[Any, ...]:
    return event["step"], event["direction"], event["layer"], event["operator"], event["what"]


@pytest.mark.parametrize(
    ("model", "fault", "found"),
    [
        (Looped, "nan@step=2,layer=1,op=ffn", (2, "forward", 1, "layers/mlp", "output")),
        (Looped, "inf@step=2,layer=2", (2, "forward", 2, "layers", "output")),
        (
            Looped,
            "nan@step=2,layer=0,op=attention,pass=backward",
            (2, "backward", 0, "layers/attn", "gradient of its input"),
        ),
        (Looped, "nan@step=6,op=loss", (6, "forward", None, "loss", "output")),
        (Looped, "nan@step=2,pass=backward", (2, "backward", None, "loss", "gradient of the output of the model")),
        (Listed, "nan@step=2,layer=1,op=ffn", (2, "forward", 1, "blocks/1/mlp", "output")),
        (Listed, "inf@step=2,layer=2,pass=backward", (2, "backward", 2, "blocks/2", "gradient of the output of mlp")),
    ],
)  # fmt: skip
def test_a_fault_is_found_where_it_was_put(
    model: Any, fault: str, found: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSJAX_FAULT", fault)
    (event,) = told(tmp_path, model)
    assert what(event) == found and event["rows"] == [] and event["devices"] == []


@pytest.mark.parametrize(
    ("mesh", "remat"),
    [({"data": 4}, "full"), ({"fsdp": 4}, "none"), ({"data": 2, "fsdp": 2}, "none")],
    ids=str,
)
def test_the_device_and_the_microbatch_are_named(
    mesh: Any, remat: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSJAX_FAULT", "nan@step=3,layer=1,op=attn,device=2")
    more = {"gradient_accumulation_steps": 2, "remat": remat}
    (event,) = told(tmp_path, Looped, mesh, **more)
    assert what(event) == (3, "forward", 1, "layers/attn", "output")
    assert event["devices"] == [2] and event["microbatch"] == 0 and event["rows"] == [2]


def test_data_of_one_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSJAX_FAULT", "")

    def data(step: int) -> Any:
        made = batch(step)
        if step in (2, 3):
            made["x"][5] = np.inf
        return made

    (event,) = told(tmp_path, Listed, {"data": 2}, data, gradient_accumulation_steps=2)
    assert event["operator"] == "batch" and (event["step"], event["microbatch"], event["rows"]) == (3, 1, [5])
    assert event["devices"] == [0]


class Large(nnx.Module):
    """Its second projection overflows for one example of data that are finite."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
        self.second = nnx.Linear(4, 4, use_bias=False, kernel_init=nnx.initializers.constant(1e6), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.first(x) * 1e10)


def test_an_overflow_is_found_with_what_went_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSJAX_FAULT", "")

    def data(step: int) -> Any:
        made = {"x": batch(step)["x"] * 1e-16, "y": batch(step)["y"]}
        made["x"][3] = 1e25 if step == 1 else 0
        return made

    (event,) = told(tmp_path, Large, data=data)
    assert what(event) == (2, "forward", None, "second", "output") and event["rows"] == [3]
    assert event["largest"] > 1e34 and math.isfinite(event["largest"])


class Rooted(nnx.Module):
    """The derivative of a root at 0: finite forward, not finite backward."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.inner(x)
        return y + jnp.sqrt(jnp.maximum(y, 0.0))


def test_a_derivative_that_is_not_finite_between_two_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSJAX_FAULT", "")
    made = trainer(
        Rooted, run={"dir": str(tmp_path)}, observe={"progress": "none"}, checkpoint={"disk": {"every": 0}},
        stability={"give_up_after": 2},
    )  # fmt: skip
    data = [{"x": np.zeros((8, 4), np.float32), "y": np.ones((8, 4), np.float32)}] * 4
    with pytest.raises(Diverged):
        made.fit(iter(data), steps=4)
    (event,) = located(tmp_path)  # once for the row of skipped steps, before the run gives up
    assert what(event) == (1, "backward", None, "", "gradient of the output of inner")


def test_a_linen_model_is_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import flax.linen as nn

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            inner = nn.Dense(4, name="inner", kernel_init=nn.initializers.constant(10.0))(x)
            return nn.Dense(4, name="outer")(inner)

    monkeypatch.setenv("DSJAX_FAULT", "")
    made = dsjax.Trainer(
        lambda rngs: nnx.bridge.ToNNX(Mlp(), rngs=rngs).lazy_init(jnp.zeros((1, 4))), loss, optax.sgd(0.01),
        mesh={"fsdp": 1}, devices=jax.devices()[:1], run={"dir": str(tmp_path)}, checkpoint={"disk": {"every": 0}},
        observe={"progress": "none"},
    )  # fmt: skip

    def data(step: int) -> Any:
        made = {"x": batch(step)["x"] * 0.01, "y": batch(step)["y"]}
        made["x"][3] = 3e38 if step == 1 else 0
        return made

    made.fit((data(step) for step in range(STEPS)), steps=STEPS)
    (event,) = located(tmp_path)
    assert event["operator"] == "inner" and event["rows"] == [3]


def test_what_is_not_seen_again_is_said_and_a_sound_run_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSJAX_FAULT", "nan@step=2")
    (event,) = told(tmp_path / "again")
    assert not event["found"] and "all of it is finite" in event["reason"]
    monkeypatch.setenv("DSJAX_FAULT", "")
    assert told(tmp_path / "sound") == []
    monkeypatch.setenv("DSJAX_FAULT", "nan@step=2,op=norm")
    assert told(tmp_path / "off", stability={"locate_nonfinite": False}) == []


@pytest.mark.parametrize("policy", ["fp16", "bf16"])
def test_in_half_precision(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSJAX_FAULT", "nan@step=2,layer=1,op=ffn")
    (event,) = told(tmp_path, Looped, {"fsdp": 2}, precision={"policy": policy})
    assert what(event) == (2, "forward", 1, "layers/mlp", "output")


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_inside_a_pipeline(schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = dsjax.Stages(
        embed=lambda model, batch: batch["x"],
        layer=lambda layer, x, batch: layer(x),
        head=lambda model, x, batch: (jnp.sum((x - batch["y"]) ** 2), jnp.float32(len(batch["y"]))),
        layers="layers",
    )
    monkeypatch.setenv("DSJAX_FAULT", "nan@step=2,layer=2,op=attn,pass=backward,device=3")
    made = dsjax.Trainer(
        Looped, None, optax.sgd(0.01), stages=stages, mesh={"pipeline": 2, "data": 2}, devices=jax.devices()[:4],
        pipeline={"schedule": schedule, "microbatches": 2}, run={"dir": str(tmp_path)},
        checkpoint={"disk": {"every": 0}}, observe={"progress": "none"},
    )  # fmt: skip
    made.fit((batch(step) for step in range(STEPS)), steps=STEPS)
    (event,) = located(tmp_path)
    assert what(event)[:4] == (2, "backward", 2, "layers/attn") and event["microbatch"] == 0
    # Device 3 has the second half of a microbatch in the second stage; device 1 has it in the first.
    assert event["rows"] == [2, 3] and event["devices"] == [1, 3]

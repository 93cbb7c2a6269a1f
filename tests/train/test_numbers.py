"""fp16 with its loss scale, steps that overflow, and steps computed again in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_fit import Net, lines, loader, loss

import dsjax
from dsjax.aot.hlo import parse
from dsjax.mesh import named_leaves

MESHES: tuple[dict[str, Any], ...] = ({"data": 2, "fsdp": 4}, {"fsdp": 8})


def made(
    directory: Path, policy: str = "fp16", mesh: Any = None, scale: Any = None, **stability: Any
) -> dsjax.Trainer:
    return dsjax.Trainer(
        lambda rngs: Net(rngs=rngs), loss, optax.adam(1e-2, eps=1e-4), mesh=mesh or MESHES[0],
        run={"dir": str(directory)}, observe={"log_every": 1, "progress": "none"},
        precision={"policy": policy, "loss_scale": scale or {}}, stability=stability,
    )  # fmt: skip


def numbers(tree: Any) -> dict[str, np.ndarray]:
    def plain(leaf: Any) -> np.ndarray:
        key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(leaf) if key else leaf)

    return {name: plain(leaf) for name, leaf in named_leaves(tree).items()}


def batch() -> Any:
    return next(iter(loader()))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_step_that_overflows_changes_the_scale_and_nothing_else(mesh: Any, tmp_path: Path) -> None:
    trainer = made(tmp_path, mesh=mesh, scale={"initial": 2.0**24}, clip="median")
    state = trainer.init(seed=0)
    before = numbers(state)
    state, metrics = trainer.step(state, batch())
    after = numbers(state)
    assert not metrics["applied"] and bool(metrics["overflow"])
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {
        "step", "data_step", "tokens_seen", "guards/scaling/spare", "guards/scaling/rate", "guards/scaling/overflows",
    }  # fmt: skip
    state, _ = trainer.step(state, batch())
    assert float(state.guards["scaling"].scale) == 2.0**23 and int(state.skipped) == 0


def test_from_a_scale_that_is_too_high_a_run_comes_down_and_goes_on(tmp_path: Path) -> None:
    def told(directory: Path, kind: str) -> list[int]:
        return [e["step"] for e in lines(directory, "events.jsonl") if e["kind"] == kind]

    whole, halves = tmp_path / "whole", tmp_path / "halves"
    state = made(whole, scale={"initial": 2.0**24}).fit(loader(), steps=30)
    overflows = told(whole, "overflow")
    # More in a row than may be skipped: a scale that comes down is no reason to give up.
    assert overflows[:10] == list(range(1, 11)) and overflows[-1] < 20 and not told(whole, "skipped")
    assert int(state.updates) == 30 - len(overflows)
    records = lines(whole)
    assert records[0]["loss_scale"] == 2.0**24 and records[-1]["overflows"] == len(overflows)
    made(halves, scale={"initial": 2.0**24}).fit(loader(), steps=3)
    made(halves, scale={"initial": 2.0**24}).fit(loader(), steps=30)
    assert [r["loss"] for r in lines(halves)] == [r["loss"] for r in records]


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_narrow_types_train_about_as_fp32(policy: str, tmp_path: Path) -> None:
    for name in (policy, "fp32"):
        made(tmp_path / name, name, scale={"initial": 2.0**10, "maximum": 2.0**10}).fit(loader(), steps=30)
    got, want = ([r["loss"] for r in lines(tmp_path / name)] for name in (policy, "fp32"))
    # The first loss differs by roundings of the forward alone: 8 or 11 bits, in two products.
    np.testing.assert_allclose(got[0], want[0], rtol={"bf16": 2**-6, "fp16": 2**-9}[policy])
    np.testing.assert_allclose(np.mean(got[-8:]), np.mean(want[-8:]), rtol=0.05)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_step_that_is_not_finite_is_computed_again_in_fp32(mesh: Any, tmp_path: Path) -> None:
    trainer = made(tmp_path / "fp16", mesh=mesh, scale={"initial": 2.0**24}, on_nonfinite="recompute")
    state, metrics = trainer.step(trainer.init(seed=0), batch())
    exact = made(tmp_path / "fp32", "fp32", mesh)
    wanted, _ = exact.step(exact.init(seed=0), batch())
    assert metrics["applied"] and metrics["recomputed"] and int(state.updates) == 1
    for name, value in numbers(wanted.params).items():
        np.testing.assert_allclose(numbers(state.params)[name], value, rtol=1e-6, atol=1e-7)
    # The scale learns of it all the same.
    assert int(state.guards["scaling"].overflows) == 1
    trainer.fit(loader(), steps=6)
    events = [e["step"] for e in lines(tmp_path / "fp16", "events.jsonl") if e["kind"] == "recomputed"]
    assert events == [1, 2, 3, 4, 5, 6][: len(events)] and events


def test_what_is_not_finite_in_fp32_either_is_skipped(tmp_path: Path) -> None:
    trainer = made(tmp_path, on_nonfinite="recompute")
    bad = batch()
    bad["y"] = np.full_like(bad["y"], 3e38)
    state, metrics = trainer.step(trainer.init(seed=0), bad)
    assert not metrics["applied"] and not metrics["recomputed"] and int(state.skipped) == 1
    # It is the batch that is at fault, not the scale.
    assert (
        int(state.guards["scaling"].overflows) == 0 and state.guards["scaling"].scale == metrics["loss_scale"]
    )


def test_a_guard_that_the_checkpoint_does_not_hold_begins_anew(tmp_path: Path) -> None:
    made(tmp_path, "fp32").fit(loader(), steps=3)
    again = dsjax.Trainer(
        lambda rngs: Net(rngs=rngs), loss, optax.adam(1e-2, eps=1e-4), mesh=MESHES[0], run={"dir": str(tmp_path)},
        observe={"log_every": 1, "progress": "none"}, precision={"policy": "fp16"}, stability={"clip": "median"},
        allow_config_change=True,
    )  # fmt: skip
    state = again.fit(loader(), steps=5)
    (resumed,) = [e for e in lines(tmp_path, "events.jsonl") if e["kind"] == "resumed"]
    assert len(resumed["notes"]) == 2 and "the loss scale begins anew" in " ".join(resumed["notes"])
    assert int(state.step) == 5 and int(state.guards["clipping"].seen) == int(state.updates) - 3


def in_fp8(directory: Path, mesh: Any = None, **fp8: Any) -> dsjax.Trainer:
    return dsjax.Trainer(
        lambda rngs: Net(rngs=rngs), loss, optax.adam(1e-2, eps=1e-4), mesh=mesh or MESHES[0],
        run={"dir": str(directory)}, observe={"log_every": 1, "progress": "none"},
        checkpoint={"disk": {"every": 3}}, allow_config_change=True,
        precision={"policy": "bf16", "table": {"inner": "fp8", "outer": "fp8"}, "fp8": fp8},
    )  # fmt: skip


def histories(state: Any) -> dict[str, np.ndarray]:
    leaves = {name: np.asarray(leaf) for name, leaf in numbers(state.model_state).items()}
    return {name: leaf for name, leaf in leaves.items() if name.endswith(("/inputs", "/gradients"))}


def test_delayed_scales_go_on_after_a_resume_to_the_bit(tmp_path: Path) -> None:
    whole = in_fp8(tmp_path / "whole", scaling="delayed").fit(loader(), 6)
    in_fp8(tmp_path / "cut", scaling="delayed").fit(loader(), 3)
    cut = in_fp8(tmp_path / "cut", scaling="delayed").fit(loader(), 6)
    want, got = numbers(whole), numbers(cut)
    assert all(np.array_equal(want[name], got[name]) for name in want)
    kept = histories(whole)
    assert kept and all((leaf[..., :6] > 0).all() for leaf in kept.values())


def test_other_scales_begin_anew_where_a_checkpoint_has_none_like_them(tmp_path: Path) -> None:
    in_fp8(tmp_path, scaling="delayed", history=4).fit(loader(), 3)
    assert not histories(in_fp8(tmp_path, scaling="tensor").fit(loader(), 6))
    state = in_fp8(tmp_path, scaling="delayed", history=2).fit(loader(), 9)
    assert {leaf.shape[-1] for leaf in histories(state).values()} == {2}
    told = [e["notes"] for e in lines(tmp_path, "events.jsonl") if e["kind"] == "resumed"]
    assert "left out" in told[0][0] and "begin anew" in told[1][0]


CHECKS: tuple[dict[str, Any], ...] = (
    {},
    {"clip": "median", "clip_groups": "parts"},
    {"on_nonfinite": "recompute"},
    {"on_nonfinite": "rollback", "rollback_learning_rate": 0.5},
)


@pytest.mark.parametrize("policy", ["fp16", "bf16"])
@pytest.mark.parametrize("stability", CHECKS, ids=str)
def test_no_check_asks_the_host(policy: str, stability: dict[str, Any], tmp_path: Path) -> None:
    trainer = made(tmp_path, policy=policy, **stability)
    program, given = trainer.program, batch()
    compiled = program.step(program.place(given))
    module = parse(compiled.as_text())
    opcodes = {i.opcode for c in module.computations.values() for i in c.instructions}
    calls = {
        i.attributes.get("custom_call_target", "")
        for c in module.computations.values() for i in c.instructions if i.opcode == "custom-call"
    }  # fmt: skip
    assert not opcodes & {"infeed", "outfeed", "send", "recv"}
    assert not [call for call in calls if "callback" in call]

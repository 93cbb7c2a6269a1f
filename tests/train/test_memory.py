"""Memory by the compiler's own accounting: ZeRO-3, recomputation, and a step that does not fit."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from oracle import PLAIN, batch_of, program_of

import dsjax
from dsjax.mesh import named_leaves
from dsjax.train import program as program_module
from dsjax.train.memory import bytes_a_device
from dsjax.train.program import Program


def arrays(program: Program, part: str) -> Any:
    """The arrays of a part of the state; its counts are whole everywhere."""
    return [leaf for leaf in jax.tree.leaves(getattr(program.abstract_state, part)) if leaf.ndim]


@pytest.mark.parametrize("shards", [2, 8])
def test_parameters_gradients_and_moments_fall_as_one_over_fsdp(shards: int) -> None:
    whole, cut = program_of(PLAIN), program_of({**PLAIN, "fsdp": shards})
    for part in ("params", "opt_state"):
        before = bytes_a_device(arrays(whole, part))
        after = bytes_a_device(arrays(cut, part))
        assert before / shards == after, part
    # What was really made lies so too; the oracle's optimizer state holds the gradients as they came.
    state = cut.init(seed=0)
    batch = cut.place(batch_of("full", 0))
    state, _ = cut.step(batch)(state, batch, cut.votes())
    for name, leaf in named_leaves((state.params, state.opt_state)).items():
        if leaf.ndim:
            assert leaf.addressable_shards[0].data.size * shards == leaf.size, name


def test_a_step_that_does_not_fit_is_refused_with_settings_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = program_of(PLAIN)
    needed = whole.step_bytes(whole.place(batch_of("full", 0)))
    smaller = program_of({**PLAIN, "gradient_accumulation_steps": 4})
    fitting = smaller.step_bytes(smaller.place(batch_of("full", 0)))
    assert needed is not None and fitting is not None and fitting < needed
    monkeypatch.setattr(program_module, "device_bytes", lambda devices: (needed + fitting) // 2)
    whole.alternatives = lambda: [("train.gradient_accumulation_steps=4", smaller)]
    with pytest.raises(dsjax.OutOfDeviceMemory) as error:
        whole.step(whole.place(batch_of("full", 0)))
    assert error.value.exit_code == 71
    assert "needs" in error.value.faults[0] and "would fit" in error.value.faults[1]
    assert error.value.faults[1].endswith("train.gradient_accumulation_steps=4")


def test_one_compile_and_no_donation_warning(recwarn: pytest.WarningsRecorder) -> None:
    compiled = []
    program = program_of({**PLAIN, "fsdp": 2})
    program.on_compile = lambda what, seconds: compiled.append(what)
    state = program.init(seed=0)
    for step in range(3):
        batch = program.place(batch_of("full", step))
        before = jax.tree.leaves(state.params)
        state, _ = program.step(batch)(state, batch, program.votes())
        assert all(leaf.is_deleted() for leaf in before), "the old state was copied, not donated"
    assert compiled == ["init", "step"]
    assert not [w for w in recwarn if "donat" in str(w.message).lower()]

"""Saved on any of six layouts, restored on any: bit for bit, from memory and from disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from oracle import PLAIN, batch_of, program_of

from dsjax.checkpoint import DiskCheckpoints, MemorySnapshots
from dsjax.checkpoint.tree import to_stored
from dsjax.config.checkpoint import MemoryConfig
from dsjax.config.exchange import GradSyncConfig
from dsjax.mesh import named_leaves
from dsjax.train.program import Program
from dsjax.train.resume import Store, restore
from dsjax.train.state import State

INT4 = GradSyncConfig(codec="int4", min_size=0)
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 8": {"data": 8},
    "fsdp 8": {"fsdp": 8},
    "data 2 fsdp 4": {"data": 2, "fsdp": 4},
    "fsdp 2 tensor 2 context 2": {"fsdp": 2, "tensor": 2, "context": 2},
    "pipeline 2 data 2 fsdp 2": {"pipeline": (2, "1f1b"), "data": 2, "fsdp": 2},
    "pipeline 2 interleaved data 4": {"pipeline": (2, "interleaved"), "data": 4},
}


def program(name: str) -> Program:
    return replace(program_of({**PLAIN, **LAYOUTS[name]}), grad_sync=INT4)


@pytest.fixture(scope="module")
def programs() -> dict[str, Program]:
    return {name: program(name) for name in LAYOUTS}


def stepped(made: Program) -> State:
    """A state with moments, random streams and (where there are replicas) residuals that are not zero."""
    batch = made.place(batch_of("full", 0))
    return made.step(batch)(made.init(seed=3), batch, made.votes())[0]


def told(made: Program, state: State) -> dict[str, np.ndarray]:
    """The state by name in the model's order; residuals apart."""
    leaves = named_leaves(made.in_order(replace(state, residuals={})))
    return {
        name: np.asarray(jax.device_get(value)) for name, value in named_leaves(to_stored(leaves)).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("source", LAYOUTS)
def test_what_was_saved_on_one_layout_is_restored_on_every_other(
    source: str, programs: dict[str, Program], tmp_path: Path
) -> None:
    made = programs[source]
    state = stepped(made)
    want, facts = told(made, state), {"step": 1, **made.facts()}
    memory = MemorySnapshots(MemoryConfig(path=str(tmp_path / "memory")), tmp_path, 1)
    memory.prepare(made.abstract_state, 0)
    memory.save(1, state, facts)
    disk = DiskCheckpoints(tmp_path / "disk")
    disk.save(1, state, facts)
    disk.wait()
    stores: tuple[Store, ...] = (memory, disk)
    for name, other in programs.items():
        for store in stores:
            got, _ = restore(other, store, 1)
            have = told(other, got)
            assert have.keys() == want.keys(), name
            for leaf, value in want.items():
                np.testing.assert_array_equal(have[leaf], value, f"{source} -> {name}: {leaf}")
            if name == source:
                theirs, ours = named_leaves(state.residuals), named_leaves(got.residuals)
                assert theirs.keys() == ours.keys()
                for leaf, value in theirs.items():
                    np.testing.assert_array_equal(np.asarray(ours[leaf]), np.asarray(value), leaf)
    memory.close()
    disk.close()

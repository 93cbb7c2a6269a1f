"""What XLA says a compiled step takes and gives is what the live arrays hold, byte for byte, on each device."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from oracle import PLAIN, batch_of, program_of

from dsjax.train.memory import bytes_a_device

LAYOUTS = {
    "one device": {},
    "fsdp": {"fsdp": 8},
    "data x fsdp x context": {"data": 2, "fsdp": 2, "context": 2, "rows": "packed"},
    "microbatches, full": {"data": 2, "fsdp": 2, "tensor": 2, "gradient_accumulation_steps": 2, "remat": "full"},
    "tied, gathered once, random streams": {"fsdp": 4, "tied": True, "fsdp_gather": "step", "dropout": 0.1},
    "another optimizer": {"context": 2, "tensor": 2, "optimizer": "muon"},
}  # fmt: skip
# A program of several results gives them as one tuple, which is a table of their addresses.
POINTER = 8


def held(tree: Any, device: jax.Device) -> int:
    """Bytes of the shards of a tree's arrays that lie on a device."""
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == device
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_bytes_are_those_of_the_live_shards(layout: str) -> None:
    settings = {**PLAIN, **LAYOUTS[layout]}
    program = program_of(settings)
    state, batch, votes = program.init(3), program.place(batch_of(settings["rows"], 0)), program.votes()
    step = program.step(batch)
    stats = step.memory_analysis()
    devices = list(program.mesh.devices.flat)
    before = [held((state, batch, votes), device) for device in devices]
    inputs = bytes_a_device((state, batch, votes))
    state, metrics = step(state, batch, votes)
    after = [
        held((state, metrics), device) + POINTER * len(jax.tree.leaves((state, metrics)))
        for device in devices
    ]
    assert before == [stats.argument_size_in_bytes] * len(devices) == [inputs] * len(devices)
    assert after == [stats.output_size_in_bytes] * len(devices)
    # The whole state is given back in the memory that it came in.
    assert {held(state, device) for device in devices} == {stats.alias_size_in_bytes}

"""What the exchange sends between nodes: compiled for two hosts of eight H100s."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from steps import BATCH, HIDDEN, LAYERS, MODEL, SEQUENCE, VOCABULARY

from dsjax import aot
from dsjax.config import from_dict
from dsjax.mesh import BATCH_AXES
from dsjax.train.assemble import program_for

pytestmark = pytest.mark.usefixtures("gpu_compiler")
NODE, ACCUMULATION = 8, 2
BLOCK_BYTES = {"int4": 64 + 2, "e2m4": 112 + 2}


@functools.cache
def step(codec: str, groups: int = 1, **mesh: int) -> Any:
    """A step with accumulation, all matrices coded: its inspection and program."""
    target = aot.parse_target("2x8xH100")
    config = from_dict(
        {
            "model": MODEL, "mesh": mesh,
            "train": {
                "steps": 10, "global_batch_size": 2 * ACCUMULATION * BATCH, "sequence_length": SEQUENCE,
                "gradient_accumulation_steps": ACCUMULATION, "remat": "full",
            },
            "grad_sync": {"codec": codec, "min_size": 0, "dense": [], "overlap": groups > 1, "bucket_bytes": 2**18},
        }
    )  # fmt: skip
    with aot.on(target):
        program, _ = program_for(config, target.devices(), VOCABULARY, topology=target.topology)
        sharding = NamedSharding(program.mesh, P(None, BATCH_AXES))
        dtypes = {
            **dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), np.int32),
            "weights": np.float32,
        }
        rows = (ACCUMULATION, 2 * BATCH, SEQUENCE)
        batch = {name: jax.ShapeDtypeStruct(rows, dtype, sharding=sharding) for name, dtype in dtypes.items()}
        lowered = program.lower_step(batch)
    # Small as they are here, gathers of several groups would be joined.
    apart = {"xla_gpu_all_gather_combine_threshold_bytes": 0} if groups > 1 else {}
    return aot.inspect(aot.compile_for(target, lowered, apart), program.mesh), program


def coded_numbers(program: Any) -> int:
    """Of a device, padded to whole blocks and as many pieces as there are nodes."""
    exchange = program.parts.exchange
    return sum(
        sum(exchange.pieces(t)) * exchange.route.replicas for t in exchange.tensors.values() if t.coded
    )


@pytest.mark.parametrize("codec", BLOCK_BYTES)
def test_between_nodes_matrices_travel_packed_and_once_a_step(codec):
    inspection, program = step(codec, data=2, fsdp=8)
    far = inspection.collectives.crossing(NODE)
    assert all(c.times == 1 and "data" in c.axes for c in far)
    assert all(c.axes == ("data",) for c in far.at_least(64))
    packed = far.carrying("u8")
    blocks = coded_numbers(program) // 128
    # Two nodes: each sends all of it once, coded once.
    assert {c.kind for c in packed} == {"all-gather"}
    assert sum(c.operand_bytes for c in packed) == blocks * BLOCK_BYTES[codec]
    # What is left in fp32 are norms, sums and counts.
    rest = far.where(lambda c: "u8" not in c.dtypes)
    assert sum(c.operand_bytes for c in rest) <= 4 * (2 * LAYERS + 1) * HIDDEN + 200


def test_nothing_crosses_data_before_the_exchange():
    inspection, _ = step("int4", data=2, fsdp=8)
    assert not inspection.collectives.touching("data").in_loop()
    # The gathers of parameters are where they were: a layer at a time, every microbatch.
    assert inspection.collectives.over("fsdp").of("all-gather").in_loop()


def test_near_replicas_add_up_first():
    inspection, program = step("int4", data=16)
    assert program.parts.exchange.route.parts == (8, 2)
    data = inspection.collectives.over("data")
    near, far = data.within(NODE), data.crossing(NODE).carrying("u8")
    numbers = coded_numbers(program)
    scattered = near.of("reduce-scatter").carrying("f32")
    assert sum(c.operand_bytes for c in scattered) >= 4 * numbers
    sent = far.of("all-gather")
    assert sum(c.operand_bytes for c in sent) == numbers // 8 // 128 * BLOCK_BYTES["int4"]
    # Back to the near ones in packed form too.
    assert near.of("all-gather").carrying("u8")


def test_groups_of_layers_travel_while_others_are_computed():
    inspection, program = step("int4", groups=4, data=2, fsdp=8)
    assert program.parts.exchange.groups == (1,) * LAYERS
    far = inspection.collectives.crossing(NODE).carrying("u8")
    assert far.of("all-gather").times >= LAYERS
    beside = far.where(lambda c: c.asynchronous and c.between_work.bytes > 1e5)
    assert len(beside) >= LAYERS - 1
    assert not inspection.collectives.touching("data").in_loop()


def test_the_same_under_a_pipeline():
    inspection, program = step("int4", pipeline=2, data=2, fsdp=4)
    far = inspection.collectives.over("data").carrying("u8")
    assert far and all(c.times == 1 for c in far)
    assert not inspection.collectives.touching("data").in_loop()
    assert coded_numbers(program) > 0

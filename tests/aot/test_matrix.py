"""The programs of the equivalence matrix, compiled for H100s that are not here: one node of eight, and two.

What every one of them must keep, whatever its settings are: it is made for the devices, holds what its
shardings say and gives the state back in place, speaks between nodes only where replicas meet, and never
waits for a permutation that some devices do not run.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from cover import pairwise
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import BATCH, PLAIN, batch_of, devices_of, program_of
from test_equivalence import QUICK, SETTINGS, allowed, label

from dsjax import aot
from dsjax.backend.xla_options import Chosen
from dsjax.mesh import BATCH_AXES
from dsjax.train.memory import bytes_a_device

pytestmark = pytest.mark.usefixtures("gpu_compiler")


def filled(case: dict[str, Any], devices: int) -> dict[str, Any]:
    """The case on all devices: more replicas, or more shards where the batch has no rows for them."""
    case = {**PLAIN, **case, "format": "bf16"}
    stages = case["pipeline"][0]
    axes = {"data": case["data"], "fsdp": case["fsdp"], "context": case["context"]}
    others = case["expert"] * case["gradient_accumulation_steps"]
    while devices_of({**case, **axes}) < devices:
        split = axes["data"] * axes["fsdp"] * others
        axis = "data" if BATCH % (2 * split) == 0 and BATCH // (2 * split) >= stages else "context"
        axes[axis] *= 2
    return {**case, **axes}


def compiled_step(case: dict[str, Any], target: aot.Target) -> tuple[aot.Inspection, Any, Any]:
    """The step's inspection, its abstract state and batch."""
    with aot.on(target):
        program = program_of(case, target.devices())
    micro = program.microbatches
    sharding = NamedSharding(program.mesh, P(None, BATCH_AXES))

    def microbatches(rows: np.ndarray) -> jax.ShapeDtypeStruct:
        shape = (micro, BATCH // micro, *rows.shape[1:])
        return jax.ShapeDtypeStruct(shape, rows.dtype, sharding=sharding)

    batch = jax.tree.map(microbatches, batch_of(case["rows"], 0))
    with aot.on(target):
        lowered = program.lower_step(batch)
    # Some sizes here are odder than Triton has tiles for.
    compiled, _ = aot.compile_chosen(target, lowered, Chosen())
    inspection = aot.inspect(compiled, program.mesh)
    return inspection, program.abstract_state, batch


def everywhere() -> list[Any]:
    """Every case on both clusters, in the quick run on one; of pipelines, which take longest to compile, a part."""
    clusters, cases = ("8xH100", "2x8xH100"), []
    for number, case in enumerate(pairwise(SETTINGS, allowed)):
        alone = case["pipeline"][0] == 1
        for place, cluster in enumerate(clusters):
            quick = number < QUICK and place == number % 2 and (alone or number % 4 == 0)
            marks = () if quick else pytest.mark.slow
            cases.append(pytest.param(case, cluster, id=f"{cluster}-{label(case)}", marks=marks))
    return cases


@pytest.mark.parametrize(("case", "cluster"), everywhere())
def test_a_program_of_the_matrix_compiles(case: dict[str, Any], cluster: str) -> None:
    target = aot.parse_target(cluster)
    inspection, state, batch = compiled_step(filled(case, target.size), target)
    assert inspection.memory is not None
    # One number beside state and batch: whether this process votes to stop.
    assert inspection.memory.argument == bytes_a_device((state, batch)) + 4
    assert inspection.memory.alias == bytes_a_device(state)
    assert not inspection.collectives.hanging()
    outermost = [axis for axis in ("pipeline", "data") if inspection.mesh.get(axis, 1) > 1][:1]
    if outermost and inspection.mesh[outermost[0]] % target.hosts == 0:
        assert all(outermost[0] in c.axes for c in inspection.collectives.crossing(target.domain))


def test_cases_fill_the_devices() -> None:
    for case in pairwise(SETTINGS, allowed):
        for devices in (8, 16):
            assert devices_of(filled(case, devices)) == devices

"""What a pipelined step sends and holds: compiled for eight H100s, each schedule over other axes."""

from __future__ import annotations

import functools

import pipelines
import pytest
from pipelines import ACTIVATION, HIDDEN, LAYERS, SEQUENCE

from dsjax.pipelining.executor import BACKWARD, FIRST, FORWARD, LAST, WEIGHT

pytestmark = pytest.mark.usefixtures("gpu_compiler")

STEPS = {
    "1f1b": ({"pipeline": 2, "data": 2, "fsdp": 2}, {"microbatches": 4}, {"fsdp_gather": "step"}),
    "1f1b, context, tied": (
        {"pipeline": 2, "fsdp": 2, "context": 2},
        {"microbatches": 4, "layers": [1, 3]},
        {"tied": True, "gradient_accumulation_steps": 2},
    ),
    "gpipe": ({"pipeline": 2, "data": 4}, {"schedule": "gpipe", "microbatches": 4}, {}),
    "interleaved, tensor": (
        {"pipeline": 2, "data": 2, "tensor": 2},
        {"schedule": "interleaved", "virtual_stages": 2, "microbatches": 4},
        {},
    ),
    "1f1b, fsdp, tensor": ({"pipeline": 2, "fsdp": 2, "tensor": 2}, {"microbatches": 4}, {}),
    "zero_bubble": ({"pipeline": 4, "data": 2}, {"schedule": "zero_bubble", "microbatches": 6}, {}),
}
UNITS = (FORWARD, BACKWARD, WEIGHT)


@functools.cache
def step(name: str, microbatches: int | None = None) -> pipelines.Step:
    mesh, pipeline, train = STEPS[name]
    pipeline = pipeline | ({"microbatches": microbatches} if microbatches else {})
    return pipelines.compiled(mesh, pipeline, **train)


def inside(collectives):
    """Those in a unit."""
    return collectives.where(lambda c: any(unit in loop.op_name for loop in c.loops for unit in UNITS))


def outside(collectives):
    """Those in a tick beside its units, or before and after all ticks."""
    return collectives.where(lambda c: not any(unit in loop.op_name for loop in c.loops for unit in UNITS))


@pytest.mark.parametrize("name", STEPS)
def test_no_permute_stands_where_stages_decide_apart(name):
    collectives = step(name).inspection.collectives
    assert not collectives.hanging()
    assert not inside(collectives).of("collective-permute")
    # What does stand there is known to be decided apart, so the check above can see it.
    assert all("pipeline" in c.differs_over for c in inside(collectives))
    assert not inside(collectives).touching("pipeline")


@pytest.mark.parametrize("name", STEPS)
def test_activations_are_handed_on_once_a_tick(name):
    found = step(name)
    ticks = found.work.schedule.ticks * STEPS[name][2].get("gradient_accumulation_steps", 1)
    handed = found.inspection.collectives.over("pipeline").of("collective-permute").in_loop()
    # Of two stages each is before and after the other, and XLA may make one permute of both.
    two = found.work.schedule.stages == 2
    assert handed.times == 2 * ticks or (two and handed.times == ticks)
    assert {c.dtype for c in handed} == {"bf16"}


@pytest.mark.parametrize("name", [n for n, (mesh, _, _) in STEPS.items() if "data" in mesh])
def test_gradients_are_summed_over_data_once_a_step(name):
    found = step(name)
    sums = found.inspection.collectives.touching("data").at_least(4 * HIDDEN)
    assert sums and not sums.in_loop()
    assert {c.dtype for c in sums} == {"f32"}
    # Every layer's gradients once, in the place of its parameters.
    held = sum(c.operand_bytes for c in sums.of("all-reduce"))
    cut = 2 if STEPS[name][0].get("fsdp") or STEPS[name][0].get("tensor") else 1
    layers = 4 * (4 * HIDDEN**2 + 3 * HIDDEN * 256) * LAYERS // STEPS[name][0]["pipeline"] // cut
    assert layers <= held < 2 * layers + 4 * 2 * 512 * HIDDEN


def test_parameters_gathered_by_step_are_gathered_before_the_ticks():
    gathers = step("1f1b").inspection.collectives.over("fsdp").of("all-gather")
    assert gathers and not gathers.in_loop()
    matrices = (4 * HIDDEN**2 + 3 * HIDDEN * 256) * LAYERS // 2
    assert sum(c.result_bytes for c in gathers.carrying("bf16")) >= 2 * matrices


def test_parameters_gathered_by_layer_are_gathered_in_the_units():
    found = step("1f1b, context, tied")
    layer = 2 * (4 * HIDDEN**2 + 3 * HIDDEN * 256)
    for stage, layers in enumerate((1, 3)):
        gathers = inside(found.on_stage(stage)).over("fsdp").of("all-gather").carrying("bf16")
        moved = sum(p.result_bytes * c.times for c in gathers for p in c.parts if p.dtype == "bf16")
        # In the forward, which the last stage leaves out, to compute it once more, and in the backward.
        of_layers = 8 * layers * (2 if stage else 3) * layer
        # The head as well; the embedding looks up what each device has of it.
        assert of_layers <= moved <= of_layers + 8 * 2 * 512 * HIDDEN
    matrices = found.inspection.collectives.over("fsdp").of("all-gather").at_least(layer // 8)
    assert not outside(matrices).where(lambda c: len(c.loops) > 0)


@pytest.mark.parametrize("name", [n for n, (mesh, _, _) in STEPS.items() if "tensor" in mesh])
def test_activations_alone_are_made_whole_over_tensor(name):
    collectives = step(name).inspection.collectives
    gathers = inside(collectives).touching("tensor").of("all-gather")
    assert gathers
    # A layer's matrices are smaller than an activation, the head is not: none is a multiple of one.
    assert {p.result_bytes % ACTIVATION for c in gathers for p in c.parts} == {0}
    matrix = 2 * HIDDEN * 512
    assert not outside(collectives).touching("tensor").of("all-gather").at_least(matrix)


def test_loops_run_as_often_as_the_schedule_says():
    found = step("1f1b, context, tied")
    units, first, last, layers = {}, {}, {}, {}
    for stage in range(2):
        for loop in found.read.on_stage(stage).loops:
            _, _, rest = loop.op_name.partition(f"{BACKWARD}/")
            if rest == "while":
                units[stage] = loop.trips * found.work.schedule.ticks
            elif f"/{FIRST}/" in rest:
                first[stage] = loop.trips
            elif f"/{LAST}/" in rest:
                last[stage] = loop.trips
            elif rest == "while/body/while":
                layers[stage] = loop.trips
    assert units == {0: 4, 1: 4}
    assert (first, last, layers) == ({0: 1, 1: 0}, {0: 0, 1: 1}, {0: 1, 1: 3})


def test_memory_is_flat_in_microbatches_where_one_forward_follows_one_backward():
    few, many = (step("1f1b", n).inspection.memory.temporary for n in (4, 16))
    assert abs(many - few) < ACTIVATION


def test_memory_grows_with_microbatches_where_all_forwards_come_first():
    few, many = step("gpipe", 4), step("gpipe", 16)
    more = many.work.slots.inputs - few.work.slots.inputs
    grown = many.inspection.memory.temporary - few.inspection.memory.temporary
    assert more >= 11
    assert abs(grown - more * ACTIVATION) < 2 * ACTIVATION


@pytest.mark.parametrize(("name", "cut"), [("1f1b", 1), ("gpipe", 1), ("1f1b, context, tied", 2),
                                           ("interleaved, tensor", 2)])  # fmt: skip
def test_what_is_stashed_is_slots_of_activations(name, cut):
    found = step(name)
    slots = found.work.slots.inputs + max(found.work.slots.gradients, 1)
    assert found.read.stash_bytes == slots * ACTIVATION // cut


def test_no_weight_is_in_a_stash_of_residuals():
    found = step("zero_bubble")
    slots, depth = found.work.slots, found.work.layers
    activations = slots.inputs + max(slots.gradients, 1) + slots.residuals
    layers = slots.residuals * found.kept + slots.crossings * found.crossing
    assert found.read.stash_bytes == activations * ACTIVATION + depth * layers
    # A layer keeps activations: so many features of each token, among them no matrix.
    features = found.kept / (pipelines.ROWS * SEQUENCE)
    assert features < 4 * 60 * HIDDEN

"""Pipeline schedules: the tables can be run, their slots hold, and they take the time their formulas say."""

import dataclasses

import numpy as np
import pytest

from dsjax.errors import ConfigError, InternalError
from dsjax.pipelining.schedule import bubble_formula, check, forward_only, make_schedule
from dsjax.pipelining.simulate import simulate
from dsjax.pipelining.slots import allot, verify

SLOT_TABLES = [
    *("read_input", "store_input", "write_residual", "read_residual", "weight_residual"),
    *("store_gradient", "read_gradient", "write_crossing", "read_crossing"),
]


def allowed(stages):
    """(name, microbatches, virtual) of every schedule for 1..20 microbatches and up to 4 chunks."""
    for microbatches in range(1, 21):
        for name in ("gpipe", "1f1b", "zero_bubble"):
            yield name, microbatches, 1
        if microbatches >= stages:
            for virtual in (2, 3, 4):
                yield "interleaved", microbatches, virtual


@pytest.mark.parametrize("stages", range(1, 9))
def test_every_schedule_runs_in_its_slots(stages):
    for name, microbatches, virtual in allowed(stages):
        schedule = make_schedule(name, stages, microbatches, virtual)
        alone = forward_only(stages, microbatches, virtual)
        assert alone.forward.dtype == schedule.backward.dtype == np.int32
        for one in (schedule, alone):
            check(one)
            verify(one, allot(one, "residuals"))
            if one.weight is None:
                verify(one, allot(one, "inputs"))
        assert (alone.backward == -1).all()
        assert_same_order(alone.forward, schedule.forward)


def assert_same_order(one, other):
    for stage in range(one.shape[1]):
        a, b = one[:, stage], other[:, stage]
        assert a[a >= 0].tolist() == b[b >= 0].tolist()


@pytest.mark.parametrize("stages", range(1, 9))
def test_simulated_bubble_is_the_formula(stages):
    for name, microbatches, virtual in allowed(stages):
        schedule = make_schedule(name, stages, microbatches, virtual)
        if name == "zero_bubble":
            simulated = simulate(schedule, 1.0, 1.0, 1.0)
            shortest = 3 * microbatches + stages - 1
            assert simulated.total == max(shortest, 2 * (microbatches + stages) - 1)
            if microbatches < stages:
                continue
        else:
            simulated = simulate(schedule, 1.0, 2.0)
            assert simulated.total == 3.0 * (microbatches * virtual + stages - 1)
        expected = bubble_formula(name, stages, microbatches, virtual)
        assert simulated.bubble == pytest.approx(expected, abs=1e-12)
        np.testing.assert_allclose(simulated.idle, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "virtual", "percent"), [("1f1b", 1, 35.0), ("interleaved", 4, 11.9), ("interleaved", 8, 6.3)]
)
def test_bubble_of_eight_stages_and_thirteen_microbatches(name, virtual, percent):
    simulated = simulate(make_schedule(name, 8, 13, virtual), 1.0, 2.0)
    assert round(100 * simulated.bubble, 1) == round(100 * bubble_formula(name, 8, 13, virtual), 1) == percent


@pytest.mark.parametrize("times", [(1.0, 1.2, 0.8), (2.0, 3.0, 1.0)])
def test_zero_bubble_keeps_its_formula_without_lockstep(times):
    forward, inputs_half, weight = times
    simulated = simulate(make_schedule("zero_bubble", 8, 13), *times, lockstep=False)
    expected = bubble_formula("zero_bubble", 8, 13, 1, forward, inputs_half + weight, weight)
    assert simulated.bubble == pytest.approx(expected)


def test_one_slow_stage_sets_the_time():
    forward = np.array([[1.0, 1.0, 3.0, 1.0]])
    schedule = make_schedule("1f1b", 4, 50)
    for lockstep in (True, False):
        simulated = simulate(schedule, forward, 2 * forward, lockstep=lockstep)
        # Two forwards to reach it, then it works without pause, then two backwards to get home.
        assert simulated.total == 2 * 1.0 + 50 * 9.0 + 2 * 2.0
        assert simulated.idle.argmin() == 2


def test_links_cost_a_wait_between_ticks_and_nothing_on_one_stage():
    schedule = make_schedule("1f1b", 4, 6)
    without, with_link = simulate(schedule, 1.0, 2.0), simulate(schedule, 1.0, 2.0, link=0.5)
    assert with_link.total == without.total + 0.5 * (schedule.ticks - 1)
    # Asynchronously at least the first microbatch's way there and back is paid for.
    assert simulate(schedule, 1.0, 2.0, link=0.5, lockstep=False).total >= without.total + 0.5 * 6
    alone = make_schedule("1f1b", 1, 6)
    assert simulate(alone, 1.0, 2.0, link=0.5).total == 18.0


def test_memory_does_not_grow_with_microbatches():
    for microbatches in (15, 40, 200):
        slots = allot(make_schedule("1f1b", 8, microbatches), "inputs")
        assert (slots.inputs, slots.gradients, slots.residuals) == (15, 1, 0)
        slots = allot(make_schedule("zero_bubble", 8, microbatches), "residuals")
        assert (slots.inputs, slots.gradients, slots.residuals, slots.crossings) == (1, 1, 8, 8)
    assert allot(make_schedule("gpipe", 8, 40), "inputs").inputs == 40


def test_groups_of_microbatches_are_even_and_no_smaller_than_the_stages():
    first_chunk = make_schedule("interleaved", 4, 11, 2).forward[:, 0]
    # Two groups, of 6 and 5, each through chunk 0 (units 0..10), then through chunk 1 (units 11..21).
    assert first_chunk[:22].tolist() == [*range(6), *range(11, 17), *range(6, 11), *range(17, 22)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pipedream", 4, 8), ["pipeline.schedule", "'pipedream'", "gpipe, 1f1b, interleaved, zero_bubble"]),
        (("1f1b", 4, 0), ["pipeline.microbatches must be at least 1, got 0"]),
        (("1f1b", 0, 4), ["mesh.pipeline must be at least 1, got 0"]),
        (("1f1b", 4, 4, 0), ["pipeline.virtual_stages must be at least 1, got 0"]),
        (("gpipe", 4, 8, 2), ["pipeline.virtual_stages=1", "pipeline.schedule=interleaved"]),
        (("zero_bubble", 4, 8, 2), ["pipeline.virtual_stages=1", "pipeline.schedule=interleaved"]),
        (("interleaved", 4, 8, 1), ["pipeline.virtual_stages=2", "pipeline.schedule=1f1b"]),
        (
            ("interleaved", 4, 3, 2),
            ["mesh.pipeline=4", "set pipeline.microbatches=4", "pipeline.schedule=1f1b"],
        ),
    ],
)
def test_refusals_say_what_works(arguments, words):
    with pytest.raises(ConfigError) as refused:
        make_schedule(*arguments)
    for word in words:
        assert word in str(refused.value)


def test_zero_bubble_with_recomputation_is_refused():
    with pytest.raises(ConfigError, match=r"pipeline\.recompute=false"):
        allot(make_schedule("zero_bubble", 4, 8), "inputs")


@pytest.mark.parametrize(
    ("table", "move", "message"),
    [
        ("forward", ((1, 1), (0, 1)), "forward before its input came: tick 0, stage 1"),
        ("backward", ((3, 3), (2, 3)), "backward before its forward: tick 2, stage 3"),
        ("backward", ((4, 2), (3, 2)), "backward before its gradient came: tick 3, stage 2"),
        ("backward", ((6, 0), None), "backward missing: stage 0"),
        ("forward", ((0, 0), (10, 0)), "forward before its input came: tick 1, stage 1"),
    ],
)
def test_check_names_what_is_wrong(table, move, message):
    schedule = make_schedule("1f1b", 4, 6)
    changed = getattr(schedule, table).copy()
    source, target = move
    unit, changed[source] = changed[source], -1
    if target:
        changed[target] = unit
    with pytest.raises(InternalError, match=message):
        check(dataclasses.replace(schedule, **{table: changed}))


def test_check_sees_a_unit_done_twice_and_a_weight_gradient_too_early():
    schedule = make_schedule("zero_bubble", 2, 3)
    again = schedule.forward.copy()
    again[-1, 0] = 0
    with pytest.raises(InternalError, match="forward a second time"):
        check(dataclasses.replace(schedule, forward=again))
    with pytest.raises(InternalError, match="weight gradient before its backward"):
        check(dataclasses.replace(schedule, weight=schedule.forward))


@pytest.mark.parametrize("table", SLOT_TABLES)
def test_verify_sees_a_wrong_slot(table):
    schedule = make_schedule("zero_bubble", 3, 5)
    slots = allot(schedule, "residuals")
    wrong = getattr(slots, table).copy()
    tick, stage = np.argwhere(wrong >= 0)[2]
    wrong[tick, stage] += 1
    with pytest.raises(InternalError):
        verify(schedule, dataclasses.replace(slots, **{table: wrong}))


def test_verify_sees_a_stash_overwritten():
    schedule = make_schedule("1f1b", 4, 12)
    slots = allot(schedule, "inputs")
    crowded = {
        f: np.minimum(getattr(slots, f), slots.inputs - 2)
        for f in ("read_input", "store_input", "backward_input")
    }
    with pytest.raises(InternalError, match="is not in its slot"):
        verify(schedule, dataclasses.replace(slots, **crowded))

"""The microscope against a program known by hand: compiled for simulated CPUs, and for GPUs as kept in fixtures."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax import aot
from dsjax.errors import InputError

SOURCES = ["cpu", *(f"gpu-{path.stem}" for path in sorted(programs.FIXTURES.glob("*.hlo")))]


@pytest.fixture(scope="module")
def compiled(cpu8):
    function, arguments = programs.known(programs.mesh_of(cpu8.devices()))
    return aot.compile_for(cpu8, aot.lower_for(cpu8, function, *arguments))


@pytest.fixture(scope="module", params=SOURCES)
def inspection(request, compiled):
    if request.param == "cpu":
        return aot.inspect(compiled)
    text = (programs.FIXTURES / f"{request.param.removeprefix('gpu-')}.hlo").read_text()
    return aot.inspect(text, programs.SHAPE)


def test_there_is_a_fixture_of_the_oldest_and_the_newest_jax():
    assert SOURCES == ["cpu", "gpu-known-0.10", "gpu-known-0.12"]


def test_gathers_of_the_inner_loop(inspection):
    (gather,) = inspection.collectives.of("all-gather")
    assert gather.axes == ("tensor",)
    assert [loop.trips for loop in gather.loops] == [programs.OUTER, programs.INNER]
    assert (gather.times, gather.times_known, gather.depth) == (15, True, 2)
    assert (gather.group_size, gather.whole, gather.dtype) == (4, True, "f32")
    assert (gather.operand_bytes, gather.result_bytes) == (programs.ARRAY // 4, programs.ARRAY)
    assert gather.wire_bytes == programs.ARRAY * 3 / 4
    assert gather.total_wire_bytes == 15 * programs.ARRAY * 3 / 4


def test_all_reduce_of_the_outer_loop(inspection):
    (reduce,) = inspection.collectives.over("data").of("all-reduce").in_loop()
    assert (reduce.times, reduce.depth) == (programs.OUTER, 1)
    assert reduce.operand_bytes == reduce.result_bytes == programs.ARRAY
    assert reduce.wire_bytes == 2 * programs.ARRAY / 2


def test_what_runs_once(inspection):
    once = inspection.collectives.outside_loops().where(lambda c: not c.branches)
    (permute,) = once.of("collective-permute")
    assert (permute.axes, permute.operand_bytes) == (("tensor",), programs.ARRAY)
    assert permute.wire_bytes == programs.ARRAY
    (scatter,) = once.of("reduce-scatter")
    assert (scatter.axes, scatter.operand_bytes) == (("tensor",), programs.ARRAY)
    assert scatter.result_bytes == programs.ARRAY // 4
    assert scatter.wire_bytes == programs.ARRAY * 3 / 4
    (total,) = once.of("all-reduce")
    assert (total.axes, total.operand_bytes) == (("data", "tensor"), 4)


def test_a_branch_that_all_devices_take_alike(inspection):
    (exchange,) = inspection.collectives.of("all-to-all")
    assert len(exchange.branches) == 1
    assert exchange.differs_over == frozenset()
    assert (exchange.axes, exchange.operand_bytes, exchange.result_bytes) == (
        ("data",), programs.ARRAY, programs.ARRAY
    )  # fmt: skip
    assert exchange.wire_bytes == programs.ARRAY / 2


def test_branches_that_devices_take_apart(inspection):
    by_place, by_value = inspection.collectives.divided()
    assert by_place.differs_over == {"data"}
    assert "data" in by_value.differs_over
    assert {c.kind for c in (by_place, by_value)} == {"all-reduce"}
    assert len(inspection.conditionals) == 3
    assert not inspection.collectives.of("collective-permute").divided()


def test_a_loop_of_unknown_length_says_so(inspection):
    unknown = inspection.collectives.where(lambda c: not c.times_known)
    assert {c.axes for c in unknown} == {("data", "tensor")}
    assert {c.times for c in unknown} == {1}
    assert [loop.trips for loop in inspection.loops] == [programs.OUTER, programs.INNER, None]


def test_products(inspection):
    (dot,) = inspection.dots
    assert (dot.lhs.dims, dot.rhs.dims, dot.result.dims) == ((8, 64), (64, 16), (8, 16))
    assert (dot.dtype, dot.flops, dot.times) == ("f32", 2 * 8 * 64 * 16, 15)
    assert inspection.flops == 15 * dot.flops
    assert inspection.work.bytes > 15 * (8 * 64 + 64 * 16) * 4


def test_links(inspection):
    inside, outside = inspection.collectives.within(4), inspection.collectives.crossing(4)
    assert {c.axes for c in inside} == {("tensor",)}
    assert all("data" in c.axes for c in outside)
    assert len(inside) + len(outside) == len(inspection.collectives)


def test_filters_chain_and_refuse_unknown_kinds(inspection):
    everything = inspection.collectives
    assert everything.of("all-gather").times == 15
    assert everything.touching("data").over("data", "tensor").outside_loops().times == 1
    assert len(everything.carrying("f32")) == len(everything)
    assert not everything.carrying("bf16", "u8")
    assert len(everything.at_least(programs.ARRAY)) == len(everything) - 2
    assert everything.named("psum_scatter|reduce_scatter").of("reduce-scatter")
    assert everything.wire_bytes == sum(c.total_wire_bytes for c in everything)
    with pytest.raises(ValueError, match="all-gathr"):
        everything.of("all-gathr")


def test_gpus_start_and_wait_apart():
    text = (programs.FIXTURES / "known-0.10.hlo").read_text()
    inspection = aot.inspect(text, programs.SHAPE)
    assert inspection.collectives.of("all-gather").asynchronous()
    assert not inspection.collectives.of("collective-permute").asynchronous()


def test_memory_equals_that_of_live_shards(compiled, cpu8):
    mesh = programs.mesh_of(cpu8.devices())
    x = jax.device_put(jnp.ones((16, 64)), NamedSharding(mesh, P("data")))
    w = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, P(None, "tensor")))
    result = compiled(x, w)
    memory = aot.inspect(compiled).memory
    shards = [a.addressable_shards[0].data.nbytes for a in (x, w, result)]
    assert (memory.argument, memory.output) == (sum(shards[:2]), shards[2])


def test_what_is_donated_counts_once(cpu8):
    mesh = programs.mesh_of(cpu8.devices())
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P("data", "tensor")))
    step = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    memory = aot.inspect(aot.compile_for(cpu8, aot.lower_for(cpu8, step, x))).memory
    assert memory.argument == memory.output == memory.alias == 64 * 64 * 4 // 8
    assert memory.total == memory.argument + memory.temporary + memory.code


def test_the_mesh_must_be_that_of_the_program(compiled):
    with pytest.raises(InputError, match="runs on 8 devices and the mesh \\(data 4\\) has 4"):
        aot.inspect(compiled, {"data": 4})
    with pytest.raises(InputError, match="mesh of the program is not known"):
        aot.inspect(compiled.as_text())


def test_one_device_needs_no_mesh():
    x = np.ones((4, 6), np.float32)
    inspection = aot.inspect(jax.jit(lambda x: x @ x.T).lower(x).compile())
    assert (len(inspection.collectives), inspection.flops) == (0, 2 * 4 * 4 * 6)


def test_lowering_wants_arguments_on_the_target(cpu8):
    with pytest.raises(Exception, match="no argument has a sharding over the devices of cpu:8"):
        aot.lower_for(cpu8, lambda x: x, jax.ShapeDtypeStruct((4,), jnp.float32))


def test_a_permute_that_some_devices_do_not_come_to_hangs(cpu8):
    mesh = programs.mesh_of(cpu8.devices())
    around = [(i, (i + 1) % 4) for i in range(4)]

    def permuted(apart: bool):
        def body(x):
            turns = (
                jax.lax.axis_index("data") if apart else jnp.int32(jax.lax.psum(x[0, 0], ("data", "tensor")))
            )
            return jax.lax.fori_loop(0, turns, lambda _, x: jax.lax.ppermute(x + 1, "tensor", around), x)

        mapped = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
        argument = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("data")))
        return aot.inspect(aot.compile_for(cpu8, aot.lower_for(cpu8, mapped, argument)), mesh).collectives

    assert [c.kind for c in permuted(True).hanging()] == ["collective-permute"]
    assert len(permuted(False).of("collective-permute")) == 1 and not permuted(False).hanging()


def test_what_a_conditional_does_seldom_is_counted_by_its_share(cpu8):
    mesh = programs.mesh_of(cpu8.devices())

    def now_and_then(x, step):
        x = jax.lax.psum(x, "data")
        with jax.named_scope("rarely"):
            return jax.lax.cond(step == 0, lambda x: jax.lax.psum(x * x, "tensor") @ x.T @ x, lambda x: x, x)

    mapped = jax.shard_map(now_and_then, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    arguments = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))
        for shape, dtype in (((8, 8), jnp.float32), ((), jnp.int32))
    )
    always = aot.inspect(aot.compile_for(cpu8, aot.lower_for(cpu8, mapped, *arguments)), mesh)
    seldom = always.seldom("rarely", 5)
    before, after = (
        {c.axes: (c.total_wire_bytes, c.every) for c in one.collectives} for one in (always, seldom)
    )
    assert after[("data",)] == before[("data",)]
    assert after[("tensor",)] == (pytest.approx(before[("tensor",)][0] / 5), 5)
    assert seldom.flops == pytest.approx(always.flops / 5) and always.flops > 0
    assert 0 < seldom.work.bytes < always.work.bytes
    assert always.seldom("another", 5).collectives.times == always.collectives.times


def test_loops_of_unknown_length_are_counted_as_one_is_told(inspection):
    told = inspection.counted(lambda loop: Fraction(7, 2) if loop.trips is None else loop.trips)
    unknown = {c.name for c in inspection.collectives if not c.times_known}
    counted = told.collectives.where(lambda c: c.name in unknown)
    assert counted and {c.times for c in counted} == {round(3.5)} and all(c.times_known for c in counted)
    others = [(c.name, c.times) for c in inspection.collectives if c.name not in unknown]
    assert others == [(c.name, c.times) for c in told.collectives if c.name not in unknown]
    assert told.work.bytes > inspection.work.bytes

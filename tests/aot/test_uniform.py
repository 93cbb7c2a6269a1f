"""Along which axes decisions may differ between devices."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import programs
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax import aot


def inspected(cpu8, body, manual=("data", "tensor")):
    """A function of x [8, 8] over the mesh of two by four, compiled and read."""
    mesh, spec = programs.mesh_of(cpu8.devices()), P("data")
    function = jax.shard_map(
        body, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=set(manual), check_vma=False
    )
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, spec))
    return aot.inspect(aot.compile_for(cpu8, aot.lower_for(cpu8, jax.jit(function), x)))


@pytest.mark.parametrize(
    ("line", "over"),
    [
        ("u32[] subtract(%id, %two)", {"a", "b"}),
        ("pred[] compare(%below, %four), direction=LT", {"a"}),  # below: 2^32 - 2, 2^32 - 1, 0, 1
        ("u32[] divide(%id, %four)", set()),
        ("u32[] remainder(%id, %two)", {"b"}),
        ("u32[] dynamic-slice(%table, %id), dynamic_slice_sizes={1}", {"a"}),
        ('u32[] custom-call(%id), custom_call_target="what"', {"a", "b"}),
    ],
)
def test_numbers_made_from_a_devices_own(line, over):
    text = f"""HloModule m, is_scheduled=true, num_partitions=4

%same (p: f32[2]) -> f32[2] {{
  ROOT %p = f32[2]{{0}} parameter(0)
}}

ENTRY %main (x: f32[2]) -> f32[2] {{
  %x = f32[2]{{0}} parameter(0)
  %id = u32[] partition-id()
  %two = u32[] constant(2)
  %four = u32[] constant(4)
  %table = u32[4]{{0}} constant({{7, 7, 9, 9}})
  %below = u32[] subtract(%id, %two)
  %made = {line}
  %index = s32[] convert(%made)
  ROOT %r = f32[2]{{0}} conditional(%index, %x, %x), branch_computations={{%same, %same}}
}}
"""
    (conditional,) = aot.inspect(text, {"a": 2, "b": 2}).conditionals
    assert conditional.differs_over == over


def send(x):
    return x + lax.psum(x * 2, "tensor")


def keep(x):
    return x * 3


@pytest.mark.parametrize(
    ("decide", "over"),
    [
        (lambda x: lax.axis_index("data") == 0, {"data"}),
        (lambda x: lax.axis_index("tensor") < 2, {"tensor"}),
        (lambda x: lax.axis_index(("data", "tensor")) == 5, {"data", "tensor"}),
        (lambda x: (lax.axis_index("tensor") * 2 + 1) % 2 == lax.axis_size("data") - 1, set()),
        (lambda x: (lax.axis_index("tensor") - 2) // 2 == -1, {"tensor"}),
        (lambda x: x[0, 0] > 0, {"data"}),
        (lambda x: lax.psum(x, "data")[0, 0] > 0, set()),
        (lambda x: (lax.psum(x[0, 0], "data") > 0) & (lax.axis_index("tensor") == 1), {"tensor"}),
        (lambda x: lax.all_to_all(x, "tensor", 1, 0, tiled=True)[0, 0] > 0, {"data", "tensor"}),
    ],
)
def test_what_decides_a_branch(cpu8, decide, over):
    inspection = inspected(cpu8, lambda x: lax.cond(decide(x), send, keep, x))
    sends = inspection.collectives.over("tensor").of("all-reduce").in_conditional()
    if not sends:  # what is the same everywhere and known is decided by the compiler
        assert not over
        return
    assert {c.differs_over for c in sends} == {frozenset(over)}


def test_a_loop_whose_length_differs_and_what_comes_out_of_it(cpu8):
    def body(x):
        turns = lax.axis_index("data") + 1 + jnp.int32(lax.psum(x[0, 0], ("data", "tensor")) * 0)
        state = (jnp.int32(0), jnp.float32(1))
        _, y = lax.while_loop(lambda s: s[0] < turns, lambda s: (s[0] + 1, s[1] * 1.5), state)
        return lax.cond(y > 2, send, keep, x)

    (conditional,) = inspected(cpu8, body).conditionals
    assert conditional.differs_over == {"data"}


def test_a_collective_in_a_loop_whose_length_differs(cpu8):
    def body(x):
        first = x[0, 0]
        return lax.while_loop(
            lambda y: (y[0, 0] < 10) & (first < 5), lambda y: y + 1 + lax.psum(y, "tensor"), x
        )

    (send_,) = inspected(cpu8, body).collectives.of("all-reduce")
    assert send_.differs_over == {"data"}
    assert not send_.branches


def test_a_stage_of_a_program_that_is_manual_over_one_axis_only(cpu8):
    def body(x):
        x = lax.cond(
            lax.axis_index("data") == 0, lambda x: jnp.sin(x) @ x.T @ x, lambda x: jnp.cos(x) @ x.T @ x, x
        )
        return lax.ppermute(x, "data", [(0, 1), (1, 0)])

    inspection = inspected(cpu8, body, manual=("data",))
    assert {c.differs_over for c in inspection.conditionals} == {frozenset({"data"})}
    (permute,) = inspection.collectives.of("collective-permute")
    assert (permute.axes, permute.branches) == (("data",), ())


def test_a_permute_under_a_divided_branch_is_found(cpu8):
    def body(x):
        ring = partial(lax.ppermute, axis_name="tensor", perm=[(i, (i + 1) % 4) for i in range(4)])
        return lax.cond(lax.axis_index("data") == 0, ring, keep, x)

    divided = inspected(cpu8, body).collectives.of("collective-permute").divided()
    assert len(divided) == 1
    assert divided[0].differs_over == {"data"}

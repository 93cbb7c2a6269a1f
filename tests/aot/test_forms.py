"""Forms of collectives that XLA may print and that the compiled programs of these tests do not hold."""

from __future__ import annotations

import pytest

from dsjax import aot

MODULE = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (w: f32[16]) -> f32[2] {
  %w = f32[16]{0} parameter(0)
  ROOT %rs = f32[2]{0} reduce-scatter(%w), channel_id=3, replica_groups=[1,8]<=[8], use_global_device_ids=true, \
dimensions={0}, to_apply=%add
}

%slice_and_send (s: f32[4,16], k: s32[]) -> f32[8] {
  %s = f32[4,16]{1,0} parameter(0)
  %k = s32[] parameter(1)
  %zero = s32[] constant(0)
  %row = f32[1,16]{1,0} dynamic-slice(%s, %k, %zero), dynamic_slice_sizes={1,16}
  %flat = f32[16]{0} bitcast(%row)
  ROOT %fused = f32[8]{0} reduce-scatter(%flat), channel_id=4, replica_groups={{0,1},{2,3},{4,5},{6,7}}, \
use_global_device_ids=true, dimensions={0}, to_apply=%add
}

ENTRY %main (p: f32[16], q: f32[4,16], t: u8[32], n: s4[64]) -> f32[2] {
  %p = f32[16]{0} parameter(0)
  %q = f32[4,16]{1,0} parameter(1)
  %t = u8[32]{0} parameter(2)
  %n = s4[64]{0} parameter(3)
  %k0 = s32[] constant(1)
  %start = ((f32[16]{0}), f32[2]{0}, s32[]) async-start(%p), calls=%wrapped
  %work = f32[4,4]{1,0} dot(%q, %q), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %update = ((f32[16]{0}), f32[2]{0}, s32[]) async-update(%start), calls=%wrapped
  %done = f32[2]{0} async-done(%update), calls=%wrapped
  %fusion = f32[8]{0} fusion(%q, %k0), kind=kCustom, calls=%slice_and_send
  %half = u8[16]{0} slice(%t), slice={[0:16]}
  %a2a = (u8[16]{0}, u8[16]{0}) all-to-all(%half, %half), channel_id=5, replica_groups={{0,4},{1,5},{2,6},{3,7}}
  %cp = (s4[64]{0}, s4[64]{0}, u32[], u32[]) collective-permute-start(%n), channel_id=6, \
source_target_pairs={{0,1},{1,0},{2,2}}
  %cpd = s4[64]{0} collective-permute-done(%cp)
  %all = f32[16]{0} all-reduce(%p), channel_id=7, replica_groups={{0}}, to_apply=%add
  %local = f32[16]{0} all-reduce(%p), replica_groups={{0}}, to_apply=%add
  %some = f32[16]{0} all-reduce(%p), channel_id=8, replica_groups={{0,1,2},{3}}, use_global_device_ids=true, \
to_apply=%add
  %late = (f32[16]{0}, f32[32]{0}) all-gather-start(%p), channel_id=9, replica_groups=[4,2]<=[8], dimensions={0}, \
use_global_device_ids=true, backend_config={"collective_backend_config":{"is_sync":true}}
  %lated = f32[32]{0} all-gather-done(%late)
  ROOT %r = f32[2]{0} copy(%done)
}
"""


@pytest.fixture(scope="module")
def found():
    inspection = aot.inspect(MODULE, {"data": 2, "fsdp": 2, "tensor": 2})
    return {c.name: c for c in inspection.collectives}


def test_wrapped_in_a_general_asynchronous_start(found):
    scatter = found["rs"]
    assert (scatter.kind, scatter.axes) == ("reduce-scatter", ("data", "fsdp", "tensor"))
    assert (scatter.asynchronous, scatter.between) == (True, ("work", "update"))
    assert scatter.between_work.flops == {"f32": 2 * 4 * 4 * 16}
    assert (scatter.operand_bytes, scatter.result_bytes, scatter.wire_bytes) == (64, 8, 56)


def test_inside_a_fusion(found):
    fused = found["fused"]
    assert (fused.axes, fused.asynchronous) == (("tensor",), False)
    assert (fused.operand_bytes, fused.result_bytes) == (64, 32)


def test_an_all_to_all_of_several_arrays(found):
    exchange = found["a2a"]
    assert (exchange.axes, exchange.dtype) == (("data",), "u8")
    assert (exchange.operand_bytes, exchange.result_bytes, exchange.wire_bytes) == (32, 32, 16)


def test_a_permute_of_packed_numbers_between_few(found):
    permute = found["cp"]
    assert (permute.kind, permute.axes, permute.whole) == ("collective-permute", ("tensor",), False)
    assert (permute.dtype, permute.wire_bytes) == ("s4", 32)
    assert permute.asynchronous
    assert permute.groups.tolist() == [[0, 1], [1, 0]]


def test_groups_of_replicas_are_groups_of_all_devices_or_of_none(found):
    assert found["all"].axes == ("data", "fsdp", "tensor")
    assert found["all"].wire_bytes == 2 * 64 * 7 / 8
    assert (found["local"].axes, found["local"].wire_bytes) == ((), 0)


def test_groups_of_unlike_sizes(found):
    some = found["some"]
    assert (some.group_size, some.whole) == (3, False)
    assert some.axes == ("fsdp", "tensor")
    assert some.crosses(2)
    assert not some.crosses(4)


def test_a_pair_that_the_backend_runs_as_one(found):
    late = found["late"]
    assert (late.asynchronous, late.axes, late.result_bytes) == (False, ("tensor",), 128)


@pytest.mark.parametrize("line", ["%start = ", "ROOT %rs = "])
def test_a_general_start_that_the_backend_runs_at_once(line):
    sync = ', backend_config={"collective_backend_config":{"is_sync":true}}'
    text = "\n".join(row + sync if row.strip().startswith(line) else row for row in MODULE.splitlines())
    (scatter,) = aot.inspect(text, {"x": 8}).collectives.over("x").of("reduce-scatter").at_least(64)[:1]
    assert (scatter.asynchronous, scatter.between) == (False, ())


def test_a_permute_between_far_devices_crosses(found):
    assert not found["cp"].crosses(2)
    assert found["cp"].crosses(1)
    assert found["a2a"].crosses(4)


def test_one_line_each(found):
    inspection = aot.inspect(MODULE, {"data": 2, "fsdp": 2, "tensor": 2})
    lines = repr(inspection.collectives).splitlines()[1:]
    assert len(lines) == len(found)
    assert any(line.strip() == "all-to-all over data x1 u8 32 -> 32 bytes" for line in lines)

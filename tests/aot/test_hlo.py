"""The text of HLO: shapes, operands, attributes, groups, trip counts."""

from __future__ import annotations

import numpy as np
import pytest

from dsjax.aot.groups import Coordinates, parse_groups
from dsjax.aot.hlo import Shape, bits, bytes_of, flat, parse
from dsjax.aot.walk import walk

MODULE = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[2]{0})->f32[2]{0}}, num_partitions=4

FileNames
1 "a {b} = c.py"

%body.1 (arg: (s32[], f32[2])) -> (s32[], f32[2]) {
  %arg = (s32[], f32[2]{0}) parameter(0)
  %one = s32[] constant(2)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = f32[2]{0:T(8,128)S(5)} get-tuple-element(%arg), index=1
  %next = s32[] add(%i, %one), metadata={op_name="a \\"quoted, (name\\""}
  ROOT %out = (s32[], f32[2]{0}) tuple(%next, %x)
}

%cond.1 (arg.1: (s32[], f32[2])) -> pred[] {
  %arg.1 = (s32[], f32[2]{0}) parameter(0)
  %limit = s32[] constant(LIMIT)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0), sharding={replicated}
  %zero = s32[] constant(1)
  %both = (s32[], /*index=1*/f32[2]{0}) tuple(%zero, f32[2]{0} %p)
  %loop = (s32[], f32[2]{0}) while(%both), condition=%cond.1, body=%body.1, backend_config={"a":{"b":"}"}}
  ROOT %r = f32[2]{0} get-tuple-element(%loop), index=1
}
"""


def test_layouts_comments_quotes_and_typed_operands():
    module = parse(MODULE.replace("LIMIT", "9"))
    assert (module.entry.name, module.scheduled, module.devices) == ("main", True, 4)
    both = module.entry.by_name["both"]
    assert both.operands == ("zero", "p")
    assert both.shape == (Shape("s32", ()), Shape("f32", (2,)))
    body = module.computations["body.1"]
    assert body.by_name["x"].shape == Shape("f32", (2,))
    assert body.by_name["next"].op_name == 'a \\"quoted, (name\\"'
    assert body.root.name == "out"
    assert module.entry.by_name["loop"].backend_config == {"a": {"b": "}"}}


def test_text_without_a_program_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        parse("HloModule nothing\n")


@pytest.mark.parametrize(("limit", "trips"), [("9", 4), ("8", 4), ("1", 0), ("-3", 0), ("100000000", None)])
def test_trips_are_counted_where_xla_does_not_tell(limit, trips):
    module = parse(MODULE.replace("LIMIT", limit))
    inside = next(site for site in walk(module) if site.instruction.name == "next")
    assert [loop.trips for loop in inside.loops] == [trips]


def test_trips_that_xla_tells_are_taken():
    text = MODULE.replace("LIMIT", "9").replace('{"a":{"b":"}"}}', '{"known_trip_count":{"n":"32"}}')
    inside = next(site for site in walk(parse(text)) if site.instruction.name == "next")
    assert inside.times == 32


def test_bytes_of_shapes():
    assert [bits(t) for t in ("pred", "u4", "bf16", "f8e4m3fn", "f8e8m0fnu", "f4e2m1fn", "c64")] == [
        8, 4, 16, 8, 8, 4, 64
    ]  # fmt: skip
    assert Shape("u4", (3,)).bytes == 2
    assert Shape("f32", ()).bytes == 4
    assert bytes_of((Shape("bf16", (2, 3)), (Shape("f32", (5,)), Shape("token", ())))) == 32
    assert len(flat(((Shape("u8", (0,)),), Shape("u8", (1,))))) == 2
    with pytest.raises(ValueError, match="q7"):
        bits("q7")


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[4,2]<=[8]", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("[4,2]<=[2,2,2]T(2,1,0)", [[0, 4], [2, 6], [1, 5], [3, 7]]),
        ("mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=1,'c'=4] {'a','c'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", [[3, 2], [1, 0]]),
    ],
)
def test_forms_of_replica_groups(text, groups):
    got = parse_groups(text, 8)
    assert sorted(map(tuple, got.tolist())) == sorted(map(tuple, groups))


def test_groups_of_unlike_sizes_and_unknown_forms():
    assert parse_groups("{{0,1,2},{3}}", 4) == [[0, 1, 2], [3]]
    for text in ("V9", "mesh[oops", "[2,4]"):
        with pytest.raises(ValueError, match="not understood"):
            parse_groups(text, 8)


def test_axes_of_groups_against_every_device():
    shape = {"a": 2, "b": 3, "c": 4}
    coordinates = Coordinates(shape)
    ids = np.arange(24).reshape(2, 3, 4)
    for over in (["a"], ["b"], ["c"], ["a", "c"], ["a", "b", "c"], []):
        keep = [i for i, axis in enumerate(shape) if axis not in over]
        groups = ids.transpose(keep + [i for i in range(3) if i not in keep])
        groups = groups.reshape(int(np.prod([ids.shape[i] for i in keep])), -1)
        assert coordinates.axes_of(groups) == tuple(over)
        assert coordinates.whole(groups)
    halves = np.array([[0, 1], [2, 3]])
    assert coordinates.axes_of(halves) == ("c",)
    assert not coordinates.whole(halves)

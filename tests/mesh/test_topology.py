"""Which devices are near: groups along an axis, however the axes lie."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import pytest

from dsjax.config.exchange import LevelConfig
from dsjax.errors import ConfigError
from dsjax.mesh import make_mesh
from dsjax.mesh.topology import FAR, NEAR, Level, Topology, along, detected, given, groups


@dataclass(frozen=True)
class Device:
    process_index: int
    slice_index: int | None = None


def level(devices: int) -> LevelConfig:
    return LevelConfig(devices=devices)


def test_processes_are_nodes_and_slices_are_before_processes():
    four = [Device(i // 2) for i in range(4)]
    assert detected(four) == Topology((Level("node", 2, NEAR),), FAR, several=True)
    one_a_gpu = [Device(i, i // 2) for i in range(4)]
    assert detected(one_a_gpu).levels[0].devices == 2
    assert detected([Device(0)] * 4) == Topology()
    assert detected([Device(i) for i in range(4)]) == Topology((), FAR, several=True)


def test_what_is_not_understood_is_one_node_and_told():
    mixed = detected([Device(0), Device(1), Device(0), Device(1)])
    assert mixed.levels == () and "grad_sync.topology" in mixed.note


def test_given_levels_must_divide():
    made = given({"node": level(2), "rack": level(4)}, 8)
    assert [(g.name, g.devices, g.link) for g in made.levels] == [("node", 2, NEAR), ("rack", 4, FAR)]
    assert given({"node": level(8)}, 8) == Topology((), NEAR)
    with pytest.raises(ConfigError, match=r"topology\.node: 8 devices do not divide into groups of 3"):
        given({"node": level(3)}, 8)


@pytest.mark.parametrize(
    "axes, sizes",
    [
        ({"data": 8}, [2, 2, 2]),
        ({"data": 4, "fsdp": 2}, [2, 2]),  # a node is one fsdp group: replicas begin at the rack
        ({"data": 2, "fsdp": 4}, [2]),
        ({"data": 2, "tensor": 2, "fsdp": 2}, [2]),
        ({"pipeline": 2, "data": 4}, [2, 2]),
    ],
)
def test_groups_along_data(axes, sizes):
    mesh = make_mesh(axes | {"fsdp": axes.get("fsdp", 1)}, jax.devices()[:8])
    topology = given({"node": level(2), "rack": level(4)}, 8)
    found = along(topology, mesh, "data")
    assert [size for size, _ in found] == sizes
    assert found[-1][1] == FAR or sizes == [2, 2]


def test_members_of_each_level():
    assert groups((2, 3), 0) == [[0, 1], [2, 3], [4, 5]]
    assert groups((2, 3), 1) == [[0, 2, 4], [1, 3, 5]]
    assert groups((2, 2, 2), 1) == [[0, 2], [1, 3], [4, 6], [5, 7]]

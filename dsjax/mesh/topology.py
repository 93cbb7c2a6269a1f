"""Which devices of a mesh are near to each other: those of a node, behind one switch, in a rack."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh

from dsjax.errors import ConfigError


@dataclass(frozen=True)
class Link:
    """How devices of a group reach each other: bytes/s that one sends, and seconds of latency a message."""

    bandwidth: float
    latency: float


# Orders of magnitude for links of which nothing is known: NVLink 4 inside a node, 400 Gbit/s a device between
# nodes. Routes are chosen by them, and only their ratio matters much.
NEAR = Link(450e9, 3e-6)
FAR = Link(50e9, 10e-6)


@dataclass(frozen=True)
class Level:
    """Groups of `devices` devices that follow each other in the mesh's order."""

    name: str
    devices: int
    link: Link


@dataclass(frozen=True)
class Topology:
    """Groups of near devices, the smallest first; all devices together are the last one.

    Attributes:
      levels: the smallest groups first, each a multiple of the one before.
      link: between devices of different groups of the last level.
      several: there is more than one node.
      note: what was assumed, to be told; empty where nothing was.
    """

    levels: tuple[Level, ...] = ()
    link: Link = NEAR
    note: str = ""
    several: bool = False


def given(levels: Mapping[str, Any], devices: int) -> Topology:
    """The topology that a config describes.

    Args:
      levels: name -> an object with `devices`, `gbytes_per_second` and `latency_us` (the latter may be None).

    Raises:
      ConfigError: groups that the devices do not divide into.
    """
    made: list[Level] = []
    for index, (name, level) in enumerate(levels.items()):
        if devices % level.devices:
            raise ConfigError(
                f"grad_sync.topology.{name}: {devices} devices do not divide into groups of {level.devices}; use a "
                "divisor"
            )
        link = NEAR if index == 0 else FAR
        bandwidth = link.bandwidth if level.gbytes_per_second is None else level.gbytes_per_second * 1e9
        latency = link.latency if level.latency_us is None else level.latency_us * 1e-6
        made.append(Level(name, level.devices, Link(bandwidth, latency)))
    inner = [level for level in made if level.devices < devices]
    whole = next((level.link for level in made if level.devices == devices), FAR)
    return Topology(tuple(inner), whole, several=bool(inner))


def detected(devices: Sequence[Any]) -> Topology:
    """Nodes by the hosts that the devices say they are on.

    GPUs tell the domain of their fast links as `slice_index`, which several processes of one host share; others
    only tell their process.
    """
    homes = [getattr(d, "slice_index", None) for d in devices]
    if any(home is None for home in homes) or len(set(homes)) == 1:
        homes = [d.process_index for d in devices]
    sizes = {homes.count(home) for home in set(homes)}
    if len(set(homes)) == 1:
        return Topology()
    each = sizes.pop()
    blocks = np.asarray([list(dict.fromkeys(homes)).index(home) for home in homes])
    if sizes or not np.array_equal(blocks, np.arange(len(homes)) // each):
        return Topology(
            note="grad_sync: devices of a host do not follow each other in the mesh, so all are taken for one node; "
            "say otherwise in grad_sync.topology"
        )
    if each == 1:
        return Topology((), FAR, several=True)
    return Topology((Level("node", each, NEAR),), FAR, several=True)


def along(topology: Topology, mesh: Mesh, axis: str) -> list[tuple[int, Link]]:
    """The groups that devices along a mesh axis fall into: (how many parts a group joins, their link).

    Innermost first; the product of the parts is the axis' size. A level whose groups do not lie alike for all
    devices is left out.
    """
    size = mesh.shape[axis]
    order = np.moveaxis(
        np.arange(mesh.size).reshape(tuple(mesh.shape.values())), list(mesh.shape).index(axis), -1
    )
    places = order.reshape(-1, size)
    found, done = [], 1
    for level in topology.levels:
        units = places // level.devices
        # Members of one group follow each other along the axis.
        length = int((units == units[:, :1]).sum(axis=1).min())
        alike = size % length == 0 and length % done == 0
        if alike:
            blocks = units.reshape(len(units), -1, length)
            alike = bool((blocks == blocks[..., :1]).all())
        if alike and length > done:
            found.append((length // done, level.link))
            done = length
    if size > done:
        found.append((size // done, topology.link))
    return found or [(1, topology.link)]


def groups(parts: Sequence[int], index: int) -> list[list[int]]:
    """Positions along an axis that exchange at one level; the axis is parts[0] x parts[1] x ..., innermost first."""
    inner, size = math.prod(parts[:index]), parts[index]
    outer = math.prod(parts[index + 1 :])
    grid = np.arange(outer * size * inner).reshape(outer, size, inner)
    return np.moveaxis(grid, 1, 2).reshape(-1, size).tolist()

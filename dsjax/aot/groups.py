"""Which devices take part in a collective together, and which mesh axes that is."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

from dsjax.aot.hlo import Instruction, Module

# Collectives whose groups are of replicas unless `use_global_device_ids` says otherwise.
_REPLICA_FIRST = ("all-reduce", "all-gather", "reduce-scatter")


def parse_groups(text: str, devices: int) -> np.ndarray | list[list[int]]:
    """Replica groups, [groups, members], from any of the forms in which XLA prints them.

    Forms: `{{0,1},{2,3}}`, `{}` (all), `[4,2]<=[2,4]T(1,0)`, and axes of a mesh,
    `mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b','a':(1)2}`.  Groups of unlike sizes come as lists.

    Raises:
      ValueError: another form.
    """
    text = text.strip()
    if text.startswith("{"):
        groups = [
            [int(n) for n in re.findall(r"\d+", group)] for group in re.findall(r"\{([\d,\s]+)\}", text)
        ]
        if not groups:
            return np.arange(devices).reshape(1, -1)
        alike = len({len(group) for group in groups}) == 1
        return np.array(groups) if alike else groups
    if text.startswith("mesh["):
        return _mesh_groups(text)
    found = re.match(r"\[([\d,]+)\](<=\[.*)", text)
    if found is None:
        raise ValueError(f"replica groups not understood: {text[:80]}")
    return _iota(found.group(2)[2:]).reshape(_numbers(found.group(1)))


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n.strip()]


def _iota(text: str) -> np.ndarray:
    """Device numbers from `[2,4]` or `[2,4]T(1,0)`."""
    found = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if found is None:
        raise ValueError(f"device order not understood: {text[:80]}")
    dims = _numbers(found.group(1))
    ids = np.arange(math.prod(dims)).reshape(dims)
    return (ids.transpose(_numbers(found.group(2))) if found.group(2) else ids).reshape(-1)


def _mesh_groups(text: str) -> np.ndarray:
    found = re.match(r"mesh\[(.*?)\](?:,\s*device_ids=\((.*?\)?)\))?\s*\{(.*)\}\s*$", text)
    if found is None:
        raise ValueError(f"replica groups over a mesh not understood: {text[:80]}")
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", found.group(1))}
    order = found.group(2)
    count = math.prod(sizes.values())
    ids = np.arange(count)
    if order:
        ids = _iota(order) if order.startswith("[") else np.array(_numbers(order))
    # Every axis is cut into the part before a sub-axis, the sub-axis itself and the part after it.
    used: dict[str, list[tuple[int, int]]] = {}
    for name, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", found.group(3)):
        used.setdefault(name, []).append((int(before), int(size)) if size else (1, sizes[name]))
    dims: list[int] = []
    inside: list[int] = []
    for name, size in sizes.items():
        done = 1
        for before, part in used.get(name, []):
            dims += [before // done, part]
            inside.append(len(dims) - 1)
            done = before * part
        dims.append(size // done)
    outside = [i for i in range(len(dims)) if i not in inside]
    members = math.prod(dims[i] for i in inside)
    return ids.reshape(dims).transpose(outside + inside).reshape(-1, members)


def members_of(instruction: Instruction, kind: str, module: Module) -> np.ndarray | list[list[int]]:
    """The groups of devices of a collective; for a permute, the pairs (from, to) of unlike devices."""
    attributes = instruction.attributes
    if kind == "collective-permute":
        pairs = re.findall(r"\{(\d+),(\d+)\}", attributes.get("source_target_pairs", ""))
        unlike = [[int(a), int(b)] for a, b in pairs if a != b]
        return np.array(unlike).reshape(-1, 2)
    text = attributes.get("replica_groups", "{}")
    by_replica = (
        kind in _REPLICA_FIRST and module.replicas == 1 and attributes.get("use_global_device_ids") != "true"
    )
    if by_replica and "channel_id" in attributes:
        # Every partition of the one replica takes part.
        return np.arange(module.devices).reshape(1, -1)
    if by_replica:
        return np.arange(module.devices).reshape(-1, 1)
    return parse_groups(text, module.devices)


class Coordinates:
    """Where each device of a program stands on a mesh.

    Args:
      shape: axis name -> size, outermost first; the program's devices are numbered in that order.
    """

    def __init__(self, shape: Mapping[str, int]):
        self.shape = dict(shape)
        self.size = math.prod(self.shape.values())
        self._at = np.stack(np.unravel_index(np.arange(self.size), tuple(self.shape.values()) or (1,)))

    def axes_of(self, groups: np.ndarray | list[list[int]]) -> tuple[str, ...]:
        """The axes along which members of one group differ, outermost first."""
        differ = np.zeros(len(self._at), bool)
        for at in self._positions(groups):
            differ |= (at != at[..., :1]).any(axis=tuple(range(1, at.ndim)))
        return tuple(name for name, d in zip(self.shape, differ, strict=False) if d)

    def _positions(self, groups: np.ndarray | list[list[int]]) -> list[np.ndarray]:
        if isinstance(groups, np.ndarray):
            return [self._at[:, groups]] if groups.size else []
        return [self._at[:, np.array(group)] for group in groups]

    def axes_along(self, values: np.ndarray) -> frozenset[str]:
        """The axes along which a value per device differs."""
        grid = values.reshape(tuple(self.shape.values()) or (1,))
        return frozenset(
            name for i, name in enumerate(self.shape) if (grid != np.take(grid, [0], axis=i)).any()
        )

    def whole(self, groups: np.ndarray | list[list[int]]) -> bool:
        """Whether the groups take in every device along their axes, and every device is in one."""
        if not isinstance(groups, np.ndarray):
            return False
        extent = math.prod(self.shape[axis] for axis in self.axes_of(groups))
        return bool(groups.shape[1] == extent and groups.size == self.size)

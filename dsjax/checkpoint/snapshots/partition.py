"""Which process keeps which part of a state, and a device to take it from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dsjax.mesh import named_leaves


@dataclass(frozen=True)
class Box:
    """A part of an array that one process keeps: its extent, and a device of that process that has it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    device: jax.Device


def extents(
    sharding: Any, shape: tuple[int, ...]
) -> dict[tuple[tuple[int, ...], tuple[int, ...]], list[jax.Device]]:
    """The boxes (start, stop) that a sharding cuts an array into, and the devices that hold each."""
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], list[jax.Device]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        ends = [piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True)]
        box = tuple(a for a, _ in ends), tuple(b for _, b in ends)
        boxes.setdefault(box, []).append(device)
    return boxes


def partition(stored: Mapping[str, Any], process: int) -> list[Box]:
    """The boxes that a process keeps of a state.

    Each box is kept once.  Where several processes hold it (replicas), the one with the fewest bytes so
    far keeps it; all processes come to the same answer.

    Args:
      stored: nested abstract arrays with shardings.
      process: whose part.
    """
    load: dict[int, int] = {}
    mine = []
    for name, leaf in named_leaves(stored).items():
        shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
        for (start, stop), devices in extents(leaf.sharding, shape).items():
            owner = min({d.process_index for d in devices}, key=lambda p: (load.get(p, 0), p))
            count = int(np.prod([b - a for a, b in zip(start, stop, strict=True)], dtype=np.int64))
            load[owner] = load.get(owner, 0) + count * dtype.itemsize
            if owner == process:
                device = next(d for d in devices if d.process_index == process)
                mine.append(Box(name, dtype.name, shape, start, stop, device))
    return mine

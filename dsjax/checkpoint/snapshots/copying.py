"""Copying a state from its devices into the memory of a snapshot."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from dsjax.checkpoint.snapshots.partition import Box
from dsjax.errors import InternalError

_CHUNK = 8 << 20


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="snapshot-copy")


def pieces_of(
    boxes: Sequence[Box], shardings: Mapping[str, Any], leaves: Mapping[str, Any]
) -> list[jax.Array]:
    """The single-device arrays that hold the boxes.

    Raises:
      InternalError: the state is not cut as it was when the boxes were made.
    """
    shards: dict[str, dict[jax.Device, jax.Array]] = {}
    for name, sharding in shardings.items():
        leaf = leaves.get(name)
        if leaf is None or not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            raise InternalError(f"{name} is not where the snapshots expect it; prepare them anew")
        shards[name] = {shard.device: shard.data for shard in leaf.addressable_shards}
    pieces = [shards[box.name][box.device] for box in boxes]
    for box, piece in zip(boxes, pieces, strict=True):
        if leaves[box.name].shape != box.shape or piece.dtype != np.dtype(box.dtype):
            raise InternalError(f"{box.name} is not what the snapshots expect; prepare them anew")
    return pieces


def _bytes(array: jax.Array) -> np.ndarray:
    """A device array's bytes: on a CPU its own memory."""
    return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)


def copy_now(pieces: Sequence[jax.Array], targets: Sequence[np.ndarray]) -> None:
    """Copies arrays of the CPU, with several threads.

    No view of a piece is left when this returns: a live view cancels the donation of its array, silently.
    """
    work: list[tuple[np.ndarray, np.ndarray]] = []
    for piece, target in zip(pieces, targets, strict=True):
        source = _bytes(piece)
        for start in range(0, source.size, _CHUNK):
            work.append((target[start : start + _CHUNK], source[start : start + _CHUNK]))
        del source

    def copy(number: int) -> None:
        # A thread may keep what it was given for a moment after its result is there: so only a number.
        np.copyto(*work[number])

    for _ in _pool().map(copy, range(len(work))):
        pass
    work.clear()


@dataclass
class Staged:
    """A state on its way through pinned memory of the host."""

    arrays: list[jax.Array]
    targets: Sequence[np.ndarray]

    def copy(self) -> None:
        """Copies it on, as it arrives, and lets go of the pinned memory."""
        for number, target in enumerate(self.targets):
            np.copyto(target, _bytes(self.arrays[number]))
        self.arrays.clear()


def stage(pieces: Sequence[jax.Array], targets: Sequence[np.ndarray]) -> Staged:
    """Starts copying device arrays to pinned memory; they may be donated at once."""
    places = [
        SingleDeviceSharding(next(iter(piece.devices())), memory_kind="pinned_host") for piece in pieces
    ]
    return Staged(jax.device_put(list(pieces), places), targets)


def take(pieces: Sequence[jax.Array], targets: Sequence[np.ndarray]) -> Staged | None:
    """Copies what lies in this host's memory already, and starts copying what does not.

    Returns:
      What is left to be done in the background; None: nothing.
    """
    if all(_on_cpu(piece) for piece in pieces):
        copy_now(pieces, targets)
        return None
    return stage(pieces, targets)


def _on_cpu(piece: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in piece.devices())

"""Named mesh axes, outermost (slowest link) first, and the mesh over them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from dsjax.errors import ConfigError

# `tensor_rows` is the second size of `tensor: [columns, rows]`; the others have their names in a config.
AXES = ("pipeline", "data", "fsdp", "context", "expert", "tensor", "tensor_rows")
BATCH_AXES = ("data", "fsdp", "expert")
# A parameter at rest is cut over these too, and gathered over them to be used. `context` is the last: a pipeline leaves
# it to the compiler, inside of what the others have cut.
SHARD_AXES = ("fsdp", "expert", "context")


def resolve_sizes(sizes: Mapping[str, Any], devices: int) -> dict[str, int]:
    """Sizes of all axes for a number of devices: the one that is -1 takes the rest.

    Args:
      sizes: axis -> size; `tensor` may be a pair, columns and rows.

    Raises:
      ConfigError: the sizes do not multiply to `devices`.
    """
    sizes = dict(sizes)
    if not isinstance(sizes.get("tensor", 1), int):
        sizes["tensor"], sizes["tensor_rows"] = sizes["tensor"]
    full = {axis: int(sizes.get(axis, 1)) for axis in AXES}
    free = [axis for axis in AXES if full[axis] == -1]
    known = math.prod(size for size in full.values() if size != -1)
    shown = " x ".join(f"{a.replace('_', ' ')} {s}" for a, s in full.items() if s != 1) or "one device"
    if free:
        if devices % known:
            raise ConfigError(
                f"mesh: {shown} does not divide {devices} devices; the fixed axes multiply to "
                f"{known}, which must be one of {', '.join(map(str, divisors(devices)))}"
            )
        full[free[0]] = devices // known
    elif known != devices:
        hint = (
            f"set mesh.fsdp to {devices // known * full['fsdp']} or to -1"
            if devices % known == 0
            else (
                f"set mesh.fsdp to -1 and let the other axes multiply to one of "
                f"{', '.join(map(str, divisors(devices)))}"
            )
        )
        raise ConfigError(
            f"mesh: {shown} is {known} devices but there are {devices}; {hint} "
            "(on a CPU, runtime.cpu_devices sets how many devices there are)"
        )
    return full


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def make_mesh(sizes: Mapping[str, int] | Any, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with all axes over the devices, in their order (those of one process adjacent).

    Args:
      sizes: axis name -> size (or a config's mesh section); missing axes have size 1, one may
        be -1; `tensor` may be a pair, columns and rows.
      devices: the devices to use; all of them by default.

    Raises:
      ConfigError: the sizes do not fit the number of devices.
    """
    if not isinstance(sizes, Mapping):
        sizes = sizes.model_dump()
    devices = list(jax.devices() if devices is None else devices)
    full = resolve_sizes(sizes, len(devices))
    return jax.make_mesh(
        tuple(full[axis] for axis in AXES), AXES, (AxisType.Auto,) * len(AXES), devices=devices
    )


def batch_shards(mesh: Mesh) -> int:
    """Over how many shards the batch is split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def devices_by_shard(mesh: Mesh) -> np.ndarray:
    """The devices that hold each shard of the batch: [shards, devices that differ in other axes only]."""
    order = tuple(AXES.index(axis) for axis in BATCH_AXES)
    others = tuple(i for i in range(len(AXES)) if i not in order)
    return np.transpose(mesh.devices, order + others).reshape(batch_shards(mesh), -1)


def process_rows(mesh: Mesh, rows: int, microbatches: int = 1) -> np.ndarray:
    """Which rows of the global batch this process supplies, as positions in [0, rows), in order.

    The global batch is cut into microbatches and each of those over the batch axes.  Processes
    whose devices hold the same shard (they differ in context or tensor) supply the same rows.
    """
    shards = batch_shards(mesh)
    each = rows // microbatches // shards
    by_shard = devices_by_shard(mesh)
    here = jax.process_index()
    mine = [s for s in range(shards) if any(d.process_index == here for d in by_shard[s])]
    positions = np.arange(rows).reshape(microbatches, shards, each)
    return positions[:, mine].reshape(-1)


def zigzag_order(length: int, ranks: int) -> np.ndarray:
    """Order of sequence positions in which each rank's share holds equal causal work.

    The sequence is cut into 2 * ranks chunks; rank r holds chunks r and 2 * ranks - 1 - r, an
    early one and a late one.  Returns int32 [length]: slot -> position in the sequence.
    """
    if length % (2 * ranks):
        raise ConfigError(
            f"train.sequence_length {length} does not divide into {2 * ranks} chunks, two for each "
            f"rank of mesh.context {ranks}; use a multiple of {2 * ranks}"
        )
    chunks = np.arange(length, dtype=np.int32).reshape(2 * ranks, -1)
    pairs = [chunk for r in range(ranks) for chunk in (chunks[r], chunks[2 * ranks - 1 - r])]
    return np.concatenate(pairs)

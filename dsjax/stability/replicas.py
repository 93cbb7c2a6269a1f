"""Whether devices that should hold the same numbers do: a bit that flipped in one of them shows in no loss for long."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dsjax.mesh import named_leaves

_MULTIPLIER = np.uint32(0x9E3779B1)  # odd: no bit is lost


class Replicas:
    """Compares what devices hold, array by array; compiled once.

    Args:
      mesh: of the arrays.
      like: an abstract tree with shardings.
    """

    def __init__(self, mesh: Mesh, like: Any):
        self._mesh = mesh
        leaves = {name: leaf for name, leaf in named_leaves(like).items() if _compared(leaf)}
        self._names = list(leaves)
        self._groups = [_groups(leaf) for leaf in leaves.values()]
        specs = tuple(leaf.sharding.spec for leaf in leaves.values())
        axes = tuple(mesh.axis_names)

        def sums(*parts: jax.Array) -> jax.Array:
            return jnp.stack([checksum(part) for part in parts])[None]

        mapped = jax.shard_map(sums, mesh=mesh, in_specs=specs, out_specs=P(axes), check_vma=False)
        self._sums = jax.jit(mapped) if leaves else None

    def differing(self, tree: Any) -> dict[str, list[int]]:
        """Names of arrays that are not the same everywhere -> ids of the devices that are in the minority.

        Where as many say one thing as another all of them are named.
        """
        if self._sums is None:
            return {}
        leaves = named_leaves(tree)
        sums = self._sums(*(leaves[name] for name in self._names))
        found = np.asarray(jax.jit(lambda x: x, out_shardings=_whole(self._mesh))(sums))
        devices = [device.id for device in self._mesh.devices.flat]
        said = {
            name: dict(zip(devices, found[:, i].tolist(), strict=True)) for i, name in enumerate(self._names)
        }
        return {
            name: odd
            for name, groups in zip(self._names, self._groups, strict=True)
            if (odd := _odd(groups, said[name]))
        }


def _whole(mesh: Mesh) -> Any:
    return jax.sharding.NamedSharding(mesh, P())


def _compared(leaf: Any) -> bool:
    """Whether it holds plain numbers that lie on more than one device alike."""
    plain = not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    return plain and leaf.size > 0 and any(len(group) > 1 for group in _groups(leaf))


def _groups(leaf: Any) -> list[list[int]]:
    """Ids of devices that hold the same part of an array, part by part."""
    held = defaultdict(list)
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        held[str(index)].append(device.id)
    return list(held.values())


def _odd(groups: list[list[int]], said: Mapping[int, int]) -> list[int]:
    odd: list[int] = []
    for group in groups:
        counts = Counter(said[device] for device in group)
        if len(counts) > 1:
            (most, times), (_, second) = counts.most_common(2)
            odd += [device for device in group if times == second or said[device] != most]
    return sorted(odd)


def checksum(x: jax.Array) -> jax.Array:
    """uint32 [] of the bits of an array, of its order too."""
    width = x.dtype.itemsize
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[width]
    bits = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, unsigned)
    bits = bits.reshape(-1).astype(jnp.uint32)
    places = jnp.arange(bits.size, dtype=jnp.uint32)
    mixed = (bits ^ (places * _MULTIPLIER)) * _MULTIPLIER
    return jnp.sum(mixed ^ (mixed >> 15), dtype=jnp.uint32)


def flipped(array: jax.Array, device_id: int, bit: int = 20) -> jax.Array:
    """An array with one bit of the first number on one device turned: what memory that fails does.

    Args:
      bit: of an fp32 number; one of 16 bits is the upper half of one.
    """
    parts = []
    for shard in array.addressable_shards:
        part = shard.data
        if shard.device.id == device_id:
            numbers = np.array(part)
            width = 8 * numbers.dtype.itemsize
            first = numbers.reshape(-1)[:1].view(f"uint{width}")
            first ^= first.dtype.type(1 << max(0, bit - 32 + width))
            part = jax.device_put(numbers, shard.device)
        parts.append(part)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)

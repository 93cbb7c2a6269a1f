"""All-gather and reduce-scatter of quantised values, called on local shards inside a `jax.shard_map`.

Values are packed (`block_quant.pack`), exchanged as bytes by one collective, and unpacked; a reduce-scatter is an
all-to-all whose parts are summed in fp32 as they are unpacked, so nothing is quantised twice. Bytes received
a device, for n values on d devices: (d - 1) / d x packed_bytes(n), against 4 n (d - 1) / d for fp32.

The bytes travel by XLA's collectives, which run beside other work and over any link. `nvlink=True` takes the
Mosaic kernels of `mosaic` instead, for one process on the GPUs of one Hopper or newer host: fewer launches for
small arrays, but they hold multiprocessors and hide behind nothing, so they are never chosen unasked.

No gradient passes. For error feedback or stochastic rounding compose `pack`, `exchange` and `unpack_sum`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import hardware
from pallas_kernels.block_quant import pack, unpack, unpack_sum
from pallas_kernels.collectives import mosaic


def all_gather(
    x: jax.Array, axis_name: Any, *, format: str, block: int = 128, axis: int = 0, nvlink: bool = False
) -> jax.Array:
    """Shards of all devices of a mesh axis, concatenated along a dimension; each is rounded once.

    Args:
      x: this device's shard, any shape and float dtype. Blocks run through it in memory order.
      axis_name: a mesh axis of the enclosing shard_map.
      format, block: as in `block_quant.encode`.
      axis: the dimension that grows.

    Returns:
      x's shape, the dimension times the devices; x's dtype. A device sees its own shard rounded too, so all see the
      same.

    Raises:
      ValueError: no such format, block or dimension; nvlink where it is not to be had.
    """
    axis = _dimension("all_gather", x, axis)
    packed, _ = pack(lax.stop_gradient(x).reshape(x.size), format=format, block=block)
    if nvlink:
        _refuse_far("all_gather", axis_name)
        parts = mosaic.all_gather(packed, axis_name)
    else:
        parts = lax.all_gather(packed, axis_name)
    whole = unpack(parts, x.size, format=format, block=block).astype(x.dtype)
    # [devices, ...] -> devices beside the dimension that they are part of.
    whole = jnp.moveaxis(whole.reshape(-1, *x.shape), 0, axis)
    return whole.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def reduce_scatter(
    x: jax.Array, axis_name: Any, *, format: str, block: int = 128, axis: int = 0, nvlink: bool = False
) -> jax.Array:
    """Sum over the devices of a mesh axis, of which each keeps its part along a dimension.

    Args:
      x: this device's summand, any shape and float dtype.
      axis: the dimension that is cut; a multiple of the devices.

    Returns:
      x's shape, the dimension divided by the devices; x's dtype, summed in fp32.

    Raises:
      ValueError: as `all_gather`, or the dimension does not divide.
    """
    axis = _dimension("reduce_scatter", x, axis)
    devices = lax.axis_size(axis_name)
    if x.shape[axis] % devices:
        raise ValueError(
            f"reduce_scatter: expected dimension {axis} a multiple of the {devices} devices of {axis_name}; "
            f"got {x.shape}"
        )
    shape = (*x.shape[:axis], x.shape[axis] // devices, *x.shape[axis + 1 :])
    rows = lax.stop_gradient(x).reshape(*x.shape[:axis], devices, *shape[axis:])
    rows = jnp.moveaxis(rows, axis, 0).reshape(devices, x.size // devices)
    packed, _ = pack(rows, format=format, block=block)
    parts = exchange(packed, axis_name, nvlink=nvlink)
    return unpack_sum(parts, rows.shape[1], format=format, block=block).reshape(shape).astype(x.dtype)


def exchange(packed: jax.Array, axis_name: Any, *, nvlink: bool = False) -> jax.Array:
    """All-to-all of bytes: [devices, bytes], row i for device i -> [devices, bytes], row i from device i.

    Raises:
      ValueError: as `all_gather`.
    """
    if nvlink:
        _refuse_far("exchange", axis_name)
        return mosaic.all_to_all(packed, axis_name)
    return lax.all_to_all(packed, axis_name, 0, 0, tiled=True)


def _dimension(what: str, x: jax.Array, axis: int) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"{what}: expected a dimension of x {x.shape}; got axis={axis}")
    return axis % x.ndim


def _refuse_far(what: str, axis_name: Any) -> None:
    """Raises where the kernels over NVLink do not run."""
    chip, devices = hardware.chip(), jax.sharding.get_abstract_mesh().size
    near = chip.platform == "gpu" and chip.generation in mosaic.GENERATIONS and jax.process_count() == 1
    if not near or lax.axis_size(axis_name) != devices:
        raise ValueError(
            f"{what}: nvlink=True takes one process with Hopper or Blackwell GPUs of one host and a mesh of one "
            f"axis over them; here are {jax.process_count()} processes, {devices} devices ({chip.platform}), "
            f"{lax.axis_size(axis_name)} on {axis_name}"
        )

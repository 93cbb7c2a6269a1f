"""The exchange on one device, in loops: what every replica's device should end with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from dsjax.grad_sync.exchange import Exchange, Tensor


def local_parts(tensor: Tensor, array: np.ndarray) -> dict[tuple[int, ...], np.ndarray]:
    """The parts that devices hold of an array, by their places along the axes that cut it."""
    sizes = dict(tensor.axes)
    found = {}
    for place in itertools.product(*(range(size) for _, size in tensor.axes)):
        at = dict(zip([axis for axis, _ in tensor.axes], place, strict=True))
        index = []
        for extent, entry in itertools.zip_longest(tensor.shape, tensor.spec):
            axes = [a for a in (entry if isinstance(entry, tuple) else (entry,)) if a in sizes]
            number = 0
            for axis in axes:
                number = number * sizes[axis] + at[axis]
            size = extent // math.prod([sizes[a] for a in axes])
            index.append(slice(number * size, (number + 1) * size))
        found[place] = array[tuple(index)]
    return found


def exchanged(
    exchange: Exchange,
    tensor: Tensor,
    replicas: list[np.ndarray],
    old: Mapping[str, np.ndarray],
    rows: int,
    seed: Any,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The sum over replicas of one window of one device's part, and its residuals [replicas, numbers].

    Args:
      replicas: each replica's part.
      old: residuals of this window, likewise.
    """
    codec, parts = exchange.codec, exchange.route.parts
    outer, near = parts[-1], exchange.route.inner
    if codec is None or not tensor.coded:
        return sum(np.asarray(r, np.float32) for r in replicas), {}
    granule = codec.granule
    size = replicas[0].size
    piece = -(-size // (near * outer * granule)) * granule
    flat = [np.pad(r.reshape(-1), (0, piece * near * outer - size)) for r in replicas]
    new: dict[str, np.ndarray] = {name: np.array(value) for name, value in old.items()}
    whole = np.zeros(piece * near * outer, np.float32)
    for share in range(near):
        # What near replicas reduce is laid out by their inner digits, the innermost first.
        digits, rest = [], share
        for part in parts[:-1]:
            digits.append(rest % part)
            rest //= part
        number = 0
        for digit, part in zip(digits, parts[:-1], strict=True):
            number = number * part + digit
        cut = slice(number * outer * piece, (number + 1) * outer * piece)
        slabs = []
        for group in range(outer):
            members = [flat[group * near + i][cut] for i in range(near)]
            slabs.append(np.asarray(sum(members)))
        owners = [group * near + share for group in range(outer)]
        whole[cut] = _coded(exchange, slabs, owners, old, new, piece, outer)
    return whole[:size].reshape(replicas[0].shape), new


def _coded(
    exchange: Exchange, slabs: Any, owners: Any, old: Any, new: Any, piece: int, outer: int
) -> np.ndarray:
    codec, payloads = exchange.codec, []
    for owner, slab in zip(owners, slabs, strict=True):
        shape = (-1,) if exchange.gathers else (outer, piece)
        h = codec.before(jnp.asarray(slab).reshape(shape))
        residual = jnp.asarray(old["sent"][owner]).reshape(shape) if "sent" in old else None
        payload, left = codec.encode(h, residual, jnp.uint32(0))
        payloads.append(payload)
        if left is not None:
            new["sent"][owner] = np.asarray(left).reshape(-1)
    if exchange.gathers:
        total = jnp.zeros(outer * piece)
        for payload in payloads:
            total = total + codec.decode(payload, outer * piece)
        return np.asarray(codec.after(total))
    result = []
    for place, owner in enumerate(owners):
        total = jnp.zeros(piece)
        for payload in payloads:
            total = total + codec.decode(payload[place], piece)
        residual = jnp.asarray(old["summed"][owner]) if "summed" in old else None
        payload, left = codec.encode(total, residual, jnp.uint32(1))
        if left is not None:
            new["summed"][owner] = np.asarray(left)
        result.append(np.asarray(codec.after(codec.decode(payload, piece))))
    return np.concatenate(result)

"""A saved model's weights onto a mesh: each process reads what its devices hold, one tensor's worth at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.hf.tensors import Readable
from dsjax.mesh import map_named
from dsjax.models.weights import Box, WeightMap


def loaded(
    tree: Any, weights: WeightMap, tensors: Readable, slots: Callable[[str], Sequence[int] | np.ndarray]
) -> Any:
    """A tree of variables with the weights in place of those that it has; its arrays are given up.

    Stacked parameters are filled layer by layer (and expert by expert), in their own memory.

    Args:
      tree: parameters and other variables; those of which the map knows nothing stay.
      weights: of the model.
      slots: path of a stack -> the layer in each slot, -1 for none.

    Raises:
      InputError: tensors that are missing, of other shapes or unknown, a line each.
    """
    names = weights.names(tensors.shapes)

    def get(name: str, box: Box) -> np.ndarray:
        return tensors.get(names[name], box)

    def one(path: str, leaf: Any) -> Any:
        if path not in weights.shapes:
            return leaf
        return _filled(leaf, partial(weights.parameter, path, get), weights.stacked(path), slots, path)

    return map_named(one, tree)


def _filled(leaf: jax.Array, read: Any, stacked: int, slots: Any, path: str) -> jax.Array:
    """An array with what `read` gives for its boxes.

    Args:
      stacked: leading dimensions whose indices are tensors of their own.
    """
    at: Any = leaf.sharding
    spec = (*at.spec, *(None,) * (leaf.ndim - len(at.spec)))
    place = NamedSharding(at.mesh, P(*spec[stacked:]))
    inner, put = leaf.shape[stacked:], _put(at)
    lead: list[list[tuple[int, int]]] = [[(i, i) for i in range(n)] for n in leaf.shape[:stacked]]
    if stacked:
        held = slots(path.partition("/")[0])
        lead[0] = [(slot, int(layer)) for slot, layer in enumerate(held) if layer >= 0]
    for index in itertools.product(*lead):
        own = tuple((number, number + 1) for _, number in index)
        part = _part(read, own, inner, place, leaf.dtype)
        leaf = put(leaf, part, [slot for slot, _ in index])
    return leaf


def _part(read: Any, own: Box, inner: tuple[int, ...], place: NamedSharding, dtype: Any) -> jax.Array:
    """One tensor's worth over the mesh; devices that hold the same share what is read."""
    known: dict[Box, np.ndarray] = {}

    def of_device(index: Any) -> np.ndarray:
        box = tuple(
            (s.start or 0, extent if s.stop is None else s.stop)
            for s, extent in zip(index, inner, strict=True)
        )
        if box not in known:
            value = np.asarray(read(box=(*own, *box)))
            known[box] = np.ascontiguousarray(
                value.reshape([b - a for a, b in box]).astype(dtype, copy=False)
            )
        return known[box]

    return jax.make_array_from_callback(inner, place, of_device)


def _put(sharding: Any) -> Callable[[jax.Array, jax.Array, Any], jax.Array]:
    """A function that writes a part at an index of the leading dimensions, in place."""

    def put(whole: jax.Array, part: jax.Array, index: Any) -> jax.Array:
        part = part.reshape((1,) * (whole.ndim - part.ndim) + part.shape)
        start = [*index, *(0,) * (whole.ndim - len(index))]
        return jax.lax.dynamic_update_slice(whole, part, start)

    return jax.jit(put, donate_argnums=0, out_shardings=sharding)

"""How arrays are cut on disk: so that any part of one is read at about its own size.

A chunk is the least that is read.  What a device holds is cut into eight along each dimension, where its size
and a least size of chunks allow, so that eight times as many devices, or eight along another
dimension, read what they need and little more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint._src.arrays import subchunking

_LEAST, _MOST = 64 * 2**10, 4 * 2**20
_PIECES = 8
_FEW = 16  # dimensions up to this size, such as stacked layers, are cut into single entries
_ROW = 256  # bytes of the last dimension that stay together


def chunk_shape(shape: Sequence[int], whole: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The shape of an array's chunks, a divisor of `shape`.

    Args:
      shape: of what one device holds; whole: of the array; itemsize: bytes of an element.
    """
    chunk = [max(1, size) for size in shape]
    # Dimensions that are cut already are those most likely to be cut again, then the largest.
    order = sorted(range(len(chunk)), key=lambda d: (shape[d] == whole[d], -chunk[d]))
    for d in order:
        fitting = [n for n in _cuts(chunk[d]) if _bytes(chunk, itemsize) // n >= _LEAST]
        if d == len(chunk) - 1:
            fitting = [n for n in fitting if chunk[d] // n * itemsize >= _ROW]
        chunk[d] //= max(fitting, default=1)
    while _bytes(chunk, itemsize) > _MOST:
        d = next(d for d in range(len(chunk)) if chunk[d] > 1)
        chunk[d] //= next(n for n in range(2, chunk[d] + 1) if chunk[d] % n == 0)
    return tuple(chunk)


def _cuts(size: int) -> list[int]:
    """Into how many equal pieces a dimension may be cut."""
    most = size if size <= _FEW else _PIECES
    return [n for n in range(1, most + 1) if size % n == 0]


def _bytes(shape: Sequence[int], itemsize: int) -> int:
    return math.prod(shape) * itemsize


class _Ours(tuple[int, ...]):
    """Takes the place of Orbax's `shard_axes`: says that the chunks are to be ours."""


def save_args() -> ocp.SaveArgs:
    """Orbax's arguments for saving an array."""
    _install()
    return ocp.SaveArgs(shard_axes=_Ours())


def _install() -> None:
    """Lets Orbax ask here for the chunks of our arrays: it can be told a size only, and cuts few dimensions to it."""
    theirs = subchunking.choose_chunk_shape
    if getattr(theirs, "asks_dsjax", False):
        return

    def choose(whole: Any, shape: Any, dtype: Any, *args: Any, shard_axes: Any = (), **kwargs: Any) -> Any:
        if isinstance(shard_axes, _Ours):
            return chunk_shape(shape, whole, jax.numpy.dtype(dtype).itemsize)
        return theirs(whole, shape, dtype, *args, shard_axes=shard_axes, **kwargs)

    choose.asks_dsjax = True  # type: ignore[attr-defined]
    subchunking.choose_chunk_shape = choose

"""The order of rows: position in the run -> (source, row), for any position at once."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

_PARTS = 10**9


def order_of(lengths: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool) -> Any:
    """A Grain data set without end of (source, row).

    Each source's rows come once an epoch of its own, shuffled anew in each; sources take turns by weight,
    so that any stretch of the run holds them in proportion.

    Args:
      lengths: rows of each source.
      weights: share of each source, in any unit.
    """
    import grain

    turns = [
        grain.MapDataset.source(_Epochs(number, length, seed, shuffle))
        for number, length in enumerate(lengths)
    ]
    if len(turns) == 1:
        return turns[0]
    total = sum(weights)
    return grain.MapDataset.mix(turns, [max(1, round(weight / total * _PARTS)) for weight in weights])


class _Epochs:
    """One source's rows, epoch after epoch.

    The permutation is NumPy's legacy one, which is frozen for ever; Grain's own index shuffle takes
    milliseconds a row where there are few.
    """

    def __init__(self, source: int, length: int, seed: int, shuffle: bool):
        self._source, self._length, self._seed, self._shuffle = source, length, seed, shuffle
        # Two: a batch may begin in one epoch and end in the next.
        self._permutation = functools.lru_cache(maxsize=2)(self._permuted)

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, position: int) -> tuple[int, int]:
        epoch, row = divmod(int(position), self._length)
        return self._source, int(self._permutation(epoch)[row]) if self._shuffle else row

    def _permuted(self, epoch: int) -> np.ndarray:
        told = f"order {self._seed} {self._source} {epoch}".encode()
        key = np.frombuffer(hashlib.blake2b(told, digest_size=32).digest(), "<u4")
        return np.random.RandomState(key).permutation(self._length).astype(np.uint32)

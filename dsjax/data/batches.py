"""Numbered batches, read ahead by Grain's threads in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_AHEAD = 2
"""Batches a thread holds ready: whole ones, so a few are plenty."""


class _Source:
    def __init__(self, read: Callable[[int], Any], length: int):
        self._read, self._length = read, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Any:
        return self._read(number)


class Batches(Iterator[Any]):
    """Batches `start` .. `length` - 1 of a function from number to batch.

    Args:
      threads: how many read ahead; 0: none, a batch is read when it is asked for.
    """

    def __init__(self, read: Callable[[int], Any], length: int, start: int, threads: int):
        import grain

        source = grain.MapDataset.source(_Source(read, length))
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=_AHEAD * threads)
        self._batches = iter(source.to_iter_dataset(options))
        self._batches.set_state({"next_index": start})

    def __next__(self) -> Any:
        return next(self._batches)

    def close(self) -> None:
        """Ends the threads."""
        self._batches.close()

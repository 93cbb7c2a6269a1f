"""Reading boxes of arrays out of snapshot files, wherever those lie."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsjax.checkpoint.snapshots.file import Index, Record, digest_of, read_index
from dsjax.errors import Damaged

Corner = tuple[int, ...]


class LocalFiles:
    """The snapshot files of this host's directory.  A record is checked against its digest when first read."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._open: dict[str, tuple[Index, np.ndarray]] = {}
        self._good: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def box(self, file: str, number: int, start: Corner, stop: Corner) -> np.ndarray:
        """A box of a record, by the record's own coordinates: a view of the file, read-only.

        Raises:
          Damaged: the file is gone, or the record is not what was written.
        """
        with self._lock:
            if file not in self._open:
                index = read_index(self.directory / file)
                if index is None:
                    raise Damaged(f"snapshot {self.directory / file} is gone or damaged")
                self._open[file] = index, np.asarray(np.memmap(self.directory / file, np.uint8, "r"))
        index, data = self._open[file]
        record = index.records[number]
        raw = data[record.offset : record.offset + record.nbytes]
        if (file, number) not in self._good:
            if digest_of(raw) != record.digest:
                raise Damaged(
                    f"snapshot {self.directory / file}: {record.name} is damaged (its checksum differs); remove "
                    "the file to go on from an earlier snapshot or from disk"
                )
            self._good.add((file, number))
        return as_array(raw, record)[_slices(start, stop)]


def _slices(start: Corner, stop: Corner) -> tuple[Any, ...]:
    """An index that gives a view of an array without dimensions, too."""
    return (..., *map(slice, start, stop))


def as_array(raw: np.ndarray, record: Record) -> np.ndarray:
    """A record's bytes as its box."""
    return raw.view(np.dtype(record.dtype)).reshape(record.box)


@dataclass(frozen=True)
class Copy:
    """A file that holds a process's part of a snapshot, and the host it lies on."""

    host: int
    file: str


Fetch = Callable[[Copy, int, Corner, Corner, Record], np.ndarray]


class Snapshot:
    """All parts of one snapshot.

    Args:
      parts: the index of each process's part, and the files that hold it, best first.
      local: the files here.
      here: this host.
      fetch: reads a box of a record of another host's file.
    """

    def __init__(
        self, parts: Sequence[tuple[Index, Sequence[Copy]]], local: LocalFiles, here: int, fetch: Fetch
    ):
        self._parts, self._local, self._here, self._fetch = parts, local, here, fetch
        self._where: dict[str, list[tuple[int, int]]] = {}
        for part, (index, _) in enumerate(parts):
            for number, record in enumerate(index.records):
                self._where.setdefault(record.name, []).append((part, number))

    @property
    def arrays(self) -> Mapping[str, Record]:
        """A record of each array, for its shape and type."""
        return {name: self._record(*places[0]) for name, places in self._where.items()}

    def _record(self, part: int, number: int) -> Record:
        return self._parts[part][0].records[number]

    def read(self, name: str, start: Corner, stop: Corner) -> np.ndarray:
        """A box of an array.  It may be a read-only view of a file: copy it.

        Raises:
          Damaged: bytes that are missing or damaged in all copies.
        """
        wanted = tuple(b - a for a, b in zip(start, stop, strict=True))
        result: np.ndarray | None = None
        read = 0
        for part, number in self._where[name]:
            record = self._record(part, number)
            low = tuple(map(max, start, record.start))
            high = tuple(map(min, stop, record.stop))
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            piece = self._piece(part, number, _minus(low, record.start), _minus(high, record.start))
            if piece.shape == wanted:
                return piece
            if result is None:
                result = np.empty(wanted, piece.dtype)
            result[_slices(_minus(low, start), _minus(high, start))] = piece
            read += piece.size
        size = int(np.prod(wanted, dtype=np.int64))
        if read != size:
            raise Damaged(f"the snapshot holds {read} of {size} numbers of {name} that are needed")
        return result if result is not None else np.empty(wanted, self.arrays[name].dtype)

    def _piece(self, part: int, number: int, start: Corner, stop: Corner) -> np.ndarray:
        """A box of a record, from the first copy that is good."""
        index, copies = self._parts[part]
        failed: Damaged | None = None
        for copy in sorted(copies, key=lambda copy: copy.host != self._here):
            try:
                if copy.host == self._here:
                    return self._local.box(copy.file, number, start, stop)
                return self._fetch(copy, number, start, stop, index.records[number])
            except Damaged as error:
                failed = failed or error
        assert failed is not None
        raise failed


def _minus(corner: Corner, origin: Corner) -> Corner:
    return tuple(a - b for a, b in zip(corner, origin, strict=True))

"""Which stretches of which documents make up which row: a map made before anything is read.

A document of L tokens (BOS and EOS included) gives L - 1 pairs of a token and the next one, its
target; EOS is a target and never an input. A row holds at most S pairs. So no target ever crosses
from one document to another, and every pair of a document stands in exactly one row.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PackingMap:
    """Row r is made of spans `first[r]` to `first[r + 1]`, in order.

    Attributes:
      first: int64 [R + 1].
      document, start, length: int64 [spans]: which document, its first pair, how many pairs.
    """

    first: np.ndarray
    document: np.ndarray
    start: np.ndarray
    length: np.ndarray

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.first) - 1

    def spans(self, row: int) -> list[tuple[int, int, int]]:
        """(document, first pair, number of pairs) of each span of a row."""
        of = slice(int(self.first[row]), int(self.first[row + 1]))
        columns = (self.document[of], self.start[of], self.length[of])
        return [(int(d), int(s), int(n)) for d, s, n in zip(*columns, strict=True)]

    def keep(self, wanted: np.ndarray) -> PackingMap:
        """The map of the rows for which `wanted` [R] is true."""
        counts = np.diff(self.first)
        spans = np.repeat(wanted, counts)
        first = np.concatenate([[0], np.cumsum(counts[wanted])]).astype(np.int64)
        return PackingMap(first, self.document[spans], self.start[spans], self.length[spans])


def make_map(
    mode: str, documents: np.ndarray, pairs: np.ndarray, size: int, *, drop_long: bool
) -> PackingMap:
    """The rows of some documents.

    Args:
      mode: "pack": pieces of at most a row, packed best-fit, longest first; "concat": documents end to
        end, cut at every row's end; "none": a piece a row.
      documents: numbers of the documents [N], in their order.
      pairs: pairs of each [N], at least 1.
      size: pairs of a row.
      drop_long: under "none", leave out what does not fit in a document's first row.
    """
    pairs = np.asarray(pairs, np.int64)
    if mode == "concat":
        return _end_to_end(np.asarray(documents, np.int64), pairs, size)
    which, start, length = _pieces(pairs, size)
    if mode == "none":
        if drop_long:
            fits = start == 0
            which, start, length = which[fits], start[fits], length[fits]
        order, first = np.arange(len(which)), np.arange(len(which) + 1)
    else:
        order, first = _best_fit(length, size)
    return PackingMap(
        first.astype(np.int64), np.asarray(documents, np.int64)[which[order]], start[order], length[order]
    )


def _end_to_end(documents: np.ndarray, pairs: np.ndarray, size: int) -> PackingMap:
    ends, total = np.cumsum(pairs), int(pairs.sum())
    rows = np.arange(0, total, size)
    begin = np.union1d(ends - pairs, rows)
    which = np.searchsorted(ends, begin, side="right")
    return PackingMap(
        first=np.append(np.searchsorted(begin, rows), len(begin)),
        document=documents[which],
        start=begin - (ends - pairs)[which],
        length=np.diff(np.append(begin, total)),
    )


def _pieces(pairs: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(index of document, start, length) of pieces of at most `size`, in the documents' order."""
    counts = -(-pairs // size)
    which = np.repeat(np.arange(len(pairs)), counts)
    number = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number * size
    return which, start, np.minimum(size, pairs[which] - start)


def _best_fit(lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing, on how many pieces there are of each length.

    Rows filled alike are handled together, so the time depends on the lengths, hardly on the number of
    pieces. Returns the pieces' order and the first of each row in it; rows are sorted by their first piece.
    """
    by_length = np.argsort(-lengths, kind="stable")
    counts = np.bincount(lengths, minlength=size + 1)
    groups = _OpenRows(size)
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left and (found := groups.tightest(length)):
            room, pattern, rows = found
            each = room // length
            full = min(rows, left // each)
            left -= full * each
            groups.add(room - each * length, (*pattern, *[length] * each), full)
            if full < rows:
                # Now fewer are left than a row takes; they share one.
                groups.add(room - left * length, (*pattern, *[length] * left), 1 if left else 0)
                groups.add(room, pattern, rows - full - (1 if left else 0))
                left = 0
        each = size // length
        groups.add(size - each * length, (length,) * each, left // each)
        groups.add(size - left % each * length, (length,) * (left % each), 1 if left % each else 0)
    return _assign(groups.all(), by_length, counts)


Pattern = tuple[int, ...]


class _OpenRows:
    """How many rows are filled by which pattern of lengths, by the room that they leave."""

    def __init__(self, size: int):
        self._groups: list[list[tuple[Pattern, int]]] = [[] for _ in range(size + 1)]
        self._rooms: list[int] = []  # those that some group leaves, in order

    def add(self, room: int, pattern: Pattern, rows: int) -> None:
        if rows:
            if not self._groups[room]:
                bisect.insort(self._rooms, room)
            self._groups[room].append((pattern, rows))

    def tightest(self, length: int) -> tuple[int, Pattern, int] | None:
        """Takes out the group with the least room for `length`: its room, pattern and rows."""
        place = bisect.bisect_left(self._rooms, length)
        if place == len(self._rooms):
            return None
        room = self._rooms[place]
        pattern, rows = self._groups[room].pop()
        if not self._groups[room]:
            del self._rooms[place]
        return room, pattern, rows

    def all(self) -> list[tuple[Pattern, int]]:
        return [group for room in self._rooms for group in self._groups[room]]


def _assign(
    patterns: list[tuple[Pattern, int]], by_length: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Gives each pattern's places to the next pieces of that length."""
    # Where the pieces of each length begin in `by_length`, which holds the longest first.
    following = len(by_length) - np.cumsum(counts)
    leading, sizes, chunks = [], [], []
    for pattern, rows in patterns:
        columns = []
        for length in pattern:
            columns.append(by_length[following[length] : following[length] + rows])
            following[length] += rows
        table = np.sort(np.stack(columns, axis=1), axis=1)
        leading.append(table[:, 0])
        sizes.append(np.full(rows, len(pattern)))
        chunks.append(table.reshape(-1))
    if not patterns:
        return np.zeros(0, np.int64), np.zeros(1, np.int64)
    width, flat = np.concatenate(sizes), np.concatenate(chunks)
    rank = np.argsort(np.concatenate(leading), kind="stable")
    begins = np.cumsum(width) - width
    first = np.concatenate([[0], np.cumsum(width[rank])])
    offsets = np.arange(len(flat)) - np.repeat(first[:-1], width[rank])
    return flat[np.repeat(begins[rank], width[rank]) + offsets], first

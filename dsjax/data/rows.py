"""Rows: what one sequence of a batch is made of, read at random by its number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dsjax.data.packing import PackingMap, make_map
from dsjax.data.store import Store
from dsjax.errors import InputError

Row = dict[str, np.ndarray]
SYNTHETIC_ROWS = 1 << 16
"""An epoch of synthetic data."""
SYNTHETIC_HELD_OUT = 64


class Rows(Protocol):
    """A numbered set of rows; reading is safe from several threads."""

    name: str

    def __len__(self) -> int: ...

    def row(self, number: int) -> Row:
        """Arrays [S]: int32 tokens, targets, segment_ids (0: padding), positions; float32 weights."""
        ...

    def ids(self, number: int) -> list[str]:
        """Ids of the source examples in a row."""
        ...


def empty_rows(shape: tuple[int, ...]) -> Row:
    """Padding: no segment, no weight."""
    names = ("tokens", "targets", "segment_ids", "positions")
    return {**{name: np.zeros(shape, np.int32) for name in names}, "weights": np.zeros(shape, np.float32)}


class DocumentRows:
    """The rows of some documents of a store.

    Attributes:
      left_out: rows without a single target, which are not among the rows.
      dropped: pairs of token and target that no row holds, because packing is none.
    """

    def __init__(self, name: str, store: Store, packing: PackingMap, size: int, prefix: str, dropped: int):
        self.name, self.store, self.size = name, store, size
        self._prefix, self.dropped = prefix, dropped
        wanted = _with_targets(store, packing)
        self.packing = packing.keep(wanted)
        self.left_out = int(np.count_nonzero(~wanted))

    def __len__(self) -> int:
        return self.packing.rows

    @property
    def pairs(self) -> int:
        """Pairs of token and target in all rows."""
        return int(self.packing.length.sum())

    def row(self, number: int) -> Row:
        """See `Rows.row`. A document that goes on from another row is a segment like any other."""
        row = empty_rows((self.size,))
        at = 0
        for segment, (document, start, count) in enumerate(self.packing.spans(number), 1):
            tokens, counts = self.store.read(document, start, count + 1)
            here = slice(at, at + count)
            row["tokens"][here] = tokens[:-1]
            row["targets"][here] = tokens[1:]
            row["weights"][here] = counts[1:]
            row["segment_ids"][here] = segment
            row["positions"][here] = np.arange(count)
            at += count
        return row

    def ids(self, number: int) -> list[str]:
        """See `Rows.ids`; one that goes on from another row ends in +N, the tokens before it."""
        return [
            self._prefix + self.store.name_of(document) + (f"+{start}" if start else "")
            for document, start, _ in self.packing.spans(number)
        ]


def _with_targets(store: Store, packing: PackingMap) -> np.ndarray:
    """Which rows have a target at all: bool [R]. Every whole document has one."""
    wanted = np.ones(packing.rows, bool)
    if not store.masked:
        return wanted
    whole = packing.length == store.documents["length"][packing.document].astype(np.int64) - 1
    of_row = np.repeat(np.arange(packing.rows), np.diff(packing.first))
    wanted[:] = False
    wanted[of_row[whole]] = True
    for row in np.flatnonzero(~wanted):
        wanted[row] = any(
            store.read(d, start + 1, count)[1].any() for d, start, count in packing.spans(int(row))
        )
    return wanted


def document_rows(
    name: str, store: Store, documents: np.ndarray, mode: str, size: int, *, training: bool, prefix: str = ""
) -> DocumentRows:
    """Rows of the documents whose numbers are given; training may leave out what packing says.

    Args:
      prefix: put before each id.
    """
    pairs = store.documents["length"][documents].astype(np.int64) - 1
    packing = make_map(mode, documents, pairs, size, drop_long=training)
    return DocumentRows(name, store, packing, size, prefix, int(pairs.sum() - packing.length.sum()))


class SyntheticRows:
    """Rows from a seed: each token follows from the one before, mostly.

    Nine times of ten the next token is a fixed permutation of the last, otherwise any: there is
    something to learn, and a floor to the loss.
    """

    def __init__(self, seed: int, vocab_size: int, size: int, *, training: bool):
        self.name = "synthetic"
        self._seed, self._vocab, self._size = seed, vocab_size, size
        self._numbers = range(SYNTHETIC_HELD_OUT, SYNTHETIC_HELD_OUT + SYNTHETIC_ROWS)
        if not training:
            self._numbers = range(SYNTHETIC_HELD_OUT)
        self._next = np.random.default_rng([seed, vocab_size]).permutation(vocab_size)

    def __len__(self) -> int:
        return len(self._numbers)

    def row(self, number: int) -> Row:
        """See `Rows.row`."""
        draws = np.random.default_rng([self._seed, self._vocab, self._numbers[number]])
        tokens = draws.integers(0, self._vocab, self._size + 1)
        follows = draws.random(self._size) < 0.9
        # How far back the last token stands that follows from none: those at 1 first, then at 2, ...
        places = np.arange(self._size + 1)
        distance = places - np.maximum.accumulate(np.where(np.r_[False, follows], 0, places))
        for far in range(1, int(distance.max()) + 1):
            at = np.flatnonzero(distance == far)
            tokens[at] = self._next[tokens[at - 1]]
        row = empty_rows((self._size,))
        row["tokens"][:], row["targets"][:] = tokens[:-1], tokens[1:]
        row["weights"][:], row["segment_ids"][:] = 1, 1
        row["positions"][:] = np.arange(self._size)
        return row

    def ids(self, number: int) -> list[str]:
        """See `Rows.ids`."""
        return [f"synthetic@{self._numbers[number]}"]


def require_rows(rows: DocumentRows, setting: str) -> DocumentRows:
    """The rows themselves.

    Raises:
      InputError: there are none; `setting` names what to look at.
    """
    if not len(rows):
        why = f" ({rows.left_out} rows have no target)" if rows.left_out else ""
        raise InputError(f"{setting}: {rows.name} gives no row to train on{why}")
    return rows


def stacked(rows: Sequence[Row]) -> Row:
    """Rows as one batch [B, S]."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

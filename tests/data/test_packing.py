"""The packing map: every pair of every document in exactly one row, and no row too long."""

from __future__ import annotations

import time
from collections import defaultdict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dsjax.data.packing import PackingMap, make_map


def pieces_of(packing: PackingMap) -> dict[int, list[tuple[int, int]]]:
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row in range(packing.rows):
        for document, start, count in packing.spans(row):
            found[document].append((start, count))
    return found


@settings(max_examples=150, deadline=None)
@given(
    pairs=st.lists(st.integers(1, 90), max_size=40),
    size=st.integers(1, 40),
    mode=st.sampled_from(["pack", "concat", "none"]),
    drop=st.booleans(),
)
def test_each_pair_stands_once(pairs: list[int], size: int, mode: str, drop: bool) -> None:
    documents = np.random.default_rng(len(pairs)).permutation(1000)[: len(pairs)]
    packing = make_map(mode, documents, np.array(pairs, int), size, drop_long=drop)
    lengths = [sum(count for _, _, count in packing.spans(row)) for row in range(packing.rows)]
    assert all(0 < length <= size for length in lengths)
    found = pieces_of(packing)
    assert set(found) == set(documents.tolist())
    for document, total in zip(documents.tolist(), pairs, strict=True):
        at = 0
        for start, count in sorted(found[document]):
            assert start == at and count > 0
            at += count
        assert at == (min(total, size) if mode == "none" and drop else total)


@settings(max_examples=60, deadline=None)
@given(pairs=st.lists(st.integers(1, 60), min_size=1, max_size=40), size=st.integers(1, 40))
def test_concat_fills_every_row_but_the_last(pairs: list[int], size: int) -> None:
    packing = make_map("concat", np.arange(len(pairs)), np.array(pairs), size, drop_long=False)
    assert packing.rows == -(-sum(pairs) // size)
    order = [span for row in range(packing.rows) for span in packing.spans(row)]
    assert order == sorted(order)


@settings(max_examples=60, deadline=None)
@given(pairs=st.lists(st.integers(1, 32), min_size=1, max_size=60))
def test_packing_keeps_documents_whole_and_rows_near_the_fewest(pairs: list[int]) -> None:
    size = 32
    packing = make_map("pack", np.arange(len(pairs)), np.array(pairs), size, drop_long=False)
    assert all(len(pieces) == 1 for pieces in pieces_of(packing).values())
    fewest = -(-sum(pairs) // size)
    # The bound of best-fit decreasing: 11/9 of the optimum and a little.
    assert packing.rows <= 11 / 9 * max(fewest, sum(p > size // 2 for p in pairs)) + 4


def test_rows_follow_their_first_document() -> None:
    pairs = np.random.default_rng(0).integers(1, 50, 200)
    packing = make_map("pack", np.arange(200), pairs, 32, drop_long=False)
    firsts = [packing.spans(row)[0][0] for row in range(packing.rows)]
    assert firsts == sorted(firsts)


def test_a_million_documents_take_seconds() -> None:
    pairs = np.minimum(np.random.default_rng(0).lognormal(6, 1.2, 1_000_000).astype(int) + 1, 10**5)
    started = time.monotonic()
    packing = make_map("pack", np.arange(len(pairs)), pairs, 8192, drop_long=False)
    assert time.monotonic() - started < 20
    assert pairs.sum() / (packing.rows * 8192) > 0.999


def test_keep_drops_rows_with_their_spans() -> None:
    packing = make_map("none", np.arange(3), np.array([5, 9, 2]), 4, drop_long=False)
    kept = packing.keep(np.array([True, False, True, False, True, True]))
    assert [kept.spans(row) for row in range(kept.rows)] == [
        [(0, 0, 4)],
        [(1, 0, 4)],
        [(1, 8, 1)],
        [(2, 0, 2)],
    ]


def test_nothing_gives_no_rows() -> None:
    for mode in ("pack", "concat", "none"):
        empty = np.zeros(0, int)
        assert make_map(mode, empty, empty, 8, drop_long=False).rows == 0

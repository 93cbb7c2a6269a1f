"""The order of examples: a function of seed and step, for any number of processes and threads."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsjax.data import as_step_loader, open_train


def take(config: Any, rows: Any, start: int, count: int) -> list[dict[str, np.ndarray]]:
    batches = open_train(config, np.asarray(rows, np.int32)).iterate(start)
    found = list(islice(batches, count))
    batches.close()
    return found


def same(left: list[dict[str, np.ndarray]], right: list[dict[str, np.ndarray]]) -> bool:
    pairs = zip(left, right, strict=True)
    return all((a[name] == b[name]).all() for a, b in pairs for name in a)


@pytest.fixture
def text(settings: Any, corpus: Path) -> Any:
    def make(**more: Any) -> Any:
        return settings({"kind": "text", "paths": str(corpus), **more})

    return make


@pytest.mark.parametrize("processes", [2, 4])
def test_the_rows_of_all_processes_are_the_global_batch(text: Any, processes: int) -> None:
    whole = take(text(), range(4), 0, 6)
    # Interleaved, as gradient accumulation lays rows out, or in blocks.
    for split in (
        [np.arange(4)[p::processes] for p in range(processes)],
        np.split(np.arange(4), processes),
    ):
        parts = [take(text(), rows, 0, 6) for rows in split]
        for step in range(6):
            for rows, part in zip(split, parts, strict=True):
                for name in whole[step]:
                    assert (part[step][name] == whole[step][name][rows]).all()


@pytest.mark.parametrize("threads", [0, 1, 5])
def test_a_resumed_run_sees_what_the_undisturbed_one_saw(text: Any, threads: int) -> None:
    undisturbed = take(text(), range(4), 0, 40)
    assert same(take(text(workers=threads), range(4), 17, 23), undisturbed[17:])


def test_ids_tell_what_the_batch_holds(text: Any, corpus: Path) -> None:
    config = text()
    data = open_train(config, np.arange(4))
    for step in (0, 9):
        batches = data.iterate(step)
        batch = next(batches)
        batches.close()
        said = data.example_ids(step)
        assert len(said) == sum(row.max() for row in batch["segment_ids"])
        for name in said:
            start = int(name.partition("+")[2] or 0)
            content = [256, *(corpus / name.partition("+")[0]).read_bytes(), 257][start : start + 5]
            assert any(content[:4] == row[at : at + 4].tolist()
                       for row in batch["tokens"] for at in range(29))  # fmt: skip


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_example_once_an_epoch(text: Any, shuffle: bool) -> None:
    config = text(shuffle=shuffle, holdout=0.0)
    data = open_train(config, np.arange(4))
    rows = data.rows_per_epoch
    assert rows % 4, "the epoch should end inside a batch"
    picked = [pick for step in range(3 * rows // 4 + 1) for pick in data._picked(step)]
    epochs = [picked[start : start + rows] for start in (0, rows, 2 * rows)]
    assert all(sorted(one) == [(0, row) for row in range(rows)] for one in epochs)
    assert (epochs[0] != epochs[1] and epochs[1] != epochs[2]) == shuffle
    ids = Counter(name for pick in epochs[0] for name in data.sources[0].ids(pick[1]))
    assert set(ids.values()) == {1}


def test_the_seed_changes_the_order(settings: Any, corpus: Path) -> None:
    orders = []
    for seed in (3, 4):
        config = settings({"kind": "text", "paths": str(corpus)}, {"run": {"seed": seed}})
        data = open_train(config, np.arange(4))
        orders.append([pick for step in range(data.rows_per_epoch // 2) for pick in data._picked(step)])
    assert orders[0] != orders[1]
    # Nor is the second epoch of one seed the first of the next.
    assert orders[0][len(orders[0]) // 2 :] != orders[1][: len(orders[1]) // 2]


def test_fewer_rows_than_a_batch_come_round_and_it_is_said(settings: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    paths = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    config = settings(
        {"kind": "text", "paths": paths, "packing": "none", "holdout": 0.0}, global_batch_size=5
    )
    data = open_train(config, np.arange(5))
    assert any("fewer than train.global_batch_size 5" in line for line in as_step_loader(data).notes)
    counts = Counter(name for step in range(2) for name in data.example_ids(step))
    assert counts == {"a.txt": 5, "b.txt": 5}


def test_a_mixture_keeps_its_weights(settings: Any, write_lines: Any) -> None:
    for name, count in (("a", 50), ("b", 7), ("c", 300)):
        write_lines(f"{name}.jsonl", [{"text": f"{name} {n}"} for n in range(count)])
    root = Path(write_lines("d.jsonl", [])).parent
    mixture = [
        {"paths": str(root / "a.jsonl"), "weight": 0.7, "name": "a"},
        {"paths": str(root / "b.jsonl"), "weight": 0.29, "name": "b"},
        {"paths": str(root / "c.jsonl"), "weight": 0.01, "name": "c"},
    ]
    config = settings({"kind": "jsonl", "mixture": mixture, "packing": "none"}, global_batch_size=20)
    data = open_train(config, np.arange(20))
    counts: Counter[str] = Counter()
    for step in range(1000):
        counts.update(name.split("/")[0] for name in data.example_ids(step))
        if step == 49:
            assert abs(counts["a"] / 1000 - 0.7) < 0.01 and abs(counts["b"] / 1000 - 0.29) < 0.01
    for name, share in (("a", 0.7), ("b", 0.29), ("c", 0.01)):
        assert abs(counts[name] / 20000 / share - 1) < 0.01
    # Within one source too, each example comes equally often.
    each = Counter(i for step in range(1000) for i in data.example_ids(step) if i.startswith("b/"))
    assert max(each.values()) - min(each.values()) <= 1
    assert data.example_ids(77) == open_train(config, np.arange(20)).example_ids(77)


def test_the_examples_log_holds_each_step_once(text: Any, tmp_path: Path) -> None:
    config = text(log_examples=True)

    def lines(process: int) -> list[Any]:
        file = tmp_path / "run" / f"examples-{process}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()]

    loader = as_step_loader(open_train(config, np.arange(4)))
    assert loader.log_examples is not None
    for step in range(1, 7):
        loader.log_examples(step, step - 1)
    with open(tmp_path / "run" / "examples-0.jsonl", "a") as stream:
        stream.write('{"step": 7, "i')  # killed while it wrote
    # Of a process that the resumed run has no more.
    (tmp_path / "run" / "examples-3.jsonl").write_text('{"step": 2, "ids": []}\n{"step": 7, "ids": []}\n')
    data = open_train(config, np.arange(4))
    loader = as_step_loader(data)
    assert loader.log_examples is not None
    loader.log_examples(5, 4)  # resumed at step 4
    loader.log_examples(6, 5)
    loader.log_examples(6, 9)  # rolled back, past a window of data
    assert [line["step"] for line in lines(0)] == [1, 2, 3, 4, 5, 6]
    assert lines(0)[4]["ids"] == data.example_ids(4) and lines(0)[5]["ids"] == data.example_ids(9)
    assert [line["step"] for line in lines(3)] == [2]


def test_files_may_move(settings: Any, corpus: Path, tmp_path: Path) -> None:
    before = take(settings({"kind": "text", "paths": str(corpus)}), range(4), 3, 5)
    corpus.rename(tmp_path / "elsewhere")
    after = take(settings({"kind": "text", "paths": str(tmp_path / "elsewhere")}), range(4), 3, 5)
    assert same(before, after)
    assert len(list((tmp_path / "cache").glob("text-*/dataset.json"))) == 1

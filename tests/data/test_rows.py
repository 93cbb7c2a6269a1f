"""What a row holds: segments, positions, targets, weights, BOS and EOS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsjax.data import open_train

BOS, EOS = 256, 257


def epoch(config: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """All rows of the training data, in their order, as one batch."""
    data = open_train(config, np.arange(config.train.global_batch_size))
    rows = [data.sources[0].row(number) for number in range(data.rows_per_epoch)]
    return data, {name: np.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("packing", ["pack", "concat"])
def test_every_token_is_a_target_once(settings: Any, corpus: Path, packing: str) -> None:
    _, batch = epoch(settings({"kind": "text", "paths": str(corpus), "packing": packing, "holdout": 0.0}))
    texts = [path.read_bytes() for path in sorted(corpus.iterdir())]
    weights = batch["weights"] > 0
    assert weights.sum() == sum(len(text) + 1 for text in texts)
    assert (weights == (batch["segment_ids"] > 0)).all()
    targets = batch["targets"][weights]
    assert np.count_nonzero(targets == EOS) == len(texts) and not (targets == BOS).any()
    inputs = batch["tokens"][weights]
    assert np.count_nonzero(inputs == BOS) == len(texts) and not (inputs == EOS).any()
    assert sorted(targets[targets < 256].astype(np.uint8).tobytes()) == sorted(b"".join(texts))


def test_segments_are_whole_documents_with_positions_of_their_own(settings: Any, corpus: Path) -> None:
    config = settings({"kind": "text", "paths": str(corpus), "holdout": 0.0}, sequence_length=512)
    data, batch = epoch(config)
    seen = []
    for number in range(data.rows_per_epoch):
        ids = data.sources[0].ids(number)
        segments = batch["segment_ids"][number]
        used = segments[segments > 0]
        assert (np.diff(used) >= 0).all() and (segments[len(used) :] == 0).all()
        assert len(ids) == used.max()
        for segment, name in enumerate(ids, 1):
            here = np.flatnonzero(segments == segment)
            text = (corpus / name).read_bytes()
            assert batch["tokens"][number][here].tolist() == [BOS, *text]
            assert batch["targets"][number][here].tolist() == [*text, EOS]
            assert batch["positions"][number][here].tolist() == list(range(len(here)))
            seen.append(name)
    assert sorted(seen) == sorted(path.name for path in corpus.iterdir())
    assert max(len(data.sources[0].ids(n)) for n in range(data.rows_per_epoch)) > 1


def test_a_long_document_goes_on_in_further_rows(settings: Any, tmp_path: Path) -> None:
    text = "".join(chr(97 + n % 26) for n in range(100))
    (tmp_path / "long.txt").write_text(text)
    config = settings({"kind": "text", "paths": str(tmp_path / "long.txt"), "holdout": 0.0})
    data, batch = epoch(config)
    assert [data.sources[0].ids(n) for n in range(4)] == [
        ["long.txt"],
        ["long.txt+32"],
        ["long.txt+64"],
        ["long.txt+96"],
    ]
    whole = [BOS, *text.encode(), EOS]
    for number in range(3):
        assert batch["tokens"][number].tolist() == whole[32 * number : 32 * number + 32]
        assert batch["targets"][number].tolist() == whole[32 * number + 1 : 32 * number + 33]
        assert batch["positions"][number].tolist() == list(range(32))


def test_none_is_a_document_a_row_and_says_what_it_leaves_out(settings: Any, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.txt").write_text("a" * 10)
    (tmp_path / "d" / "b.txt").write_text("b" * 100)
    config = settings({"kind": "text", "paths": str(tmp_path / "d"), "packing": "none", "holdout": 0.0})
    data, batch = epoch(config)
    assert batch["tokens"].shape == (2, 32)
    assert batch["weights"].sum(axis=1).tolist() == [11, 32]
    assert batch["segment_ids"].max() == 1
    assert any("69 tokens past a row left out" in line for line in data.describe())


def test_types_and_shapes(settings: Any, corpus: Path) -> None:
    config = settings({"kind": "text", "paths": str(corpus)})
    batches = open_train(config, np.array([1, 3], np.int32)).iterate(0)
    batch = next(batches)
    batches.close()
    assert {name: (value.shape, value.dtype.name) for name, value in batch.items()} == {
        "tokens": ((2, 32), "int32"),
        "targets": ((2, 32), "int32"),
        "segment_ids": ((2, 32), "int32"),
        "positions": ((2, 32), "int32"),
        "weights": ((2, 32), "float32"),
    }


def test_a_document_longer_than_a_stored_record(settings: Any, tmp_path: Path) -> None:
    draws = np.random.default_rng(0).integers(97, 123, 9000).astype(np.uint8).tobytes()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.txt").write_bytes(b"x" * 700)
    (tmp_path / "d" / "b.txt").write_bytes(draws)
    config = settings({"kind": "text", "paths": str(tmp_path / "d"), "packing": "none", "holdout": 0.0},
                      sequence_length=8500)  # fmt: skip
    _, batch = epoch(config)
    assert batch["targets"][1].tolist() == list(draws[:8500])


def test_synthetic_tokens_need_no_files_and_can_be_learned(settings: Any) -> None:
    data = open_train(settings({}), np.arange(4))
    batches = data.iterate(5)
    batch, again = next(batches), open_train(settings({}), np.arange(4)).iterate(5)
    assert (next(again)["tokens"] == batch["tokens"]).all()
    assert batch["tokens"].max() < data.vocab_size and batch["weights"].min() == 1
    rows = [data.sources[0].row(n) for n in range(400)]
    follows: dict[int, list[int]] = {}
    for row in rows:
        for token, target in zip(row["tokens"].tolist(), row["targets"].tolist(), strict=True):
            follows.setdefault(token, []).append(target)
    common = [max(found.count(t) for t in set(found)) / len(found) for found in follows.values()]
    assert np.mean(common) > 0.8

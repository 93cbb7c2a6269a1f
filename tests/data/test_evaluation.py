"""Evaluation sets: all of a set, each token once, whatever the batch and the number of processes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsjax.data import open_eval, open_train
from dsjax.errors import InputError

ROWS = np.arange(4)


@pytest.mark.parametrize("packing", ["pack", "concat", "none"])
@pytest.mark.parametrize("batch", [3, 4, 64])
def test_every_token_counts_once(settings: Any, corpus: Path, packing: str, batch: int) -> None:
    data = {"kind": "text", "paths": str(corpus), "holdout": 0.3, "packing": packing}
    config = settings(data, global_batch_size=batch)
    held = open_eval(config, np.arange(batch))["heldout"]
    texts = list(held.texts())
    assert 5 < len(texts) < 40
    assert held.num_bytes == sum(len(text.encode()) for text in texts)
    assert held.num_tokens == held.num_bytes + len(texts)  # bytes, and an EOS each
    targets: Counter[int] = Counter()
    batches = list(held.batches())
    for one in batches:
        assert one["tokens"].shape == (batch, 32)
        targets.update(one["targets"][one["weights"] > 0].tolist())
        assert (one["weights"] == (one["segment_ids"] > 0)).all()
    assert len(batches) == held.num_batches == -(-held.num_rows // batch)
    assert targets == Counter([*"".join(texts).encode(), *[257] * len(texts)])


def test_every_process_yields_as_many_batches(settings: Any, corpus: Path) -> None:
    config = settings({"kind": "text", "paths": str(corpus), "holdout": 0.3}, sequence_length=30)
    whole = list(open_eval(config, ROWS)["heldout"].batches())
    parts = [list(open_eval(config, ROWS[p::4])["heldout"].batches()) for p in range(4)]
    assert {len(part) for part in parts} == {len(whole)}
    for number, batch in enumerate(whole):
        for p, part in enumerate(parts):
            assert all((part[number][name] == batch[name][p::4]).all() for name in batch)
    assert whole[-1]["weights"][-1].sum() == 0, "the last batch should be a partial one"


def test_held_out_and_training_never_share_a_document(settings: Any, corpus: Path, tmp_path: Path) -> None:
    def split(folder: Path) -> tuple[set[str], set[str]]:
        config = settings({"kind": "text", "paths": str(folder), "holdout": 0.3})
        data = open_train(config, ROWS)
        trained = {i.split("+")[0] for n in range(data.rows_per_epoch) for i in data.sources[0].ids(n)}
        held = set(open_eval(config, ROWS)["heldout"].texts())
        return {(folder / name).read_text() for name in trained}, held

    trained, held = split(corpus)
    assert trained | held == {path.read_text() for path in corpus.iterdir()} and not trained & held
    # More documents, a copy of a held-out one among them, move none of the old ones.
    (corpus / "copy.txt").write_text(next(iter(held)))
    for number in range(20):
        (corpus / f"aa{number}.txt").write_text(f"new {number}")
    more_trained, more_held = split(corpus)
    assert trained <= more_trained and held <= more_held and not more_trained & more_held


def test_small_data_still_holds_one_out(settings: Any, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "d" / name).write_text(f"document {name}")
    config = settings({"kind": "text", "paths": str(tmp_path / "d"), "holdout": 0.01})
    held = list(open_eval(config, ROWS)["heldout"].texts())
    data = open_train(config, ROWS)
    trained = {name for n in range(data.rows_per_epoch) for name in data.sources[0].ids(n)}
    assert len(held) == 1 and len(trained) == 2 and held[0][-1] not in trained


def test_a_single_document_cannot_be_split(settings: Any, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("alone")
    data = {"kind": "text", "paths": str(tmp_path / "one.txt")}
    with pytest.raises(InputError, match=r"data.holdout.*single document.*one.txt"):
        open_eval(settings(data), ROWS)
    assert open_train(settings(data), ROWS).rows_per_epoch == 1
    named = open_eval(settings(data, {"eval": {"sets": {"mine": data["paths"]}}}), ROWS)
    assert list(named) == ["mine"] and named["mine"].num_bytes == 5


def test_named_sets_of_other_kinds(settings: Any, corpus: Path, write_lines: Any) -> None:
    other = write_lines("other.jsonl", [{"body": "ab"}, {"body": "cde"}])
    sets = {"whole": str(corpus), "other": {"paths": other, "kind": "jsonl", "field": "body"}}
    config = settings({"kind": "text", "paths": str(corpus), "holdout": 0.1}, {"eval": {"sets": sets}})
    found = open_eval(config, ROWS)
    assert list(found) == ["heldout", "whole", "other"]
    assert found["whole"].num_documents == 60
    assert list(found["other"].texts()) == ["ab", "cde"] and found["other"].num_tokens == 7


def test_synthetic_evaluation_is_not_what_is_trained_on(settings: Any) -> None:
    config = settings({}, sequence_length=256)
    held = open_eval(config, ROWS)["heldout"]
    batches = list(held.batches())
    assert held.num_tokens == sum(batch["weights"].sum() for batch in batches) and held.num_bytes == 0
    seen = {row.tobytes() for batch in batches for row in batch["tokens"]}
    data = open_train(config, ROWS)
    assert not seen & {data.sources[0].row(n)["tokens"].tobytes() for n in range(500)}


def test_a_tokenizer_without_bos_begins_with_eos(settings: Any, corpus: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: n for n, t in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    (tmp_path / "tok").mkdir()
    tokenizer.save(str(tmp_path / "tok" / "tokenizer.json"))
    config = settings(
        {"kind": "text", "paths": str(corpus), "tokenizer": str(tmp_path / "tok"), "holdout": 0.2}
    )
    held = open_eval(config, ROWS)["heldout"]
    assert held.num_tokens == held.num_bytes + held.num_documents
    first = next(iter(held.batches()))
    assert first["tokens"][0, 0] == 256

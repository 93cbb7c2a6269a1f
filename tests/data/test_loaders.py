"""What `fit` may be given: each kind resumes exactly, or says that it cannot."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest

from dsjax.data import as_step_loader, open_train
from dsjax.errors import InputError


def batches_of(loader: Any, start: int, count: int) -> list[Any]:
    batches = loader.iterate(start)
    found = [np.asarray(batch).tolist() for batch in islice(batches, count)]
    batches.close()
    return found


def map_dataset() -> Any:
    return grain.MapDataset.range(23).seed(5).shuffle().repeat().batch(4)


def data_loader() -> Any:
    sampler = grain.samplers.IndexSampler(
        num_records=40, shuffle=True, seed=1, num_epochs=None, shard_options=grain.sharding.NoSharding()
    )
    return grain.DataLoader(
        data_source=np.arange(40), sampler=sampler, operations=[grain.transforms.Batch(4)], worker_count=0
    )


def test_a_map_dataset_is_told_by_its_index() -> None:
    whole = batches_of(as_step_loader(map_dataset()), 0, 20)
    assert whole == [map_dataset()[n].tolist() for n in range(20)]
    loader = as_step_loader(map_dataset())
    loader.restore(None, 13)
    assert batches_of(loader, 13, 7) == whole[13:]
    assert loader.notes == [] and loader.state(13) is None


def test_a_map_dataset_that_ends() -> None:
    loader = as_step_loader(grain.MapDataset.range(10).batch(4))
    assert batches_of(loader, 1, 5) == [[4, 5, 6, 7], [8, 9]]
    assert batches_of(loader, 3, 5) == []


def test_filtered_batches_are_refused() -> None:
    loader = as_step_loader(grain.MapDataset.range(40).batch(4).filter(lambda batch: batch[0] != 8))
    with pytest.raises(InputError, match="batch 2 was filtered out"):
        batches_of(loader, 0, 9)


@pytest.mark.parametrize(
    "make",
    [
        lambda: map_dataset().to_iter_dataset(),
        lambda: iter(map_dataset().to_iter_dataset()),
        lambda: (
            grain.MapDataset.range(500).seed(2).shuffle().to_iter_dataset().filter(lambda n: n % 3).batch(4)
        ),
        data_loader,
    ],
    ids=["iter", "iterator", "filtered", "loader"],
)
def test_pipelines_read_in_order_resume_from_their_state(make: Any) -> None:
    whole = batches_of(as_step_loader(make()), 0, 12)
    first = as_step_loader(make())
    first.restore(None, 0)
    batches = first.iterate(0)
    for _ in range(5):
        next(batches)
    saved = json.loads(json.dumps(first.state(5)))
    batches.close()
    second = as_step_loader(make())
    second.restore(saved, 5)
    assert second.state(5) == saved
    assert batches_of(second, 5, 7) == whole[5:]
    third = as_step_loader(make())
    with pytest.raises(InputError, match="holds no state"):
        third.restore(None, 5)
    with pytest.raises(InputError, match="saved with 2 processes"):
        third.restore({**saved, "processes": 2}, 5)


@pytest.mark.parametrize(
    "wrap", [iter, list, lambda made: lambda: made], ids=["iterator", "list", "function"]
)
def test_a_bare_iterator_says_that_it_cannot_resume(wrap: Any) -> None:
    loader = as_step_loader(wrap([1, 2, 3]))
    assert list(loader.iterate(0)) == [1, 2, 3]
    assert "cannot resume" in loader.notes[0]
    loader.restore(None, 2)
    assert "goes on at batch 2" in loader.notes[0]


def test_what_is_no_loader_is_refused() -> None:
    with pytest.raises(InputError, match="got int"):
        as_step_loader(5)


def test_changed_data_is_noticed_on_resume(settings: Any, corpus: Path) -> None:
    config = settings({"kind": "text", "paths": str(corpus)})
    first = as_step_loader(open_train(config, np.arange(4)))
    saved = json.loads(json.dumps(first.state(7)))
    same = as_step_loader(open_train(config, np.arange(2)))
    same.restore(saved, 7)
    assert not any("not what the checkpoint" in note for note in same.notes)
    (corpus / "more.txt").write_text("more")
    other = as_step_loader(open_train(config, np.arange(4)))
    other.restore(saved, 7)
    assert any("not what the checkpoint was trained on" in note for note in other.notes)


def test_another_tokenizer_is_refused_on_resume(settings: Any, corpus: Path) -> None:
    data = {"kind": "text", "paths": str(corpus), "tokenizer": "bpe", "bpe_vocab_size": 300}
    first = open_train(settings(data), np.arange(4))
    saved = json.loads(json.dumps(as_step_loader(first).state(7)))
    (corpus / "doc00.txt").write_text("other text, so that other pairs are merged " * 50)
    loader = as_step_loader(open_train(settings(data), np.arange(4)))
    with pytest.raises(InputError, match=r"data.tokenizer.*not the one that the checkpoint was trained with"):
        loader.restore(saved, 7)
    loader.restore(None, 0)
    # The one it was trained with is still there, by the name that the message gives.
    named = open_train(settings({**data, "tokenizer": saved["tokenizer_name"]}), np.arange(4))
    as_step_loader(named).restore(saved, 7)

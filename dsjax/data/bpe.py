"""A byte-pair tokenizer trained on the spot, on the training documents alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsjax.config.schema import DataConfig
from dsjax.data import cache
from dsjax.data.holdout import held_out
from dsjax.data.readers import Document, content_hash, plan_parts, read_documents
from dsjax.data.sources import InputFile, Source, list_files, training_sources
from dsjax.data.tokenizer import BOS, EOS, TOKENIZER_FILE
from dsjax.errors import ConfigError, InputError
from dsjax.files import write_atomically

SAMPLE_BYTES = 32 << 20
"""More text than this does not change a vocabulary much: larger data sets are sampled evenly."""
_PART_BYTES = 1 << 20


def trained(data: DataConfig) -> Path:
    """The tokenizer.json trained on `data`'s training documents, from the cache or made now.

    Raises:
      ConfigError: the sources hold no plain text to train on.
      InputError: no training documents, a file at fault, or a cache that cannot be written.
    """
    sources = training_sources(data)
    for source in sources:
        if source.kind == "chat":
            raise ConfigError("data.tokenizer: bpe has no chat template; chat takes a tokenizer's directory")
        if source.built is not None:
            raise ConfigError(
                f"data.tokenizer: bpe finds no text in {source.built}, which is tokenised already; "
                f"set data.tokenizer to {source.built}/tokenizer"
            )
    listed = [(source, list_files(source)) for source in sources]
    told = [[s.name, s.kind, s.field, s.weight, cache.files_key(files)] for s, files in listed]
    name = (
        f"bpe-{data.bpe_vocab_size}-{cache.key('bpe', told, data.bpe_vocab_size, data.holdout, SAMPLE_BYTES)}"
    )
    directory = cache.cache_root(data) / name
    file = directory / TOKENIZER_FILE
    if not file.is_file():
        with cache.building(directory, "tokenizer") as wanted:
            if wanted:
                _train(listed, data, directory)
    return file


def _train(listed: list[tuple[Source, list[InputFile]]], data: DataConfig, directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    documents = [document for source, files in listed for document in _sample(source, files, listed)]
    held = held_out([content_hash(document) for document in documents], data.holdout)
    texts = [document.text[:SAMPLE_BYTES] for document, out in zip(documents, held, strict=True) if not out]
    if not texts:
        raise InputError("data.tokenizer: bpe finds no training document that is not empty")
    size = cache.sized(sum(map(len, texts)))
    cache.say(f"training a byte-pair tokenizer of {data.bpe_vocab_size} tokens on {size} of text")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=data.bpe_vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    draft = cache.draft_of(directory)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    write_atomically(draft / TOKENIZER_FILE, tokenizer.to_str().encode())
    settings: dict[str, Any] = {"bos_token": BOS, "eos_token": EOS}
    write_atomically(draft / "tokenizer_config.json", json.dumps(settings).encode())
    draft.rename(directory)


def _sample(
    source: Source, files: list[InputFile], listed: list[tuple[Source, list[InputFile]]]
) -> Iterator[Document]:
    """Documents from parts spread evenly over the source, up to its share of the sample."""
    budget = int(SAMPLE_BYTES * source.weight / sum(other.weight for other, _ in listed))
    parts = plan_parts(source.kind, files, _PART_BYTES)
    total = sum(part.weight for part in parts)
    taken = seen = 0
    for part in parts:
        # Taken while behind an even pace: all of it where the source is smaller than its share.
        seen += part.weight
        if taken * total > budget * (seen - part.weight) and total > budget:
            continue
        taken += part.weight
        for document in read_documents(source.kind, files[part.file], part, source.field):
            if not document.empty:
                yield document

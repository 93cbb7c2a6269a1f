"""Training batches: which rows a step holds is a function of the seed and the step, nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dsjax.config import Config
from dsjax.data.batches import Batches
from dsjax.data.cache import counted
from dsjax.data.corpus import Corpus, open_corpus, require_same_everywhere
from dsjax.data.examples_log import ExamplesLog
from dsjax.data.order import order_of
from dsjax.data.rows import (
    DocumentRows,
    Rows,
    SyntheticRows,
    document_rows,
    empty_rows,
    require_rows,
    stacked,
)
from dsjax.data.tokenizer import Tokenizer, load_tokenizer
from dsjax.errors import InputError


class TrainData:
    """Batches of the rows that one process supplies, for any step, in any order.

    Attributes:
      tokenizer: the tokenizer the rows were made with.
      rows_per_epoch: rows after which (with one source) every row has been seen once.
      fingerprint: differs where the rows would.
      log_examples: writes a step's example ids, as `data.log_examples` asks; else None.
    """

    def __init__(self, config: Config, rows: np.ndarray):
        self.tokenizer: Tokenizer = load_tokenizer(config)
        self._config = config
        self._rows = np.asarray(rows, np.int64)
        self._batch = config.train.global_batch_size
        corpus = open_corpus(config, self.tokenizer)
        self._corpus = corpus
        self.sources: list[Rows] = _training_rows(config, corpus, self.tokenizer)
        self.fingerprint = corpus.fingerprint
        require_same_everywhere(self.fingerprint)
        self.rows_per_epoch = sum(len(source) for source in self.sources)
        weights = [source.weight for source in corpus.sources] or [1.0]
        self._order = order_of([len(s) for s in self.sources], weights, config.run.seed, config.data.shuffle)
        log = ExamplesLog(Path(config.run.directory), self.example_ids) if config.data.log_examples else None
        self.log_examples = log

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return self.tokenizer.vocab_size

    def iterate(self, start: int) -> Batches:
        """Batches number `start`, `start` + 1, ... without end; has `close()`.

        Each holds arrays [rows, S]: int32 tokens, targets, segment_ids (0: padding), positions and
        float32 weights (0: padding and what is no target).

        Raises:
          InputError: a part of the data cannot be read.
        """
        return Batches(self._read, sys.maxsize, start, self._config.data.workers)

    def example_ids(self, step: int) -> list[str]:
        """Ids of the source examples in this process's part of batch number `step` (from 0)."""
        found = []
        for picked in self._picked(step):
            if picked is not None:
                found += self.sources[picked[0]].ids(picked[1])
        return found

    def row_ids(self, step: int, row: int) -> list[str]:
        """Ids of one row of this process's part of a batch, one a segment."""
        picked = list(self._picked(step))[row]
        return [] if picked is None else self.sources[picked[0]].ids(picked[1])

    @property
    def holds_out(self) -> bool:
        """Whether there are held-out documents."""
        return any(held.any() for held in self._corpus.held)

    def places(self) -> list[Path]:
        """The directories of the tokenised sources."""
        return [store.directory for store in self._corpus.stores]

    def describe(self) -> list[str]:
        """What is trained on, a line each."""
        names = [f"{source.name}: " if len(self.sources) > 1 else "" for source in self.sources]
        told = self.tokenizer
        lines = [f"tokenizer: {told.name}, {told.vocab_size:,} tokens, BOS {told.bos_id}, EOS {told.eos_id}"]
        lines += [f"data: {name}{self._numbers(number)}" for number, name in enumerate(names)]
        if self.rows_per_epoch < self._batch:
            lines.append(
                f"data: {counted(self.rows_per_epoch, 'row')} an epoch, fewer than train.global_batch_size "
                f"{self._batch}: a batch holds rows more than once"
            )
        return lines

    def _numbers(self, number: int) -> str:
        rows, size = self.sources[number], self._config.train.sequence_length
        text = f"{counted(len(rows), 'row')} of {size}"
        if not isinstance(rows, DocumentRows):
            return f"synthetic, {text}"
        store, held = self._corpus.stores[number], self._corpus.held[number]
        full = rows.pairs / (len(rows) * size)
        left = "" if self._config.eval.every or not held.any() else ", not evaluated as eval.every is 0"
        parts = [
            f"{counted(int((~held).sum()), 'document')} ({np.count_nonzero(held):,} more held out{left})",
            f"{rows.pairs:,} tokens an epoch",
            f"{text}, {full:.1%} full",
        ]
        if rows.dropped:
            parts.append(f"{rows.dropped:,} tokens past a row left out (data.packing none)")
        if rows.left_out:
            parts.append(f"{counted(rows.left_out, 'row')} without a target left out")
        skipped = store.manifest["skipped"]
        if skipped["empty"]:
            parts.append(f"{counted(skipped['empty'], 'empty document')} skipped")
        if skipped["masked"]:
            parts.append(f"{counted(skipped['masked'], 'conversation')} without the assistant skipped")
        return "; ".join(parts)

    def _picked(self, step: int) -> Iterator[tuple[int, int] | None]:
        """Source and number of each row; None past the batch's end, where it is filled up with empty rows."""
        for row in self._rows:
            yield self._order[int(step * self._batch + row)] if row < self._batch else None

    def _read(self, step: int) -> dict[str, np.ndarray]:
        empty = empty_rows((self._config.train.sequence_length,))
        return stacked([self.sources[p[0]].row(p[1]) if p else empty for p in self._picked(step)])


def open_train(config: Config, rows: np.ndarray) -> TrainData:
    """The training data of a config, for the process that supplies these rows of the global batch.

    Args:
      rows: int32 positions in the global batch [rows of this process]; empty rows stand past its end.

    Raises:
      ConfigError, InputError: as their messages say.
    """
    return TrainData(config, rows)


def _training_rows(config: Config, corpus: Corpus, tokenizer: Tokenizer) -> list[Rows]:
    size = config.train.sequence_length
    if not corpus.sources:
        return [SyntheticRows(config.run.seed, tokenizer.vocab_size, size, training=True)]
    found: list[Rows] = []
    for source, store, held in zip(corpus.sources, corpus.stores, corpus.held, strict=True):
        documents = np.flatnonzero(~held)
        if not documents.size:
            raise InputError(
                f"{source.setting}: all {len(held)} documents are held out; lower data.holdout or add some"
            )
        prefix = f"{source.name}/" if len(corpus.sources) > 1 else ""
        rows = document_rows(
            source.name, store, documents, config.data.packing, size, training=True, prefix=prefix
        )
        found.append(require_rows(rows, source.setting))
    return found

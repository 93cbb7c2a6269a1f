"""Evaluation sets: all of a set, each token once, in batches of one shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dsjax.config import Config
from dsjax.data import cache
from dsjax.data.batches import Batches
from dsjax.data.corpus import open_corpus, require_same_everywhere
from dsjax.data.prepare import prepared
from dsjax.data.readers import content_hash, plan_parts, read_documents
from dsjax.data.rows import DocumentRows, Rows, SyntheticRows, document_rows, empty_rows, stacked
from dsjax.data.sources import Source, evaluation_sources, list_files
from dsjax.data.store import Store
from dsjax.data.tokenizer import Tokenizer, load_tokenizer
from dsjax.errors import InputError

HELD_OUT = "heldout"
_READ_BYTES = 16 << 20


@dataclass(frozen=True)
class _Slice:
    """Some documents of a store."""

    source: Source
    store: Store
    documents: np.ndarray


class EvalData:
    """One evaluation set.

    Attributes:
      name: as results call it.
      num_bytes: UTF-8 bytes of the text whose tokens are predicted (0: the set has no text).
      num_documents: documents.
    """

    def __init__(
        self, name: str, slices: Sequence[_Slice], sets: Sequence[Rows], tokenizer: Tokenizer, shape: _Shape
    ):
        self.name = name
        self._slices, self._sets, self._tokenizer, self._shape = slices, sets, tokenizer, shape
        self._ends = np.cumsum([len(rows) for rows in sets])
        self.num_bytes = sum(int(s.store.documents["bytes"][s.documents].sum()) for s in slices)
        self.num_documents = sum(len(s.documents) for s in slices)
        self._weight: int | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the whole set."""
        return int(self._ends[-1])

    @property
    def num_batches(self) -> int:
        """Batches that every process's `batches` yields."""
        return -(-self.num_rows // self._shape.batch)

    @property
    def num_tokens(self) -> int:
        """Total weight of the whole set: the tokens predicted, EOS included."""
        if self._weight is None:
            self._weight = sum(self._weight_of(rows) for rows in self._sets)
        return self._weight

    def batches(self) -> Batches:
        """This process's rows of every batch, as `TrainData.iterate` shapes them.

        The last batch is filled up with rows of weight 0, so that every one has the same shape and all
        processes yield equally many.
        """
        return Batches(self._read, self.num_batches, 0, self._shape.threads)

    def texts(self) -> Iterator[str]:
        """The documents as they are in their files; nothing for conversations and synthetic data.

        Of a directory that `data build` made only tokens are left, which are decoded.
        """
        for piece in self._slices:
            if piece.store.masked:
                continue
            yield from self._decoded(piece) if piece.source.built is not None else _raw(piece)

    def _decoded(self, piece: _Slice) -> Iterator[str]:
        for document in piece.documents:
            length = int(piece.store.documents["length"][document])
            yield self._tokenizer.decode(piece.store.read(int(document), 0, length)[0].tolist())

    def _read(self, number: int) -> dict[str, np.ndarray]:
        rows = []
        for position in self._shape.rows:
            at = number * self._shape.batch + int(position)
            if position >= self._shape.batch or at >= self.num_rows:
                rows.append(empty_rows((self._shape.length,)))
                continue
            which = int(np.searchsorted(self._ends, at, side="right"))
            rows.append(self._sets[which].row(at - int(self._ends[which]) + len(self._sets[which])))
        return stacked(rows)

    def _weight_of(self, rows: Rows) -> int:
        if not isinstance(rows, DocumentRows):
            return len(rows) * self._shape.length
        if not rows.store.masked:
            return rows.pairs
        return int(sum(rows.row(number)["weights"].sum() for number in range(len(rows))))


@dataclass(frozen=True)
class _Shape:
    """Of batches: rows of this process, of all, tokens of a row; and threads to read ahead."""

    rows: np.ndarray
    batch: int
    length: int
    threads: int


def open_eval(config: Config, rows: np.ndarray) -> dict[str, EvalData]:
    """The evaluation sets of a config: the held-out slice, if there is one, and `eval.sets` by name.

    Args:
      rows: int32 positions in a batch of `train.global_batch_size` that this process supplies;
        empty rows stand past its end.

    Raises:
      InputError: nothing is held out although `data.holdout` asks for it, a set without text, or files
        at fault.
    """
    tokenizer = load_tokenizer(config)
    size = config.train.sequence_length
    shape = _Shape(np.asarray(rows, np.int64), config.train.global_batch_size, size, config.data.workers)
    slices: dict[str, list[_Slice]] = {}
    corpus = open_corpus(config, tokenizer)
    require_same_everywhere(corpus.fingerprint)
    if config.data.holdout and corpus.sources:
        slices[HELD_OUT] = [
            _Slice(source, store, np.flatnonzero(held))
            for source, store, held in zip(corpus.sources, corpus.stores, corpus.held, strict=True)
            if held.any()
        ]
        if not slices[HELD_OUT] and not config.eval.sets:
            raise InputError(
                "data.holdout: nothing to hold out, the data is a single document "
                f"({corpus.sources[0].paths[0]}); split it into several, or name eval.sets"
            )
    for source in evaluation_sources(config.data, config.eval):
        store = prepared(source, config.data, tokenizer)
        require_same_everywhere(store.manifest["digest"])
        slices[source.name] = [_Slice(source, store, np.arange(len(store.documents)))]
    found = {}
    for name, pieces in slices.items():
        if not pieces:
            cache.say("data.holdout: the data is a single document, so only eval.sets are evaluated")
            continue
        sets: list[Rows] = [
            document_rows(p.source.name, p.store, p.documents, config.data.packing, size, training=False)
            for p in pieces
        ]
        found[name] = EvalData(name, pieces, sets, tokenizer, shape)
    if config.data.holdout and not corpus.sources:
        synthetic = SyntheticRows(config.run.seed, tokenizer.vocab_size, size, training=False)
        found = {HELD_OUT: EvalData(HELD_OUT, [], [synthetic], tokenizer, shape), **found}
    return found


def _raw(piece: _Slice) -> Iterator[str]:
    """The documents' text, from the files again; the store knows which by their content."""
    wanted = set(piece.store.documents["hash"][piece.documents].tolist())
    files = list_files(piece.source)
    for part in plan_parts(piece.source.kind, files, _READ_BYTES):
        for document in read_documents(piece.source.kind, files[part.file], part, piece.source.field):
            if not document.empty and content_hash(document) in wanted:
                yield document.text

"""Tokenised documents on disk, for random access.

A directory holds `dataset.json` (written last: what it is), `documents.npy` (a row a document, see
`DOCUMENT`), ArrayRecord parts and, for a tokenizer trained on the spot, the tokenizer. A part is the
tokens of its documents end to end, cut into records of `CHUNK` tokens; the highest bit of a stored
token says that it is no target of the loss.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dsjax.data import cache
from dsjax.data.readers import Document, Part, content_hash, open_records, read_documents
from dsjax.data.sources import MANIFEST, InputFile
from dsjax.data.tokenizer import Tokenizer
from dsjax.errors import InputError
from dsjax.files import write_atomically

CHUNK = 2048
"""Tokens of a record: what a read fetches at least."""
WRITER_OPTIONS = "group_size:1,zstd:1"
DOCUMENT = np.dtype(
    [
        ("part", "<u4"),  # the part that holds it
        ("offset", "<u8"),  # its first token there
        ("length", "<u4"),  # its tokens, BOS and EOS included
        ("bytes", "<u8"),  # UTF-8 bytes of the text that its targets spell
        ("hash", "<u8"),  # of its content
        ("file", "<u4"),  # the file it is from, and where it stands in it
        ("position", "<u8"),
    ]
)
INDEX = "documents.npy"
_BATCH = 64


def part_names(number: int) -> tuple[str, str, str]:
    """File names of a part: its records, its documents, its counts (which appears last)."""
    stem = f"part-{number:05d}"
    return f"{stem}.arrayrecord", f"{stem}.npy", f"{stem}.json"


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type for ids below `vocab_size` and one bit more."""
    return np.dtype("<u2") if vocab_size <= 1 << 15 else np.dtype("<u4")


# ---- writing


@dataclass(frozen=True)
class Job:
    """All that is needed to tokenise a source; `groups` holds the stretches of files of each part."""

    directory: Path
    kind: str
    field: str
    files: Sequence[InputFile]
    groups: Sequence[Sequence[Part]]
    tokenizer: dict[str, str]

    def is_done(self, number: int) -> bool:
        """Whether a part is there."""
        return (self.directory / part_names(number)[2]).is_file()

    def dump(self) -> str:
        """As JSON, for a worker process."""
        files = [[f.path, f.name, f.size, f.mtime_ns] for f in self.files]
        groups = [[[p.file, p.start, p.stop, p.weight] for p in group] for group in self.groups]
        return json.dumps([str(self.directory), self.kind, self.field, files, groups, self.tokenizer])

    @classmethod
    def parse(cls, text: str) -> Job:
        """What `dump` wrote."""
        directory, kind, name, files, groups, tokenizer = json.loads(text)
        return cls(
            Path(directory),
            kind,
            name,
            [InputFile(*file) for file in files],
            [[Part(*part) for part in group] for group in groups],
            tokenizer,
        )


@dataclass
class _Tokens:
    """One document's tokens, with 1 for each that is a target of the loss."""

    ids: Sequence[int]
    mask: Sequence[int] | None
    num_bytes: int


def write_part(job: Job, number: int, tokenizer: Tokenizer) -> None:
    """Tokenises one part; its files appear whole or not at all.

    Raises:
      InputError: a document at fault, named with its place, or a disk that cannot be written.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    records, index, counts = (job.directory / name for name in part_names(number))
    draft = cache.draft_of(records)
    try:
        writer = ArrayRecordWriter(str(draft), WRITER_OPTIONS)
        sink = _PartWriter(writer, number, token_dtype(tokenizer.vocab_size))
        try:
            for stretch in job.groups[number]:
                documents = read_documents(job.kind, job.files[stretch.file], stretch, job.field)
                for document, tokens in _tokenised(documents, tokenizer, sink):
                    sink.add(stretch.file, document, tokens)
            sink.flush()
        finally:
            writer.close()
        cache.sync(draft)
        draft.replace(records)
        cache.write_array(index, np.array(sink.documents, DOCUMENT))
        write_atomically(counts, json.dumps(sink.counts()).encode())
    except RuntimeError as error:  # the writer's own words for what the system says
        raise cache.cannot_write(records, next(iter(str(error).splitlines()), "unknown")) from None
    finally:
        draft.unlink(missing_ok=True)


@dataclass
class _PartWriter:
    writer: Any
    number: int
    dtype: np.dtype
    documents: list[tuple[int, ...]] = field(default_factory=list)
    tokens: int = 0
    empty: int = 0
    masked: int = 0
    _pending: list[np.ndarray] = field(default_factory=list)
    _waiting: int = 0
    _digest: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def add(self, file: int, document: Document, tokens: _Tokens) -> None:
        array = np.asarray(tokens.ids, self.dtype)
        if tokens.mask is not None:
            array = array | ((1 - np.asarray(tokens.mask, self.dtype)) << (self.dtype.itemsize * 8 - 1))
        place = (self.number, self.tokens, len(array), tokens.num_bytes)
        self.documents.append((*place, content_hash(document), file, document.position))
        self._digest.update(array.tobytes())
        self._digest.update(b"|")
        self._pending.append(array)
        self._waiting += len(array)
        self.tokens += len(array)
        if self._waiting >= 64 * CHUNK:
            self._write(self._waiting - self._waiting % CHUNK)

    def flush(self) -> None:
        self._write(self._waiting)

    def _write(self, count: int) -> None:
        if not count:
            return
        stream = np.concatenate(self._pending)
        for start in range(0, count, CHUNK):
            self.writer.write(stream[start : min(start + CHUNK, count)].tobytes())
        self._pending, self._waiting = [stream[count:]], len(stream) - count

    def counts(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "empty": self.empty,
            "masked": self.masked,
            "digest": self._digest.hexdigest(),
        }


def _tokenised(
    documents: Iterable[Document], tokenizer: Tokenizer, sink: _PartWriter
) -> Iterator[tuple[Document, _Tokens]]:
    """The documents with their tokens; those with nothing to learn from are counted, not kept."""
    for batch in _batches(documents):
        encoded = iter(tokenizer.encode_batch([document.text for document in batch if document.text]))
        for document in batch:
            if document.empty:
                sink.empty += 1
                continue
            if document.messages is None:
                tokens = _Tokens(tokenizer.frame(next(encoded)), None, len(document.text.encode()))
            else:
                tokens = _conversation(document, tokenizer)
            if len(tokens.ids) < 2:
                sink.empty += 1
            elif tokens.mask is not None and not any(tokens.mask[1:]):
                sink.masked += 1
            else:
                yield document, tokens


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if len(batch) == _BATCH or size > 1 << 20:
            yield batch
            batch, size = [], 0
    yield batch


def _conversation(document: Document, tokenizer: Tokenizer) -> _Tokens:
    assert document.messages is not None
    try:
        ids, mask = tokenizer.chat(document.messages, document.tools)
    except InputError as error:
        raise InputError(f"{document.place}: {error.faults[0]}") from None
    said = tokenizer.decode([i for i, counts in zip(ids, mask, strict=True) if counts])
    return _Tokens(ids, mask, len(said.encode()))


# ---- reading


class Store:
    """A finished directory, open for random access by any number of threads.

    Attributes:
      documents: `DOCUMENT` array [N], in the order of the source.
      manifest: what dataset.json says.

    Raises:
      InputError: the directory is damaged or of another version.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        try:
            self.manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
            self.documents: np.ndarray = np.load(directory / INDEX, mmap_mode="r", allow_pickle=False)
            known = self.manifest["format"] == cache.FORMAT and self.documents.dtype == DOCUMENT
            whole = known and len(self.documents) == self.manifest["documents"]
            self._dtype = np.dtype(self.manifest["dtype"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{directory}: no built data set that can be read ({error}); remove it"
            ) from None
        if not whole:
            raise InputError(
                f"{directory}: built by another version, or damaged; remove it and build it again"
            )
        self._mark = 1 << (self._dtype.itemsize * 8 - 1)
        self._readers: dict[int, Any] = {}
        self._lock = threading.Lock()

    @property
    def masked(self) -> bool:
        """Whether some tokens are no targets (conversations)."""
        return self.manifest["kind"] == "chat"

    def name_of(self, document: int) -> str:
        """The id of a document: its file, and where in the file it begins if that holds several."""
        row = self.documents[document]
        name = str(self.manifest["files"][int(row["file"])])
        return name if self.manifest["kind"] == "text" else f"{name}@{int(row['position'])}"

    def read(self, document: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [count] int32 of a document from its `start`-th on, and which are targets [count] bool.

        Raises:
          InputError: the part is damaged or gone.
        """
        row = self.documents[document]
        begin = int(row["offset"]) + start
        first, last = begin // CHUNK, (begin + count - 1) // CHUNK
        part = int(row["part"])
        try:
            records = self._reader(part).read(list(range(first, last + 1)))
            stream = np.frombuffer(b"".join(records), self._dtype)
        except (RuntimeError, ValueError, IndexError) as error:
            reason = next(iter(str(error).splitlines()), "unknown")
            raise InputError(
                f"{self.directory / part_names(part)[0]}: damaged ({reason}); "
                f"remove {self.directory} and build again"
            ) from None
        stream = stream[begin - first * CHUNK :][:count]
        if len(stream) != count:
            raise InputError(
                f"{self.directory / part_names(part)[0]}: cut off; remove {self.directory} and build again"
            )
        return (stream & (self._mark - 1)).astype(np.int32), stream < self._mark

    def _reader(self, part: int) -> Any:
        with self._lock:
            if part not in self._readers:
                try:
                    self._readers[part] = open_records(str(self.directory / part_names(part)[0]))
                except InputError as error:
                    raise InputError(
                        f"{error}; the tokenised data is damaged: remove {self.directory} and run again, which "
                        "makes it anew"
                    ) from None
            return self._readers[part]

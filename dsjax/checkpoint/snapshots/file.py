"""One snapshot file: raw bytes in memory, and an index that counts only once all of them are there.

    0     magic, version, valid?, where the index is, its digest
    4096  the records' bytes, each aligned to 64
    ...   the index, JSON: what the snapshot is, and name, type, place and digest of every record

A file is invalid from before its first byte changes until after its last one stands, so a writer that
is killed at any moment leaves a file that is not read.  Digests are xxh3 (64 bits).  Nothing here needs JAX.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16, float8_..., int4)
import numpy as np
import xxhash

SUFFIX = ".snapshot"
_MAGIC, _VERSION = b"DSJAXSNP", 1
_HEADER = struct.Struct("<8sIIQQQ")  # magic, version, valid, index's offset, length, digest
_DATA, _ALIGN = 4096, 64
# Kept free behind the records for the index: what one of them takes at most, beside its name.
_RECORD_BYTES, _META_BYTES = 400, 1 << 16


@dataclass(frozen=True)
class Record:
    """A box of an array: `start` to `stop` in each dimension of its global `shape`, C order.

    Attributes:
      dtype: numpy's name of the type.
      offset, nbytes: where its bytes lie in the file.
      digest: xxh3 of its bytes; "" until it has been written.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    offset: int
    nbytes: int
    digest: str = ""

    @property
    def box(self) -> tuple[int, ...]:
        """Its own shape."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))


def _record(values: list[Any]) -> Record:
    name, dtype, shape, start, stop, offset, nbytes, digest = values
    return Record(name, dtype, tuple(shape), tuple(start), tuple(stop), offset, nbytes, digest)


@dataclass(frozen=True)
class Index:
    """What a snapshot file holds.

    Attributes:
      run: which run it belongs to (random, of the run directory).
      session: which start of that run wrote it (random, the same for all processes).
      step, rank, processes, attempt: of the state, and of the process that wrote it.
      written: Unix time.
      meta: what was given with the state.
      records: in the order of their offsets.
    """

    run: str
    session: str
    step: int
    rank: int
    processes: int
    attempt: int
    written: float
    meta: Mapping[str, Any]
    records: tuple[Record, ...] = ()

    def to_json(self) -> bytes:
        fields = asdict(replace(self, records=())) | {
            "records": [list(vars(record).values()) for record in self.records]
        }
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Index:
        fields = json.loads(text)
        records = fields.pop("records")
        return cls(**fields, records=tuple(map(_record, records)))


def digest_of(data: np.ndarray) -> str:
    """xxh3 of an array's bytes (contiguous), 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data.data)


def lay_out(
    boxes: Sequence[tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]],
) -> list[Record]:
    """Records for boxes (name, dtype, shape, start, stop), one behind the other."""
    records, offset = [], _DATA
    for name, dtype, shape, start, stop in boxes:
        empty = Record(name, dtype, shape, start, stop, offset, 0)
        nbytes = int(np.prod(empty.box, dtype=np.int64)) * np.dtype(dtype).itemsize
        records.append(replace(empty, nbytes=nbytes))
        offset += -(-nbytes // _ALIGN) * _ALIGN
    return records


def file_bytes(records: Sequence[Record]) -> int:
    """Bytes of a file of these records, room for its index included."""
    end = records[-1].offset + records[-1].nbytes if records else _DATA
    index = sum(_RECORD_BYTES + len(record.name) for record in records) + _META_BYTES
    return -(-(end + index) // 4096) * 4096


class SnapshotFile:
    """A file that snapshots are written to, one after the other.

    Args:
      path: it; made by `allocate`.
      num_bytes: its size (see `file_bytes`).
    """

    def __init__(self, path: Path, num_bytes: int):
        self.path, self.num_bytes = path, num_bytes
        self._data: np.ndarray | None = None

    def allocate(self) -> None:
        """Takes all its memory now, so that writing neither waits for pages nor finds that there are none.

        Raises:
          OSError: there is too little room.
        """
        if self._data is not None:
            return
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self.num_bytes)
        finally:
            os.close(descriptor)
        self._data = np.memmap(self.path, np.uint8, "r+", shape=(self.num_bytes,))
        pages = self._data[_DATA::4096]
        pages |= 0  # maps every page

    def bytes_of(self, record: Record) -> np.ndarray:
        """A record's bytes, to be written."""
        assert self._data is not None
        return self._data[record.offset : record.offset + record.nbytes]

    def raw(self, start: int, stop: int) -> np.ndarray:
        """The file's own bytes, to be written as a whole by one who copies another file."""
        assert self._data is not None
        return self._data[start:stop]

    def begin(self) -> None:
        """From here on the file is invalid."""
        self._write(0, _HEADER.pack(_MAGIC, _VERSION, 0, 0, 0, 0))

    def finish(self, index: Index) -> None:
        """Digests the records, writes the index, and then makes the file valid."""
        records = tuple(replace(r, digest=digest_of(self.bytes_of(r))) for r in index.records)
        text = replace(index, records=records).to_json()
        offset = records[-1].offset + records[-1].nbytes if records else _DATA
        self._write(offset, text)
        self._write(0, _valid_header(offset, text))

    def _write(self, offset: int, data: bytes) -> None:
        descriptor = os.open(self.path, os.O_WRONLY)
        try:
            while data:
                written = os.pwrite(descriptor, data, offset)
                data, offset = data[written:], offset + written
        finally:
            os.close(descriptor)


def _valid_header(offset: int, text: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, _VERSION, 1, offset, len(text), xxhash.xxh3_64_intdigest(text))


def read_index(path: Path) -> Index | None:
    """What a snapshot file holds; None: nothing that counts."""
    try:
        with path.open("rb") as file:
            magic, version, valid, offset, length, digest = _HEADER.unpack(file.read(_HEADER.size))
            if (magic, version, valid) != (_MAGIC, _VERSION, 1):
                return None
            file.seek(offset)
            text = file.read(length)
        return Index.from_json(text) if xxhash.xxh3_64_intdigest(text) == digest else None
    except (OSError, ValueError, TypeError, KeyError, struct.error):
        return None


def used_bytes(path: Path) -> tuple[bytes, int]:
    """A valid file's header, and where its last byte that counts ends."""
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
    _, _, _, offset, length, _ = _HEADER.unpack(header)
    return header, offset + length


def make_valid(path: Path, header: bytes) -> None:
    """Ends the copying of a file: its header comes last."""
    with path.open("r+b") as file:
        file.write(header)


def invalidate(path: Path) -> None:
    """A snapshot that no longer counts; its memory stays taken."""
    with path.open("r+b") as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, 0, 0, 0, 0))


def snapshot_files(directory: Path) -> list[Path]:
    """The snapshot files of a directory, valid or not."""
    try:
        return sorted(path for path in directory.iterdir() if path.name.endswith(SUFFIX))
    except OSError:
        return []


@dataclass(frozen=True)
class StoredSnapshot:
    """A snapshot as it lies in this host's memory.

    Attributes:
      step, written: of the state; Unix time.
      num_bytes: of its records here, each once.
      ranks, processes: whose parts are here, of how many; it is whole where all of them are (on any host).
      path: the directory.
    """

    step: int
    written: float
    num_bytes: int
    ranks: tuple[int, ...]
    processes: int
    path: Path

    @property
    def complete(self) -> bool:
        """Whether this host has all of it."""
        return len(self.ranks) == self.processes


def listing(directory: str | Path) -> list[StoredSnapshot]:
    """The snapshots in a directory of this host, oldest first."""
    root = Path(directory)
    found: dict[tuple[int, str], dict[int, Index]] = {}
    for path in snapshot_files(root):
        index = read_index(path)
        if index is not None:
            found.setdefault((index.step, index.session), {})[index.rank] = index
    snapshots = []
    for (step, _), parts in found.items():
        size = sum(record.nbytes for index in parts.values() for record in index.records)
        one = next(iter(parts.values()))
        written = max(index.written for index in parts.values())
        snapshots.append(StoredSnapshot(step, written, size, tuple(sorted(parts)), one.processes, root))
    return sorted(snapshots, key=lambda s: (s.step, s.written))

"""The cache of prepared data: keyed by content, built once by whoever comes first, never half there."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dsjax.config.schema import DataConfig
from dsjax.data.sources import InputFile
from dsjax.errors import InputError
from dsjax.files import write_atomically

FORMAT = 1
"""Part of every key: raise it when what is stored changes."""
_EDGE = 1 << 16
_PATIENCE_SECONDS = 2.0


def cache_root(data: DataConfig) -> Path:
    """The directory that prepared data is kept in."""
    if data.cache_dir is not None:
        return Path(data.cache_dir).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("dsjax")) / "data"


def key(*parts: Any) -> str:
    """32 hex digits for JSON-able `parts`."""
    text = json.dumps([FORMAT, *parts], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def files_key(files: Sequence[InputFile]) -> str:
    """Tells lists of files apart by name, size, time of change, and the content of both ends.

    Where the files lie is no part of it, so a data set that moved is not prepared again.

    Raises:
      InputError: a file that cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(json.dumps([file.name, file.size, file.mtime_ns]).encode())
        try:
            with open(file.path, "rb") as stream:
                digest.update(stream.read(_EDGE))
                if file.size > _EDGE:
                    stream.seek(max(_EDGE, file.size - _EDGE))
                    digest.update(stream.read(_EDGE))
        except OSError as error:
            raise InputError(f"{file.path}: cannot be read ({error.strerror})") from None
    return digest.hexdigest()


@contextmanager
def building(target: Path, what: str) -> Iterator[bool]:
    """Holds the right to make `target`; yields False if it is there by then.

    Several processes may come at once: one makes it, the others wait and find it made. A process that
    dies lets go of the right.

    Raises:
      InputError: the place cannot be written, or the disk is full.
    """
    import filelock

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(target.with_name(target.name + ".lock"))
        try:
            lock.acquire(timeout=_PATIENCE_SECONDS)
        except filelock.Timeout:
            say(f"{what}: another process prepares it; waiting")
            lock.acquire()
        try:
            yield not target.exists()
            # Whoever comes now finds the target, whichever lock it holds. Where building failed the
            # lock's file stays: removed, it would let two that come next hold a lock each.
            if target.exists():
                Path(lock.lock_file).unlink(missing_ok=True)
        finally:
            lock.release()
    except OSError as error:
        raise cannot_write(error.filename or target, error.strerror or error) from None


def cannot_write(place: Any, reason: Any) -> InputError:
    """The error of a cache that cannot be written."""
    return InputError(f"data.cache_dir: cannot write {place} ({reason}); free space or choose another place")


def write_array(path: Path, array: np.ndarray) -> None:
    """`write_atomically` for a NumPy array."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    write_atomically(path, stream.getvalue())


def say(text: str) -> None:
    """A line to the user about preparation that takes time."""
    print(f"dsjax: {text}", file=sys.stderr, flush=True)


def counted(number: int, noun: str) -> str:
    """A number of things: 1 file, 2,000 files."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def sized(num_bytes: int) -> str:
    """A size for people: 812 bytes, 3.4 kB, 12.0 MB."""
    if num_bytes < 1000:
        return counted(num_bytes, "byte")
    return f"{num_bytes / 1e3:.1f} kB" if num_bytes < 1e6 else f"{num_bytes / 1e6:,.1f} MB"


def sync(path: Path) -> None:
    """Waits until a file is on disk."""
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())


def draft_of(path: Path) -> Path:
    """The name under which this process writes what will be `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}")

"""Errors of the file system and of what reads it, as one clear line each."""

from __future__ import annotations

import errno
import sys
from functools import cache
from pathlib import Path
from typing import Any

from dsjax.errors import Damaged, DsjaxError, InputError, InternalError


def unreadable(where: str, error: Exception) -> Damaged:
    """The error of a checkpoint that could not be read."""
    text = str(error).partition("\n")[0][:200]
    said = f": {text}" if "<" not in text and "NoneType" not in text else ""
    return Damaged(
        f"{where} is damaged or incomplete ({type(error).__name__}{said}); remove it to go on from an earlier one"
    )


@cache
def hush_closed_loops() -> None:
    """After a read that failed, TensorStore's other reads report to an event loop that Orbax has closed."""
    uncaught, ignored = sys.excepthook, sys.unraisablehook

    def closed(error: BaseException | None) -> bool:
        return isinstance(error, RuntimeError) and "Event loop is closed" in str(error)

    def on_uncaught(kind: Any, error: BaseException, trace: Any) -> None:
        if not closed(error):
            uncaught(kind, error, trace)

    def on_ignored(told: Any) -> None:
        if not closed(told.exc_value):
            ignored(told)

    sys.excepthook, sys.unraisablehook = on_uncaught, on_ignored


class disk_faults:
    """Turns an error of the file system, at any depth, into one clear line."""

    def __init__(self, directory: Path):
        self._directory = directory

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, DsjaxError) or not isinstance(error, Exception):
            return
        cause: BaseException | None = error
        text = " ".join(str(error).split())
        if any(word in text for word in ("Gloo", "by peer")):
            return  # Another process was lost; the disk has nothing to do with it.
        while cause is not None:
            if isinstance(cause, OSError) and cause.errno in _PLAIN:
                raise InputError(f"checkpoint.disk.path {self._directory}: {_PLAIN[cause.errno]}") from error
            cause = cause.__cause__ or cause.__context__
        for number, plain in _PLAIN.items():
            if errno.errorcode[number] in text or _TEXTS.get(number, "\0") in text:
                raise InputError(f"checkpoint.disk.path {self._directory}: {plain}") from error
        raise InternalError(
            f"saving to {self._directory} failed: {type(error).__name__}: {text[:300]}"
        ) from error


_PLAIN = {
    errno.ENOSPC: "the disk is full; free some space or set checkpoint.disk.path to another disk "
    "(earlier checkpoints stay restorable)",
    errno.EROFS: "the disk is read-only; set checkpoint.disk.path to one that can be written",
    errno.EACCES: "no permission to write; set checkpoint.disk.path to a directory of yours",
    errno.ENOENT: "this directory cannot be made; set checkpoint.disk.path to a directory of yours",
    errno.ENOTDIR: "a part of this path is a file; set checkpoint.disk.path to a directory",
    errno.EEXIST: "this path is a file; set checkpoint.disk.path to a directory",
    errno.EDQUOT: "the disk quota is used up; free some space or set checkpoint.disk.path elsewhere",
}
_TEXTS = {errno.ENOSPC: "No space left on device", errno.EROFS: "Read-only file system"}

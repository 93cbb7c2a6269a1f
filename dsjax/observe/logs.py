"""metrics.jsonl and events.jsonl: one JSON object a line, on disk as soon as it is written.

A line goes out in one write, so a process that is killed leaves whole lines; a full disk or a lost
host can still tear the last one.  Opening a log deals with that: what cannot be read again is not
a record.
"""

from __future__ import annotations

import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsjax.files import write_atomically

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
_OURS = frozenset(
    (
        "step", "time", "loss", "tokens", "tokens_seen", "grad_norm", "learning_rate", "loss_scale", "overflows",
        "perplexity", "step_seconds", "tokens_per_second", "tokens_per_second_per_device", "input_wait_seconds", "mfu",
        "peak_memory_bytes",
    )
)  # fmt: skip


def users_metrics(record: Mapping[str, Any]) -> dict[str, float | None]:
    """The metrics of a line (or of an evaluation's result) that the user's own loss added.

    None stands for a value that is not finite.
    """
    return {
        name: None if value is None or not math.isfinite(value) else float(value)
        for name, value in record.items()
        if name not in _OURS
        and (value is None or (isinstance(value, int | float) and not isinstance(value, bool)))
    }


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a log; a line that is torn is passed over. No file: no records."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            record = _parse(line)
            if record is not None:
                yield record


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _plain(value: Any) -> Any:
    """`value` as JSON takes it: numbers in full precision, null for what is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and jax arrays and scalars
        return _plain(value.tolist())
    return str(value)


class _Log(ABC):
    """A file of JSON lines that is appended to."""

    name: str

    def __init__(self, run_dir: str | Path, enabled: bool = True):
        self.path = Path(run_dir) / self.name
        self._fd: int | None = None
        if enabled:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._mend()
            self._fd = self._open()

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    @abstractmethod
    def _mend(self) -> None:
        """Deals with a last line that has no end."""

    def _torn_tail(self) -> tuple[int, bytes]:
        """Where the last line begins that no newline ends, and that line; empty if there is none."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return 0, b""
        with file:
            end = start = file.seek(0, os.SEEK_END)
            tail = b""
            while start > 0 and b"\n" not in tail:
                start = max(0, start - 65536)
                file.seek(start)
                tail = file.read(end - start)
        torn = tail[tail.rfind(b"\n") + 1 :]
        return end - len(torn), torn

    def _append(self, record: Mapping[str, Any]) -> None:
        if self._fd is None:
            return
        data = (json.dumps(_plain(record), ensure_ascii=False, allow_nan=False) + "\n").encode()
        try:
            while data:  # a disk that fills up takes a part and refuses the rest
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """Closes the file; nothing can be written after that."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class MetricsLog(_Log):
    """`metrics.jsonl` of a run directory.

    Args:
      run_dir: the directory, made if need be.
      enabled: False writes nothing (the processes other than 0).

    Raises:
      OSError: the file cannot be written; it carries the file's name.
    """

    name = METRICS

    def _mend(self) -> None:
        start, torn = self._torn_tail()
        if not torn:
            return
        if _parse(torn) is None:
            os.truncate(self.path, start)
        else:  # only the newline is missing
            with self.path.open("ab") as file:
                file.write(b"\n")

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one line; numbers in full precision, null for what is not finite."""
        self._append(record)

    def drop_after(self, step: int) -> None:
        """Drops the lines of steps past `step`, all at once: a reader sees the old file or the new one."""
        if self._fd is None:
            return
        kept: list[bytes] = []
        dropped = False
        with self.path.open("rb") as file:
            for line in file:
                record = _parse(line)
                if record is not None and record.get("step", 0) <= step:
                    kept.append(line if line.endswith(b"\n") else line + b"\n")
                else:
                    dropped = True
        if not dropped:
            return
        write_atomically(self.path, b"".join(kept))
        os.close(self._fd)
        self._fd = self._open()


class EventLog(_Log):
    """`events.jsonl` of a run directory: what happened, in order; it only grows.

    Args:
      run_dir: the directory, made if need be.
      enabled: False writes nothing (the processes other than 0).

    Raises:
      OSError: the file cannot be written; it carries the file's name.
    """

    name = EVENTS

    def _mend(self) -> None:
        if self._torn_tail()[1]:
            with self.path.open("ab") as file:
                file.write(b"\n")

    def event(self, kind: str, step: int, /, **facts: Any) -> None:
        """Appends `time` (seconds since 1970), `step`, `kind` and the facts."""
        base = {"time": time.time(), "step": step, "kind": kind}
        self._append({**base, **facts, **base})

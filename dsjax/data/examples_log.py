"""`examples-PROCESS.jsonl`: which examples each step trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsjax.files import write_atomically


class ExamplesLog:
    """Appends a line a step; a step that comes again (after a resume or a rollback) stands once.

    Args:
      directory: the run's.
      ids: number of a batch -> ids of this process's part of it.
    """

    def __init__(self, directory: Path, ids: Callable[[int], list[str]]):
        self._directory, self._ids = directory, ids
        self._stream: Any = None
        self._last: int | None = None

    def __call__(self, step: int, batch: int) -> None:
        """Writes the line of a step, whose batch has the number `batch`."""
        if self._last is None or step <= self._last:
            self._rewind(step)
        self._stream.write(json.dumps({"step": step, "ids": self._ids(batch)}) + "\n")
        self._stream.flush()
        self._last = step

    def _rewind(self, step: int) -> None:
        """Drops the lines from `step` on, atomically, and opens the file at its end."""
        import jax

        if self._stream is not None:
            self._stream.close()
        self._directory.mkdir(parents=True, exist_ok=True)
        process, count = jax.process_index(), jax.process_count()
        mine = self._directory / f"examples-{process}.jsonl"
        stale = [mine]
        if process == 0:
            # Of processes that an earlier start had and this one has not.
            stale += [f for f in self._directory.glob("examples-*.jsonl") if _number(f) >= count]
        for file in stale:
            if file.is_file():
                kept = [line for line in file.read_bytes().splitlines(keepends=True) if _before(line, step)]
                write_atomically(file, b"".join(kept))
        self._stream = open(mine, "a", encoding="utf-8")  # noqa: SIM115  open as long as the run


def _number(file: Path) -> int:
    text = file.stem.removeprefix("examples-")
    return int(text) if text.isdigit() else -1


def _before(line: bytes, step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] < step)
    except (ValueError, KeyError, TypeError):
        return False  # cut off where an earlier run ended

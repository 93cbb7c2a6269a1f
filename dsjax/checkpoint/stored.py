"""What lies in a directory of checkpoints: finding it, reading it, taking it away."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from dsjax.checkpoint.faults import hush_closed_loops, unreadable
from dsjax.errors import InputError

STATE, META = "state", "meta"
DELETED = ".deleted"


@dataclass(frozen=True)
class StoredCheckpoint:
    """One checkpoint on disk: its step, size in bytes, when it was written (Unix time), path."""

    step: int
    num_bytes: int
    written: float
    path: Path


def steps_in(directory: str | Path) -> list[int]:
    """Steps of the finished checkpoints of a directory, oldest first; other names are passed over.

    A checkpoint gets its name, a plain number, when all of it is written.
    """
    root = Path(directory)
    if not root.is_dir():
        return []
    numbered = [p for p in root.iterdir() if p.name.isdecimal() and p.name == str(int(p.name))]
    return sorted(int(path.name) for path in numbered if (path / STATE).is_dir())


def listing(directory: str | Path) -> list[StoredCheckpoint]:
    """The finished checkpoints of a checkpoint directory, oldest first; reads names and sizes only."""
    found = []
    for step in steps_in(directory):
        path = Path(directory) / str(step)
        with contextlib.suppress(FileNotFoundError):  # Removed meanwhile by the run that owns it.
            size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
            found.append(StoredCheckpoint(step, size, path.stat().st_mtime, path))
    return found


def read_meta(path: Path) -> dict[str, Any]:
    """What was written beside the state of a checkpoint (needs no device).

    Raises:
      Damaged: it cannot be read.
    """
    try:
        meta = json.loads((path / META / "metadata").read_text())
        return dict(meta)
    except (OSError, ValueError, TypeError) as error:
        raise unreadable(f"checkpoint {path}", error) from error


def metric_of(path: Path, name: str) -> float | None:
    """What an evaluation found when a checkpoint was saved, by SET.METRIC; None: that was not evaluated."""
    group, _, metric = name.partition(".")
    try:
        value = read_meta(path).get("metrics", {}).get(group, {}).get(metric)
    except (InputError, AttributeError):
        return None
    return float(value) if isinstance(value, int | float) else None


def stored_arrays(path: Path) -> dict[str, Any]:
    """Nested metadata (shape, dtype, sharding at the save) of a checkpoint's arrays.

    Raises:
      Damaged: it cannot be read.
    """
    try:
        return dict(ocp.PyTreeCheckpointHandler().metadata(epath.Path((path / STATE).absolute())).tree)
    except Exception as error:
        hush_closed_loops()
        raise unreadable(f"checkpoint {path}", error) from error


def read_arrays(path: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays of a checkpoint, those in the nested abstract tree `wanted` and placed as it says.

    Raises:
      Damaged: it cannot be read.
    """
    arguments = ocp.args.PyTreeRestore(
        item=wanted,
        restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
        partial_restore=True,
    )
    try:
        # Without Orbax's Checkpointer, in which a process waits for one that could not read its part.
        return dict(
            ocp.PyTreeCheckpointHandler().restore(epath.Path((path / STATE).absolute()), args=arguments)
        )
    except Exception as error:
        hush_closed_loops()
        raise unreadable(f"checkpoint {path}", error) from error


def remove_checkpoints(directory: Path, steps: Collection[int]) -> None:
    """Takes checkpoints away under another name: each is there whole or not at all.  See `free`."""
    for step in steps:
        (directory / str(step)).rename(directory / f"{step}{DELETED}")


def free(directory: Path) -> None:
    """Deletes the files of checkpoints that were taken away."""
    for path in directory.glob(f"*{DELETED}"):
        remove(path)


def remove(path: Path) -> None:
    """Removes a directory into which threads of a failed save may still be writing their last."""
    for _ in range(20):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.05)


def age(written: float) -> str:
    """How long ago a Unix time was, in words."""
    seconds = max(0.0, time.time() - written)
    for limit, unit, size in [(90, "s", 1), (5400, "min", 60), (172800, "h", 3600)]:
        if seconds < limit:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds / 86400:.0f} days ago"

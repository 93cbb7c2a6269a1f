"""How much of a host's memory snapshots may take."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil

from dsjax.checkpoint.snapshots.file import snapshot_files
from dsjax.errors import ConfigError

_GIB = 1 << 30
_GROUP = Path("/sys/fs/cgroup")


def free_bytes(place: Path) -> int:
    """Bytes that files in a directory can still take: of its file system, and of the memory behind it."""
    free = shutil.disk_usage(place).free
    if _in_memory(place):
        free = min(free, psutil.virtual_memory().available, _left_to_group(free))
    return free


def _in_memory(place: Path) -> bool:
    """Whether a directory is on a memory file system."""
    best, kind = "", ""
    try:
        for line in Path("/proc/mounts").read_text().splitlines():
            _, point, its_kind, *_ = line.split()
            inside = place == Path(point) or Path(point) in place.parents
            if inside and len(point) >= len(best):
                best, kind = point, its_kind
    except OSError:
        return True
    return kind in ("tmpfs", "ramfs")


def _left_to_group(otherwise: int) -> int:
    """What a container's limit leaves."""
    try:
        limit = (_GROUP / "memory.max").read_text().strip()
        used = int((_GROUP / "memory.current").read_text())
        return otherwise if limit == "max" else max(0, int(limit) - used)
    except (OSError, ValueError):
        return otherwise


def private_directory(path: Path) -> None:
    """Makes a directory that only this user can read.

    Raises:
      ConfigError: it cannot be made, or is somebody else's.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = path / f".writable-{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"checkpoint.memory.path {path}: cannot be written ({error.strerror}); set it to a directory of yours "
            "on a memory file system, or checkpoint.memory.every=0"
        ) from None
    if path.stat().st_uid != os.getuid():
        raise ConfigError(
            f"checkpoint.memory.path {path}: belongs to another user; set it to a directory of yours"
        )


def too_large(needed: int, free: int, budget_gib: float | None, place: Path, what: str) -> str | None:
    """Why snapshots do not fit, with what to change; None: they do.

    Args:
      needed: bytes of all snapshot files of the host.
      free: bytes that they can take there, those they have already included.
      budget_gib: most they may take; None: half of `free`.
      what: the files in words.
    """
    allowed = free // 2 if budget_gib is None else int(budget_gib * _GIB)
    if needed <= min(allowed, free):
        return None
    said = (
        f"half of the {free / _GIB:.2f} GiB that are free"
        if budget_gib is None
        else "checkpoint.memory.budget_gib"
    )
    limit = f"{allowed / _GIB:.2f} GiB are allowed ({said})"
    if needed <= allowed:
        limit = f"{free / _GIB:.2f} GiB are free"
    return (
        f"checkpoint.memory: {what} take {needed / _GIB:.2f} GiB in {place}, and {limit}; lower "
        "checkpoint.memory.keep, raise checkpoint.memory.budget_gib, set checkpoint.memory.buddy=false, set "
        "checkpoint.memory.path to a memory file system with more room, or checkpoint.memory.every=0"
    )


def make_room(directory: Path, sizes: dict[str, int], keep: set[str], budget_gib: float | None) -> list[Path]:
    """Removes what is not needed from a host's directory of snapshots.

    Args:
      sizes: name -> bytes of the files that will be used; those that exist stay.
      keep: names of files that may still be needed; they go too if there is no room for them.
      budget_gib: most that the files may take.

    Returns:
      The files that were kept though they will not be used.

    Raises:
      ConfigError: the files do not fit.
    """
    there = {path: path.stat().st_blocks * 512 for path in snapshot_files(directory)}
    free, needed = free_bytes(directory) + sum(there.values()), sum(sizes.values())
    fault = too_large(needed, free, budget_gib, directory, f"the {len(sizes)} snapshot files of this host")
    if fault is not None:
        raise ConfigError(fault)
    kept = [path for path in there if path.name in keep and path.name not in sizes]
    if too_large(needed + sum(there[path] for path in kept), free, budget_gib, directory, "they"):
        kept = []
    for path in there:
        if path.name not in sizes and path not in kept:
            path.unlink()
    return kept

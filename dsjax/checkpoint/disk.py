"""Numbered Orbax checkpoints on disk: asynchronous, atomic, restorable onto any mesh."""

from __future__ import annotations

import contextlib
import errno
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from dsjax.checkpoint.tree import check_matches, from_stored, to_stored
from dsjax.errors import DsjaxError, InputError, InternalError
from dsjax.mesh import named_leaves

_STATE, _META = "state", "meta"


@dataclass(frozen=True)
class StoredCheckpoint:
    """One checkpoint on disk: its step, size in bytes, when it was written (Unix time), path."""

    step: int
    num_bytes: int
    written: float
    path: Path


def listing(directory: str | Path) -> list[StoredCheckpoint]:
    """The finished checkpoints of a checkpoint directory, oldest first; reads names and sizes only."""
    root = Path(directory)
    if not root.is_dir():
        return []
    found = []
    for path in root.iterdir():
        numbered = path.name.isdigit() and path.name == str(int(path.name))
        if numbered and (path / _STATE).is_dir():
            files = [f for f in path.rglob("*") if f.is_file()]
            size = sum(f.stat().st_size for f in files)
            found.append(StoredCheckpoint(int(path.name), size, path.stat().st_mtime, path))
    return sorted(found, key=lambda c: c.step)


class DiskCheckpoints:
    """The checkpoints of one run.

    Args:
      directory: where they lie; made when first saved to.
      keep: how many of the newest are kept.
    """

    def __init__(self, directory: str | Path, keep: int = 3):
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._manager: ocp.CheckpointManager | None = None
        self.failed = False

    def latest_step(self) -> int | None:
        """Step of the newest finished checkpoint."""
        steps = [c.step for c in listing(self.directory)]
        return max(steps) if steps else None

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            # Orbax warns about options that do not matter here, on every process.
            # What fails in the background is raised by `check` and `wait`, once, as a line.
            logging.getLogger("absl").setLevel(logging.CRITICAL)
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self._keep, cleanup_tmp_directories=True, create=True
            )
            handlers = {_STATE: ocp.StandardCheckpointHandler(), _META: ocp.JsonCheckpointHandler()}
            with _disk_faults(self.directory):
                self._manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers)
        return self._manager

    def prepare(self) -> None:
        """Makes the directory, so that one that cannot be written is refused before training.

        Raises:
          InputError: the directory cannot be made or written.
        """
        with _disk_faults(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                probe = self.directory / ".writable"
                probe.write_bytes(b"x")
                probe.unlink()
        self._open()

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Starts saving; returns when the state has been copied off the devices.

        Raises:
          InputError, InternalError: this save could not start, or an earlier one failed.
        """
        manager = self._open()
        arguments = ocp.args.Composite(
            **{_STATE: ocp.args.StandardSave(to_stored(state)), _META: ocp.args.JsonSave(dict(meta))}
        )
        with self._noting_failure(), _disk_faults(self.directory):
            manager.save(step, args=arguments, force=True)

    def check(self) -> None:
        """Raises the error of a save that failed in the background."""
        if self._manager is not None:
            with self._noting_failure(), _disk_faults(self.directory):
                self._manager.check_for_errors()

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Remembers that a save failed: waiting for it would be waiting for processes that wait too."""
        try:
            yield
        except Exception:
            self.failed = True
            raise

    def wait(self) -> None:
        """Blocks until the save under way has finished, and raises its error if it failed."""
        if self._manager is not None:
            with self._noting_failure(), _disk_faults(self.directory):
                self._manager.wait_until_finished()
                self._manager.check_for_errors()

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """The state saved at a step, placed as the abstract tree `like` says, and its metadata.

        Raises:
          InputError: no such checkpoint, an unreadable one, or one of another model.
        """
        where = f"checkpoint {self.directory / str(step)}"
        self._require(step)
        manager = self._open()
        wanted = to_stored(like)
        try:
            stored = manager.item_metadata(step)[_STATE]
            check_matches(stored.tree, wanted, where)
            arguments = ocp.args.Composite(
                **{_STATE: ocp.args.StandardRestore(wanted), _META: ocp.args.JsonRestore()}
            )
            result = manager.restore(step, args=arguments)
        except DsjaxError:
            raise
        except Exception as error:
            _hush_closed_loops()
            raise _unreadable(where, error) from error
        return from_stored(result[_STATE], like), dict(result[_META])

    def facts(self, step: int) -> dict[str, Any]:
        """What was written beside the state of a step.

        Raises:
          InputError: no such checkpoint, or an unreadable one.
        """
        where = f"checkpoint {self.directory / str(step)}"
        self._require(step)
        try:
            return dict(
                ocp.Checkpointer(ocp.JsonCheckpointHandler()).restore(self.directory / str(step) / _META)
            )
        except Exception as error:
            raise _unreadable(where, error) from error

    def _require(self, step: int) -> None:
        stored = [c.step for c in listing(self.directory)]
        if step not in stored:
            known = ", ".join(map(str, stored)) or "none"
            raise InputError(
                f"checkpoint {self.directory / str(step)} does not exist; steps stored there: {known}"
            )

    def restore_part(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
        """Some top-level parts of a saved state (their names are `like`'s keys), placed as in `like`.

        Raises:
          InputError: no such checkpoint, an unreadable one, or one of another model.
        """
        where = f"checkpoint {self.directory / str(step)}"
        wanted = {name: to_stored(tree) for name, tree in like.items()}
        handler = ocp.PyTreeCheckpointHandler()
        try:
            path = self.directory / str(step) / _STATE
            stored = ocp.Checkpointer(handler).metadata(path).item_metadata.tree
            check_matches({n: stored[n] for n in wanted if n in stored}, wanted, where)
            arguments = jax.tree.map(lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding), wanted)
            result = ocp.Checkpointer(handler).restore(
                path, args=ocp.args.PyTreeRestore(item=wanted, restore_args=arguments, partial_restore=True)
            )
        except DsjaxError:
            raise
        except Exception as error:
            _hush_closed_loops()
            raise _unreadable(where, error) from error
        return {name: from_stored(result[name], like[name]) for name in like}

    def close(self) -> None:
        """Waits for the save under way and lets go of Orbax's threads."""
        if self._manager is not None:
            self.wait()
            self._manager.close()
            self._manager = None


def state_bytes(state: Any) -> int:
    """Bytes of a (concrete or abstract) state as stored, over all devices, each array once."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in named_leaves(to_stored(state)).values())


def _unreadable(where: str, error: Exception) -> InputError:
    text = str(error).partition("\n")[0][:200]
    said = f": {text}" if "<" not in text and "NoneType" not in text else ""
    return InputError(
        f"{where} is damaged or incomplete ({type(error).__name__}{said}); remove it to go on from an earlier one"
    )


def _hush_closed_loops() -> None:
    """After a read that failed, TensorStore's other reads report to an event loop that Orbax has closed."""
    before = sys.excepthook

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        if not (kind is RuntimeError and "Event loop is closed" in str(error)):
            before(kind, error, trace)

    sys.excepthook = hook


class _disk_faults:
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


def age(written: float) -> str:
    """How long ago a Unix time was, in words."""
    seconds = max(0.0, time.time() - written)
    for limit, unit, size in [(90, "s", 1), (5400, "min", 60), (172800, "h", 3600)]:
        if seconds < limit:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds / 86400:.0f} days ago"

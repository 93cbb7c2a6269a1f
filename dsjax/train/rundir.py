"""The directory of a run: who may use it, with which config, and whether there is room."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import jax

from dsjax.config import Config, changed, dump, load
from dsjax.errors import ConfigError, InputError
from dsjax.files import write_atomically
from dsjax.observe import EventLog, environment
from dsjax.observe.logs import METRICS, read_lines


@contextlib.contextmanager
def _held(path: Path, setting: str, choice: str) -> Iterator[None]:
    """Holds a directory, made if need be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path / ".lock")
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise InputError(
            f"{setting} {path}: another run is using this directory; wait for it, or choose another {choice}"
        ) from None
    except OSError as error:
        raise InputError(
            f"{setting} {path}: cannot be written ({error.strerror}); set {setting} to a directory of yours"
        ) from None
    try:
        yield
    finally:
        lock.release()


class RunDirectory:
    """A run's directory.

    Args:
      path: where it is.
      config: the resolved config of this call.
      allow_config_change: go on although settings differ from those the run was started with.
      only: the settings that this run has, as `dump` takes them; None: all.
    """

    def __init__(self, path: str | Path, config: Config, allow_config_change: bool = False, only: Any = None):
        self.path = Path(path)
        self._config, self._only = config, only
        self._allow = allow_config_change

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the directory, and that of its checkpoints where it is another, against a second run on it.

        Raises:
          InputError: it cannot be made or written, or another run holds it.
        """
        if jax.process_index() != 0:
            yield
            return
        disk = self._config.checkpoint.disk
        with contextlib.ExitStack() as held:
            held.enter_context(_held(self.path, "run.dir", "run.name"))
            if disk.path is not None:
                held.enter_context(
                    _held(disk.directory(self.path), "checkpoint.disk.path", "checkpoint.disk.path")
                )
            yield

    @functools.cached_property
    def settings(self) -> str:
        """What a checkpoint says of the settings that it was made with."""
        return dump(self._config, self._only)

    def check_resume(self, saved_with: str | None = None) -> list[str]:
        """The settings that differ from those the run was started with, where that is allowed.

        Args:
          saved_with: `settings` of the checkpoint; they count where the directory has no config of its own
            (its checkpoints lie elsewhere, or came from an object store).

        Raises:
          ConfigError: they differ and it is not.
        """
        stored = self.path / "config.yaml"
        told = stored.read_text() if stored.exists() else saved_with
        if told is None:
            return []
        with tempfile.TemporaryDirectory() as scratch:
            # What the stored settings do not name was never a setting of this run.
            now, then = Path(scratch) / "now.yaml", Path(scratch) / "config.yaml"
            now.write_text(dump(self._config))
            then.write_text(told)
            before = load([now, then], environ={})
        differences = changed(before, self._config)
        if differences and not self._allow:
            raise ConfigError(
                [
                    f"{self.path} was started with other settings; go on with those, choose another run.name, or "
                    "pass --allow-config-change (in Python allow_config_change=True)",
                    *differences,
                ]
            )
        return differences

    def begin(self, events: EventLog, step: int, differences: list[str], **facts: Any) -> None:
        """Writes config and environment; a change of config that was allowed becomes an event."""
        if differences:
            events.event("config_changed", step, changes=differences)
        if jax.process_index() != 0:
            return
        write_atomically(self.path / "config.yaml", dump(self._config, self._only).encode())
        facts = environment() | facts
        write_atomically(self.path / "environment.json", (json.dumps(facts, indent=2) + "\n").encode())

    def owes_evaluation(self, step: int, steps: int) -> bool:
        """Whether the evaluation that was due at this step is missing: the run was stopped before it."""
        every = self._config.eval.every or steps
        if step == 0 or (step % every and step < steps):
            return False
        return not any(r.get("step") == step and "eval" in r for r in read_lines(self.path / METRICS))

    def check_space(self, place: Path, checkpoint_bytes: int) -> None:
        """Refuses to start where not even one checkpoint would fit.

        Raises:
          InputError: naming what is needed and what is free.
        """
        free = shutil.disk_usage(place).free
        if free < checkpoint_bytes:
            raise InputError(
                f"checkpoint.disk.path {place}: one checkpoint takes {checkpoint_bytes / 1e6:,.1f} MB and "
                f"{free / 1e6:,.1f} MB are free; free some space or set checkpoint.disk.path to another disk"
            )

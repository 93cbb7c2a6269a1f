"""Where checkpoints are, as they are named on the command line."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsjax.checkpoint import copies
from dsjax.checkpoint.snapshots import snapshot_directory
from dsjax.checkpoint.stored import steps_in
from dsjax.config import load
from dsjax.config.checkpoint import DiskConfig
from dsjax.errors import InputError

_OVERRIDE = re.compile(r"[A-Za-z_][\w.\-]*=")


@dataclass(frozen=True)
class Place:
    """What one name stands for.

    Attributes:
      disk: a directory of checkpoints; None: there is only a store.
      memory: the directory of the run's snapshots, if it is a run.
      urls: stores with copies.
      rules: what the run keeps on disk; keep_remote: in each store; None: it is not known.
      run: the run's directory, if it is a run.
      step: the one checkpoint that was named.
    """

    disk: Path | None = None
    memory: Path | None = None
    urls: tuple[str, ...] = ()
    rules: DiskConfig | None = None
    keep_remote: int | None = None
    run: Path | None = None
    step: int | None = None

    def __str__(self) -> str:
        return ", ".join([str(self.disk)] * (self.disk is not None) + list(self.urls))


def run_place(words: Sequence[str]) -> Place:
    """What words stand for that name one run: config files or another place, and settings (key=value)."""
    names = [word for word in words if not _OVERRIDE.match(word)]
    if not names:
        raise InputError(f"no config file, directory or URL is given, only {' '.join(words)}")
    return place(names[0], [word for word in words if word not in names], names[1:])


def place(name: str, overrides: Sequence[str], more: Sequence[str] = ()) -> Place:
    """What a config file, a run's directory, a directory of checkpoints, one checkpoint or a URL stands for.

    Args:
      overrides: settings that override those of the config.
      more: further config files that do.

    Raises:
      InputError, ConfigError: it stands for nothing.
    """
    if "://" in name:
        parent, _, last = name.rstrip("/").rpartition("/")
        one = last.isdecimal() and not parent.endswith(":/")
        return Place(urls=(parent if one else name,), step=int(last) if one else None)
    path = Path(name)
    if path.is_dir() and not (path / "config.yaml").is_file():
        whole = path.absolute()
        if whole.name.isdecimal() and int(whole.name) in steps_in(whole.parent):
            return Place(disk=path.parent, step=int(whole.name))
        if whole.name == "checkpoints" and (whole.parent / "config.yaml").is_file():
            return replace(place(str(path.parent), overrides), disk=path)
        if steps_in(path):
            return Place(disk=path)
        raise InputError(f"{path}: is not the directory of a run (it holds no config.yaml)")
    config = load([str(path / "config.yaml") if path.is_dir() else name, *more], list(overrides))
    run = path if path.is_dir() else Path(config.run.directory)
    settings = config.checkpoint
    return Place(
        disk=settings.disk.directory(run),
        memory=snapshot_directory(settings.memory, run),
        urls=tuple(settings.remote.urls),
        rules=settings.disk,
        keep_remote=settings.remote.keep,
        run=run,
    )


def checkpoints_of(run: str | Path) -> Path:
    """Where the checkpoints of a run's directory lie, by its own config if it has one."""
    stored = Path(run) / "config.yaml"
    disk = load([stored], environ={}).checkpoint.disk if stored.exists() else DiskConfig()
    return disk.directory(run)


def put_aside(checkpoint: Path, why: str) -> None:
    """Gives a checkpoint another name (STEP.why), by which nothing takes it for one, in place of what has that name."""
    to = checkpoint.with_name(f"{checkpoint.name}.{why}")
    with contextlib.suppress(OSError):
        if to.exists() and checkpoint.exists():
            shutil.rmtree(to)
        checkpoint.rename(to)


@dataclass(frozen=True)
class Reference:
    """One checkpoint: a step of a place; None: its newest."""

    place: Place
    step: int | None

    @contextlib.contextmanager
    def located(self) -> Iterator[Path]:
        """The checkpoint's directory; one that is only in a store is fetched for as long as it is used.

        Raises:
          InputError: there is no such checkpoint.
        """
        on_disk = steps_in(self.place.disk) if self.place.disk is not None else []
        step = self.step if self.step is not None else max(on_disk, default=None)
        if self.place.disk is not None and step in on_disk:
            yield self.place.disk / str(step)
            return
        for url in self.place.urls:
            held = whole_steps(url)
            if held and (step is None or step in held):
                with tempfile.TemporaryDirectory(prefix="dsjax-copy-") as scratch:
                    to = Path(scratch) / str(step if step is not None else max(held))
                    copies.fetch(copies.open_store(url), int(to.name), to, url)
                    yield to
                return
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        known = ", ".join(map(str, on_disk)) or "none"
        raise InputError(f"{self.place}: holds {what}; steps on disk: {known}")


def whole_steps(url: str) -> list[int]:
    """Steps of which a store has whole copies, oldest first.

    Raises:
      InputError: it cannot be read.
    """
    store = copies.open_store(url)
    try:
        return [step for step, whole in copies.stored_steps(store).items() if whole]
    except Exception as error:
        raise InputError(
            f"{url}: cannot be read ({copies.reason(error)}); check the URL, the network and the credentials"
        ) from error


def references(words: Sequence[str]) -> list[Reference]:
    """The checkpoints that words name: each a place, then any number of steps of it; key=value are settings.

    ``runs/a 400 500 runs/b`` names two of runs/a and the newest of runs/b.

    Raises:
      InputError, ConfigError: a word that stands for nothing.
    """
    overrides = [word for word in words if _OVERRIDE.match(word)]
    found: list[Reference] = []
    names = [word for word in words if word not in overrides]
    at: Place | None = None
    for i, word in enumerate(names):
        if word.isdecimal():
            if at is None:
                raise InputError(f"{word}: of which run? Name a config, a directory or a URL before the step")
            found.append(Reference(at, int(word)))
        else:
            at = place(word, overrides)
            if i + 1 == len(names) or not names[i + 1].isdecimal():
                found.append(Reference(at, at.step))
    return found

"""Which files a run reads: the sources that the config names, resolved to a fixed list of files.

The order of a source's files (and with it the order of its documents and the ids of its examples)
follows the order of the paths given and, inside a directory or glob, the relative names; it does
not depend on where the files lie.
"""

from __future__ import annotations

import glob
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsjax.config.schema import DataConfig, EvalConfig
from dsjax.errors import ConfigError, InputError

STDLIB = "stdlib:"
SUFFIXES = {
    "text": (),
    "jsonl": (".jsonl", ".ndjson"),
    "chat": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "arrayrecord": (".arrayrecord", ".array_record"),
}
"""What a directory is searched for; text takes every file that is not hidden."""
MANIFEST = "dataset.json"
"""The file that marks a directory as a finished built data set."""
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Source:
    """Documents of one kind from a list of paths.

    `setting` is the config key that named the paths, for messages; `built` says that the one path
    is a directory that was tokenised before.
    """

    name: str
    kind: str
    paths: tuple[str, ...]
    field: str
    setting: str
    weight: float = 1.0

    @property
    def of_evaluation(self) -> bool:
        return self.setting.startswith("eval.sets.")

    @property
    def built(self) -> Path | None:
        if self.kind != "arrayrecord" or len(self.paths) != 1:
            return None
        directory = Path(os.path.expanduser(self.paths[0]))
        return directory if (directory / MANIFEST).is_file() else None


@dataclass(frozen=True)
class InputFile:
    """A file to read: where it is, its name within the source, its size and when it changed."""

    path: str
    name: str
    size: int
    mtime_ns: int


def training_sources(data: DataConfig) -> list[Source]:
    """The sources that training draws from; none for synthetic data.

    Raises ConfigError where two sources of a mixture have one name (ids could not tell them apart).
    """
    if data.kind == "synthetic" and not data.mixture:
        return []
    if data.paths:
        return [Source("data", data.kind, tuple(data.paths), _field(data.field, data.kind), "data.paths")]
    sources = []
    for position, entry in enumerate(data.mixture):
        kind = entry.kind or data.kind
        name = entry.name or entry.paths[0]
        field = _field(entry.field or data.field, kind)
        setting = f"data.mixture[{position}].paths"
        sources.append(Source(name, kind, tuple(entry.paths), field, setting, entry.weight))
    names = [source.name for source in sources]
    for position, name in enumerate(names):
        if name in names[:position]:
            raise ConfigError(
                f"data.mixture[{position}]: a source named {name} comes before it; give each its own name"
            )
    return sources


def evaluation_sources(data: DataConfig, evaluation: EvalConfig) -> list[Source]:
    """The named evaluation sets, one source each.

    Raises ConfigError for a set whose kind nothing tells.
    """
    sources = []
    for name, entry in evaluation.sets.items():
        kind = entry.kind or data.kind
        if kind == "synthetic":
            raise ConfigError(
                f"eval.sets.{name}: data.kind is synthetic; say of which kind the set's files are"
            )
        field = _field(entry.field or data.field, kind)
        sources.append(Source(name, kind, tuple(entry.paths), field, f"eval.sets.{name}"))
    return sources


def list_files(source: Source) -> list[InputFile]:
    """The files of `source`, each once, in their fixed order.

    Raises InputError, a line a path that is missing, is no regular file or matches nothing.
    """
    found: list[list[tuple[str, str]]] = []
    faults: list[str] = []
    for path in source.paths:
        try:
            found.append(list(_expand(path, source.kind)))
        except InputError as error:
            faults += [f"{source.setting}: {line}" for line in error.faults]
        except OSError as error:
            faults.append(f"{source.setting}: cannot read {path} ({error.strerror})")
    if faults:
        raise InputError(faults)
    counts = Counter(name for group in found for _, name in group)
    files: list[InputFile] = []
    seen: set[str] = set()
    for position, group in enumerate(found):
        for path, name in group:
            real = os.path.realpath(path)
            if real in seen:
                continue
            seen.add(real)
            unique = name if counts[name] == 1 else f"{position}/{name}"
            files.append(_describe(source, path, unique))
    return files


def _field(field: str | None, kind: str) -> str:
    return field or ("messages" if kind == "chat" else "text")


def _describe(source: Source, path: str, name: str) -> InputFile:
    try:
        status = os.stat(path)
    except OSError as error:
        raise InputError(f"{source.setting}: cannot read {path} ({error.strerror})") from None
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{source.setting}: {path} is not a regular file")
    return InputFile(path, name, status.st_size, status.st_mtime_ns)


def _expand(path: str, kind: str) -> Iterator[tuple[str, str]]:
    """(path, name) of every file that one entry of `paths` stands for."""
    if path == STDLIB:
        yield from _standard_library(kind)
        return
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        yield from _directory(path, kind)
    elif os.path.exists(path):
        yield path, os.path.basename(path)
    elif glob.has_magic(path):
        matches = sorted(match for match in glob.glob(path, recursive=True) if not os.path.isdir(match))
        if not matches:
            raise InputError(f"no file matches {path}")
        root = _root_of(path)
        for match in matches:
            yield match, Path(os.path.relpath(match, root)).as_posix()
    else:
        raise InputError(f"{path} does not exist")


def _root_of(pattern: str) -> str:
    """The longest leading directory of `pattern` without a wildcard."""
    root = os.path.dirname(pattern)
    while glob.has_magic(root):
        root = os.path.dirname(root)
    return root or "."


def _directory(path: str, kind: str) -> Iterator[tuple[str, str]]:
    suffixes = SUFFIXES[kind]
    names = []
    for folder, subfolders, files in os.walk(path, onerror=_raise):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in files:
            if name.startswith(".") or (suffixes and not name.endswith(suffixes)):
                continue
            full = os.path.join(folder, name)
            if os.path.isfile(full):
                names.append((Path(os.path.relpath(full, path)).as_posix(), full))
    if not names:
        raise InputError(f"directory {path} holds no {' or '.join(suffixes) or 'visible'} file")
    for name, full in sorted(names):
        yield full, name


def _raise(error: OSError) -> None:
    raise error


def _standard_library(kind: str) -> Iterator[tuple[str, str]]:
    """The library's own modules: no installed packages, no test suites (distributions differ in
    shipping those, and some of their files are broken on purpose)."""
    if kind != "text":
        raise InputError(f"{STDLIB} is text, and the kind is {kind}; set data.kind to text")
    root = sysconfig.get_paths()["stdlib"]
    names = []
    for folder, subfolders, files in os.walk(root, onerror=_raise):
        subfolders[:] = [name for name in subfolders if name not in _NOT_STDLIB]
        for name in files:
            if name.endswith(".py"):
                full = os.path.join(folder, name)
                names.append((Path(os.path.relpath(full, root)).as_posix(), full))
    if not names:
        raise InputError(f"{STDLIB}: this Python keeps no library source in {root}")
    for name, full in sorted(names):
        yield full, name

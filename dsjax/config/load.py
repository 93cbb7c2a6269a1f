"""From files, environment variables and the command line to one checked Config, and back to text.

Precedence: ``key=value`` of the command line, then ``DSJAX_SECTION__KEY`` variables, then later
files, then earlier files, then defaults.  Mappings merge key by key; everything else, lists
included, replaces what came before.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from dsjax.config.messages import faults_of, nearest, section_of, walk
from dsjax.config.parallel import MESH_ALIASES, MeshConfig
from dsjax.config.schema import Config
from dsjax.config.yaml_core import (
    MAX_DEPTH,
    Leaf,
    Tree,
    YamlFault,
    dump_values,
    one_line,
    parse,
    shorten,
    show,
)
from dsjax.errors import ConfigError

MAX_FILE_BYTES = 4 << 20
MAX_FAULTS = 20  # more are counted, not told
_OVERRIDE_KEY = re.compile(r"[A-Za-z_][\w\-]*(\.[\w\-]+)*")
_ENV_KEY = re.compile(r"DSJAX_([A-Za-z0-9]\w*?)__(\w+)")


def load(
    files: Sequence[str | Path],
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The config that `files`, then the environment, then `overrides` (``key=value``) describe.

    A run's directory stands for the config.yaml in it.
    `environ` is os.environ where it is None.  Raises ConfigError with every fault found, one
    line each.
    """
    faults: list[str] = []
    tree: Tree = {}
    for source in files:
        _merge(tree, _file(Path(source), faults))
    for name, value in sorted((os.environ if environ is None else environ).items()):
        found = _ENV_KEY.fullmatch(name)
        if found:
            keys = [found[1].lower(), *found[2].lower().split("__")]
            _merge(tree, _assigned(keys, value, name, faults))
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not _OVERRIDE_KEY.fullmatch(key):
            faults.append(f"{shorten(override)}: an override is written section.key=value")
            continue
        _merge(tree, _assigned(key.split("."), value, "", faults))
    return _checked(tree, faults)


def dump(config: Config, only: Mapping[str, Any] | None = None) -> str:
    """YAML text of every setting, which `load` reads back as an equal Config.

    Args:
      only: section -> True, or the set of its keys, to write no more than these; defaults stand for the rest.
    """
    return dump_values(config.model_dump(include=None if only is None else dict(only)))


def from_dict(values: Mapping[str, Any]) -> Config:
    """The config with these values (sections as mappings); raises ConfigError as `load` does."""
    faults: list[str] = []
    return _checked(_normal(_tree(values), "", faults), faults)


def _tree(values: Mapping[str, Any]) -> Tree:
    return {
        key: _tree(value) if isinstance(value, Mapping) and value else Leaf(value, show(value), "")
        for key, value in values.items()
    }


def _checked(tree: Tree, faults: list[str]) -> Config:
    """The Config that `tree` describes; raises ConfigError with `faults` and all it finds."""
    try:
        config = Config.model_validate(_plain(tree))
    except ValidationError as error:
        # Where a source could not be read, what depends on keys it may have set is not judged.
        faults = faults + faults_of(error, tree, whole=not faults)
    if faults:
        told = [one_line(fault) for fault in faults[:MAX_FAULTS]]
        if len(faults) > MAX_FAULTS:
            told.append(f"and {len(faults) - MAX_FAULTS} more faults")
        raise ConfigError(told)
    return config


def _file(path: Path, faults: list[str]) -> Tree:
    """The tree of one file; what is wrong with it is added to `faults`."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        faults.append(f"{path}: no such file{_meant(path)}")
        return {}
    except IsADirectoryError:
        inside = path / "config.yaml"
        if inside.is_file():
            # A run, wherever it lies now.
            stored = _file(inside, faults)
            _merge(stored, _assigned(["run", "dir"], str(path), "", faults))
            return stored
        saved = (path / "config.json").is_file()
        hint = f"; it is a saved model: dsjax hf import {path} RUN makes a run of it" if saved else ""
        faults.append(f"{path}: is a directory without a config.yaml{hint}")
        return {}
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        faults.append(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})")
        return {}
    if len(content) > MAX_FILE_BYTES:
        faults.append(f"{path}: is larger than {MAX_FILE_BYTES >> 20} MiB, which no config is")
        return {}
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        faults.append(f"{path}:{line}: is not UTF-8 text (byte 0x{content[error.start]:02x})")
        return {}
    try:
        tree = parse(text, lambda line: f"{path}:{line}")
    except YamlFault as fault:
        place = f"{path}:{fault.line}" if fault.line else str(path)
        faults.append(f"{place}: is not a config in YAML: {fault}")
        return {}
    if tree is None:
        return {}
    if isinstance(tree, Leaf):
        if tree.value not in (None, {}):
            faults.append(f"{tree.where}: a config is a mapping of sections, got {tree.shown}")
        return {}
    return _normal(tree, f"{path}: ", faults)


def _meant(path: Path) -> str:
    """What a file that is not there may have been meant to be."""
    name = str(path)
    if any(name == key for key, _ in walk()):
        return f"; an override is written {name}=value"
    try:
        beside = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    except OSError:
        return ""
    close = nearest(path.name, beside) or nearest(f"{path.name}.yaml", beside)
    return f"; did you mean {path.parent / close}?" if close else ""


def _assigned(keys: Sequence[str], text: str, variable: str, faults: list[str]) -> Tree:
    """The tree of one ``key=value``; `variable` is the environment variable it stood in, if any."""
    key = ".".join(keys)
    if len(keys) > MAX_DEPTH:
        faults.append(f"{shorten(key)}: has more than {MAX_DEPTH} parts")
        return {}
    try:
        value = parse(text, lambda line: variable)
    except YamlFault as fault:
        source = f" [{variable}]" if variable else ""
        faults.append(
            f"{key}: cannot read {text!r} as a value ({fault}); text with special characters "
            f"stands in quotes: '{key}=\"{text}\"'{source}"
        )
        return {}
    if value is None or (isinstance(value, Leaf) and value.value is None):
        value = Leaf(None, one_line(text.strip()) or "nothing", variable)
    tree: Tree | Leaf = value
    for part in reversed(keys):
        tree = {part: tree}
    assert isinstance(tree, dict)
    return _normal(tree, f"{variable}: " if variable else "", faults)


def _normal(tree: Tree, source: str, faults: list[str], section: type[BaseModel] = Config) -> Tree:
    """`tree` with mesh axes by their full names and without sections that hold nothing."""
    normal: Tree = {}
    for key, value in tree.items():
        name = MESH_ALIASES.get(key, key) if section is MeshConfig else key
        if name in normal:
            faults.append(f"{source}mesh.{name}: is given twice, once by its short name")
        field = section.model_fields.get(name)
        inner = section_of(field.annotation) if field else None
        if inner is not None:
            if isinstance(value, dict):
                value = _normal(value, source, faults, inner)
            elif value.value in (None, {}):
                continue
        normal[name] = value
    return normal


def _merge(into: Tree, tree: Tree) -> None:
    for key, value in tree.items():
        below = into.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            _merge(below, value)
        else:
            into[key] = _copy(value) if isinstance(value, dict) else value


def _copy(tree: Tree) -> Tree:
    return {key: _copy(value) if isinstance(value, dict) else value for key, value in tree.items()}


def _plain(tree: Tree) -> dict[str, Any]:
    return {key: _plain(value) if isinstance(value, dict) else value.value for key, value in tree.items()}

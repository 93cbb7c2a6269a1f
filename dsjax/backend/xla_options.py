"""XLA options that were measured to be good, a file a kind of chip, checked before they are used.

They are given to each compile (`compiler_options`), never written into the environment.  A name that
this jaxlib does not know is left out and said so; what the user set wins.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from dsjax.config.yaml_core import Leaf, parse
from dsjax.errors import ConfigError

_PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}


@dataclass(frozen=True)
class Preset:
    """One file of `presets/`.

    Attributes:
      name: of the file: a platform, or a chip.
      version: goes up whenever an option changes.
      devices: jax's names (`device_kind`) of the chips that it is for; none: all others of the platform.
      options: name -> value; reasons: name -> why, a line each.
      older: of options that had another name before: name -> that name and its value.
      uncut: of options that are for some meshes only: name -> the axes that must have one device.
    """

    name: str
    version: int
    devices: tuple[str, ...]
    options: Mapping[str, Any]
    reasons: Mapping[str, str]
    older: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    uncut: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}, version {self.version}"


@dataclass(frozen=True)
class Chosen:
    """Options for `compiler_options`.

    Attributes:
      notes: for the user, on what of the preset was left out and why.
      preset: the name and version of the preset; None where the platform has none.
    """

    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    preset: str | None = None


@cache
def presets() -> Mapping[str, Preset]:
    """All presets by name: what they extend filled in, what is for other versions of jax left out."""
    folder = files("dsjax.backend").joinpath("presets")
    trees = {
        file.name.removesuffix(".yaml"): _plain(parse(file.read_text(encoding="utf-8"), lambda line: ""))
        for file in folder.iterdir()
        if file.name.endswith(".yaml")
    }
    return {name: _preset(name, trees) for name in sorted(trees)}


def _plain(tree: Any) -> Any:
    return tree.value if isinstance(tree, Leaf) else {key: _plain(value) for key, value in tree.items()}


def _preset(name: str, trees: Mapping[str, Any]) -> Preset:
    tree = trees[name]
    base = _preset(tree["extends"], trees) if "extends" in tree else None
    version = Version(importlib.metadata.version("jax"))
    own = {
        key: entry
        for key, entry in tree["options"].items()
        if SpecifierSet(entry.get("jax", "")).contains(version, prereleases=True)
    }
    older = {key: next(iter(entry["before"].items())) for key, entry in own.items() if "before" in entry}
    return Preset(
        name=name,
        version=tree["version"],
        devices=tuple(tree.get("devices", ())),
        options={**(base.options if base else {}), **{key: entry["value"] for key, entry in own.items()}},
        reasons={**(base.reasons if base else {}), **{key: entry["why"] for key, entry in own.items()}},
        older={**(base.older if base else {}), **older},
        uncut={
            **(base.uncut if base else {}),
            **{key: tuple(entry["uncut"]) for key, entry in own.items() if "uncut" in entry},
        },
    )


def preset_for(platform: str, device_kind: str = "") -> Preset | None:
    """The preset of a chip, or of its platform where the chip has none; None where neither has.

    Args:
      platform: cpu, gpu (also cuda, rocm) or tpu.
      device_kind: the chip as jax names it, "NVIDIA H100 80GB HBM3".
    """
    known = presets()
    own = next((preset for preset in known.values() if device_kind in preset.devices), None)
    return own or known.get(_PLATFORMS.get(platform, platform))


def choose(
    platform: str,
    environ: Mapping[str, str] | None = None,
    *,
    device: Any = None,
    own: Mapping[str, Any] | None = None,
    mesh: Mapping[str, int] | None = None,
) -> Chosen:
    """The preset of a device, less what this jaxlib does not take and what the user set.

    Args:
      platform: cpu, gpu (also cuda, rocm) or tpu.
      environ: where XLA_FLAGS stands; the process's environment by default.
      device: whose chip's preset is taken, and that the options are checked for, here or not; by default
        the first of all devices of the platform in the run.
      own: the user's options, which win and must be right.
      mesh: axis -> size, where it is known: some options are not for every layout.

    Raises:
      ConfigError: one of the user's own that this jaxlib does not take, a line each.
    """
    own = dict(own or {})
    _refuse(own, device)
    preset = preset_for(platform, _first_kind(platform) if device is None else device.device_kind)
    if preset is None:
        return Chosen(own)
    flags = _users_flags((os.environ if environ is None else environ).get("XLA_FLAGS", ""))
    notes, wanted = [], {}
    for name, value in preset.options.items():
        names = [name, *preset.older.get(name, ())[:1]]
        given = next((n for n in names if n in own), None)
        flag = next((n for n in names if n in flags), None)
        if given:
            notes.append(f"XLA: {given}={_text(own[given])} as given, not the preset's {_text(value)}")
        elif flag:
            notes.append(f"XLA: {flag}={flags[flag]} from XLA_FLAGS, not the preset's {_text(value)}")
        elif cut := [a for a in preset.uncut.get(name, ()) if (mesh or {}).get(a, 1) > 1]:
            notes.append(f"XLA: {name} is not for meshes with {' and '.join(cut)}")
        else:
            wanted[name] = value
    options, unknown = _known(wanted, preset.older, device)
    if unknown:
        notes.append(f"XLA: left out, as this jaxlib does not take it: {', '.join(unknown)}")
    return Chosen({**options, **own}, notes, str(preset))


def _known(
    wanted: Mapping[str, Any], older: Mapping[str, tuple[str, Any]], device: Any
) -> tuple[dict[str, Any], list[str]]:
    """The options under the names that this jaxlib takes, and the names of those that it does not take at all."""
    former = dict(older.get(name, (name, value)) for name, value in wanted.items())
    for options in (wanted, former):
        if not _refused(tuple(options.items()), device):
            return dict(options), []
    unknown = unknown_options(wanted, device)
    options = {name: value for name, value in wanted.items() if name not in unknown}
    before = dict(older[name] for name in unknown if name in older)
    still = unknown_options(before, device)
    options |= {name: value for name, value in before.items() if name not in still}
    return options, [name for name in unknown if name not in older or older[name][0] in still]


def _refuse(own: Mapping[str, Any], device: Any) -> None:
    unknown = unknown_options(own, device)
    if unknown:
        raise ConfigError(
            f"{name}: this jaxlib does not take it as an XLA option ({own[name]!r})" for name in unknown
        )


def _first_kind(platform: str) -> str:
    """The same in every process of a run, whose programs must be equal."""
    import jax

    try:
        return str(jax.devices(platform)[0].device_kind)
    except RuntimeError:  # no such platform here
        return ""


def _users_flags(text: str) -> dict[str, str]:
    flags = {}
    for word in shlex.split(text):
        name, _, value = word.lstrip("-").partition("=")
        flags[name] = value or "true"
    return flags


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def unknown_options(options: Mapping[str, Any], device: Any = None) -> list[str]:
    """The names among options that this jaxlib does not take, or not with these values.

    Args:
      device: that they are for, here or not; jax's default device where it is None.
    """
    if not options or not _refused(tuple(options.items()), device):
        return []
    return [name for name, value in options.items() if _refused(((name, value),), device)]


@cache
def _refused(options: tuple[tuple[str, Any], ...], device: Any) -> bool:
    """Whether a nothing does not compile with these options.

    An unknown name in XLA_FLAGS ends the process; one in `compiler_options` only raises.
    """
    import jax
    from jax.sharding import SingleDeviceSharding

    sharding = None if device is None else SingleDeviceSharding(device)
    nothing = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), "float32", sharding=sharding))
    try:
        with kept_out_of_the_cache():
            nothing.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError:
        return True
    return False


@contextlib.contextmanager
def kept_out_of_the_cache() -> Iterator[None]:
    """Keeps what is compiled out of jax's cache on disk, which cannot give back a program without its device."""
    import jax

    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)

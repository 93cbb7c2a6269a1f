"""What was measured on a kind of device: it takes the place of the cost model's assumptions.

A file a kind of device, in the user's data directory or in DSJAX_MEASURED_DIR.  It holds the shares of
the chip table's peaks that large operations reached, and how long whole steps took against the model.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import re
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import platformdirs
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dsjax.aot import Chip, Target
from dsjax.aot.chips import Dtype
from dsjax.errors import InputError
from dsjax.files import write_atomically
from dsjax.plan.cost import Reached
from dsjax.plan.result import Forecast
from dsjax.plan.words import RESOURCES

DIRECTORY = "DSJAX_MEASURED_DIR"
# Above 1 where the table's peak is not what runs: fp32 products are TF32 on NVIDIA chips unless told otherwise.
Share = Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)]
# A step that takes so many times as long as predicted, or as short, is another step than the one that was planned.
MOST = 100.0
Count = Annotated[int, Field(gt=0)]
_TPUS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite"}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Shares(_Section):
    """Shares of the chip table's peaks that large operations reached.

    Attributes:
      products: type in which they run (`Chip.unit`) -> share; memory: of copies; node, network: of rings over
        the links.
      how: what was run; count: how many times; date: ISO 8601, UTC; jax: its version.
    """

    products: dict[Dtype, Share] = {}
    memory: Share | None = None
    node: Share | None = None
    network: Share | None = None
    how: str
    count: Count
    date: str
    jax: str


class Steps(_Section):
    """Whole steps: the geometric mean of their seconds over the model's, and how many were measured."""

    ratio: Annotated[float, Field(ge=1 / MOST, le=MOST)]
    count: Count
    date: str
    jax: str


class Measured(_Section):
    """All that is known of a kind of device, named as jax does (`device_kind`)."""

    version: Literal[1] = 1
    device_kind: str
    shares: Shares | None = None
    steps: Steps | None = None

    def reached(self) -> Reached:
        """The cost model's shares, the measured ones in the place of its own."""
        default, shares = Reached(), self.shares
        step = self.steps.ratio if self.steps else 1.0
        if shares is None:
            return Reached(step=step)
        return Reached(
            memory=shares.memory or default.memory,
            links=shares.node or default.links,
            network=shares.network or default.network,
            by_type={str(name): share for name, share in shares.products.items()},
            step=step,
        )

    def note(self) -> str:
        """What a plan says of it."""
        told = []
        if self.shares:
            others = self.shares.model_dump(include={"memory", "node", "network"})
            shares = [*self.shares.products.items(), *others.items()]
            listed = ", ".join(f"{RESOURCES.get(name, name)} {share:.0%}" for name, share in shares if share)
            told.append(
                f"shares of the peaks, in the place of the formula's: {listed} ({self.shares.date}, "
                f"jax {self.shares.jax})"
            )
        if self.steps:
            told.append(
                f"steps {self.steps.ratio:.2f} times as long as the model's ({self.steps.count} measured, the last "
                f"on {self.steps.date}, jax {self.steps.jax})"
            )
        return f"times corrected by measurements of {self.device_kind}: {'; '.join(told)}"


@dataclass(frozen=True)
class Correction:
    """Shares for the cost model, and what a plan has to say of them."""

    reached: Reached = field(default_factory=Reached)
    notes: tuple[str, ...] = ()


_given: ContextVar[Measured | None] = ContextVar("measured", default=None)


@contextlib.contextmanager
def using(measured: Measured) -> Iterator[None]:
    """Within it, plans for this kind of device take these measurements, not those on disk."""
    token = _given.set(measured)
    try:
        yield
    finally:
        _given.reset(token)


def correction(target: Target, directory: str | Path | None = None) -> Correction:
    """What was measured on the target's kind of device; the model's own shares where nothing was.

    A file that cannot be used is left out, and the notes say so.
    """
    kind = device_kind(target.chip)
    given = _given.get()
    if given is not None and given.device_kind == kind:
        return Correction(given.reached(), (given.note(),))
    try:
        found = load(kind, directory)
    except InputError as error:
        return Correction(notes=(f"measured times are left out: {error}",))
    if found is None or not (found.shares or found.steps):
        return Correction()
    return Correction(found.reached(), (found.note(),))


def device_kind(chip: Chip) -> str:
    """A chip as jax names it where it is at hand."""
    return chip.xla.description if chip.xla else _TPUS.get(chip.name, chip.name)


def path_of(device_kind: str, directory: str | Path | None = None) -> Path:
    """The file of a kind of device.

    Args:
      directory: of all such files; DSJAX_MEASURED_DIR or the user's data directory by default.
    """
    if directory is None:
        directory = os.environ.get(DIRECTORY) or Path(platformdirs.user_data_dir("dsjax")) / "measured"
    return Path(directory).expanduser() / f"{re.sub(r'[^a-z0-9]+', '-', device_kind.lower()).strip('-')}.json"


def load(device_kind: str, directory: str | Path | None = None) -> Measured | None:
    """What is known of a kind of device; None where nothing is.

    Raises:
      InputError: the file cannot be read, or is not what `save` writes.
    """
    path = path_of(device_kind, directory)
    try:
        changed = path.stat().st_mtime_ns
        return _read(path, device_kind, changed)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


@lru_cache(maxsize=32)
def _read(path: Path, device_kind: str, changed: int) -> Measured:
    """A search asks for every layout; the file is read again when it has changed."""
    try:
        found = Measured.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(
            f"{path}: holds no measurements that can be used ({where + ': ' if where else ''}{first['msg']}); "
            "remove it or measure again"
        ) from None
    if found.device_kind != device_kind:
        raise InputError(f"{path}: is of {found.device_kind}, not of {device_kind}; remove it")
    return found


def save(measured: Measured, directory: str | Path | None = None) -> Path:
    """Writes the file of a kind of device, whole or not at all.

    Raises:
      InputError: it cannot be written.
    """
    path = path_of(measured.device_kind, directory)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, measured.model_dump_json(indent=1).encode() + b"\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None
    return path


def record_shares(device_kind: str, shares: Shares, directory: str | Path | None = None) -> Measured:
    """Keeps measured shares in the place of older ones.

    What steps took against older shares says nothing of the new ones and is dropped.

    Raises:
      InputError: the file cannot be written.
    """
    found = Measured(device_kind=device_kind, shares=shares)
    save(found, directory)
    return found


def record_step(
    device_kind: str, forecast: Forecast, seconds: float, directory: str | Path | None = None
) -> Measured:
    """Adds a measured step to the mean of what steps take against the model.

    Args:
      forecast: of that step, by a plan for this kind of device, corrected or not.
      seconds: that it took, its input waiting and its first compile left out.

    Raises:
      InputError: the file that is there cannot be used, or not be written.
      ValueError: seconds that are none, or a hundred times from those predicted.
    """
    import jax

    if not (seconds > 0 and math.isfinite(seconds) and forecast.step_seconds > 0):
        raise ValueError(
            f"a step takes more than 0 seconds: got {seconds}, predicted {forecast.step_seconds}"
        )
    ratio = seconds * forecast.ratio / forecast.step_seconds
    if not 1 / MOST <= ratio <= MOST:
        raise ValueError(
            f"{seconds:g} s for a step that was predicted at {forecast.step_seconds:g} s: is it the same step?"
        )
    found = load(device_kind, directory) or Measured(device_kind=device_kind)
    count, mean = (found.steps.count, math.log(found.steps.ratio)) if found.steps else (0, 0.0)
    latest = math.log(ratio)
    steps = Steps(
        ratio=math.exp((count * mean + latest) / (count + 1)),
        count=count + 1,
        date=today(),
        jax=jax.__version__,
    )
    found = found.model_copy(update={"steps": steps})
    save(found, directory)
    return found


def today() -> str:
    """The date as measurements carry it: ISO 8601, UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()

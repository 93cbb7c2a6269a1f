"""Settings of the `checkpoint` section: what is saved, when, and in which tier."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from dsjax.config.fields import (
    NonEmpty,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Takes,
    described,
    one_or_many,
)

_URL = re.compile(r"^[a-z][a-z0-9+.-]*://.+")


def _urls(values: list[str]) -> list[str]:
    for value in values:
        if not _URL.match(value):
            raise ValueError(f"takes URLs such as s3://bucket/path, got {value!r}")
    if len(set(values)) < len(values):
        raise ValueError("one is given twice")
    return values


class MemoryConfig(Section):
    """Snapshots in the host's memory, which outlive the process that made them."""

    every: NonNegativeInt | None = described(
        None, "Snapshot every N steps; 0: never; null: every 10 under dsjax launch, else never."
    )
    keep: PositiveInt = described(2, "Keep the newest N; one more is being written.")
    budget_gib: PositiveFloat | None = described(
        None, "Most that all snapshots of this host may take, GiB; null: half of what is free there."
    )
    path: str | None = described(
        None, "Directory on a memory file system. Default: a directory of this run in /dev/shm."
    )
    buddy: bool = described(
        True, "Send each host's snapshots to another host too, so that a lost host loses nothing."
    )


class DiskConfig(Section):
    """Checkpoints on disk."""

    every: NonNegativeInt = described(500, "Save every N steps, and at the end; 0: not by steps.")
    every_minutes: PositiveFloat | None = described(None, "Save too when so many minutes have passed.")
    keep: PositiveInt = described(3, "Keep the newest N.")
    keep_every: NonNegativeInt = described(0, "Keep for ever those whose step is a multiple of N; 0: none.")
    keep_best: NonNegativeInt = described(0, "Keep the N with the lowest best_metric, too.")
    best_metric: Annotated[str, Field(pattern=r"^[^.]+\.[^.]+$"), Takes("SET.METRIC (heldout.loss, say)")] = (
        described("heldout.loss", "SET.METRIC of an evaluation; the lowest is best.")
    )
    compression: Literal["none", "zstd"] = described(
        "none", "zstd: a little smaller and several times slower than none."
    )
    retries: NonNegativeInt = described(2, "Try a failed save again so often before the run ends.")
    path: str | None = described(None, "Directory. Default: checkpoints in the run directory.")

    def directory(self, run: str | Path) -> Path:
        """Where the checkpoints of a run's directory lie."""
        return Path(self.path or Path(run) / "checkpoints")


class RemoteConfig(Section):
    """Copies of the checkpoints on disk in object stores (extra: remote)."""

    urls: Annotated[
        list[NonEmpty],
        BeforeValidator(one_or_many),
        AfterValidator(_urls),
        Takes("a URL or a list of them (s3://bucket/path, gs://bucket/path, file:///path)"),
    ] = described([], "Where to copy to; each holds all of a checkpoint (another region, say).")
    every_minutes: PositiveFloat = described(
        60.0, "Copy the newest checkpoint on disk when so many minutes have passed since the last copy."
    )
    keep: PositiveInt = described(3, "Keep the newest N in each.")
    bandwidth_mb: PositiveFloat | None = described(
        None, "Most that a process sends to each, MB a second; null: no limit."
    )


class CheckpointConfig(Section):
    """What is saved, when and where."""

    memory: MemoryConfig = Field(default_factory=MemoryConfig, description="Snapshots in the host's memory.")
    disk: DiskConfig = Field(default_factory=DiskConfig, description="Checkpoints on disk.")
    remote: RemoteConfig = Field(default_factory=RemoteConfig, description="Copies in object stores.")

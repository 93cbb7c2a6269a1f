"""Processes of one run must have been given the same settings, or each computes something else."""

from __future__ import annotations

from typing import Any

from dsjax.config import Config, differences
from dsjax.errors import ConfigError
from dsjax.faults import VARIABLE
from dsjax.processes import gather

# These may differ from host to host: what a process runs on and whom it tells.
_OWN: Any = {"runtime": True, "observe": True, "checkpoint": {"memory": {"path"}}}


def require_same_settings(config: Config, faults: list[str]) -> None:
    """Compares the processes' settings; every process gets to know of a difference.

    Args:
      faults: of numbers, that are asked for: they are part of the program.

    Raises:
      ConfigError: a line a setting, naming the ranks that differ from rank 0.
    """
    texts, asked = zip(*gather((config.model_dump_json(exclude=_OWN), faults)), strict=True)
    if any(one != asked[0] for one in asked):
        raise ConfigError(
            f"{VARIABLE}: faults of numbers are part of the program; give all processes the same"
        )
    if len(set(texts)) == 1:
        return
    first = Config.model_validate_json(texts[0])
    found = []
    for rank, text in enumerate(texts):
        for key, here, there in differences(first, Config.model_validate_json(text)):
            found.append(
                f"{key}: rank 0 has {here!r} and rank {rank} has {there!r}; give all processes the same"
            )
    raise ConfigError(found)

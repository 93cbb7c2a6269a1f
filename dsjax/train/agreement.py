"""Processes of one run must have been given the same settings, or each computes something else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from dsjax.config import Config, differences
from dsjax.errors import ConfigError

# These may differ from host to host: what a process runs on and whom it tells.
_OWN: Any = {"runtime": True, "observe": True, "checkpoint": {"memory": {"path"}}}


def everywhere(held: bool) -> bool:
    """Whether something holds on every process; all of them call this together."""
    return (
        held if jax.process_count() == 1 else bool(np.all(multihost_utils.process_allgather(np.int32(held))))
    )


def of_process_0(numbers: Sequence[int]) -> list[int]:
    """Process 0's list of numbers; all of them call this together."""
    if jax.process_count() == 1:
        return list(numbers)
    mine = np.asarray(numbers, np.int64)
    count = int(multihost_utils.broadcast_one_to_all(np.int64(mine.size)))
    padded = mine if jax.process_index() == 0 else np.zeros(count, np.int64)
    return [int(n) for n in multihost_utils.broadcast_one_to_all(padded)]


def require_same_settings(config: Config) -> None:
    """Compares the processes' settings; every process gets to know of a difference.

    Raises:
      ConfigError: a line a setting, naming the ranks that differ from rank 0.
    """
    if jax.process_count() == 1:
        return
    told = np.frombuffer(config.model_dump_json(exclude=_OWN).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(told.size)).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: told.size] = told
    texts = [
        bytes(row[:size]).decode()
        for row, size in zip(multihost_utils.process_allgather(padded), sizes, strict=True)
    ]
    if len(set(texts)) == 1:
        return
    first = Config.model_validate_json(texts[0])
    faults = []
    for rank, text in enumerate(texts):
        for key, here, there in differences(first, Config.model_validate_json(text)):
            faults.append(
                f"{key}: rank 0 has {here!r} and rank {rank} has {there!r}; give all processes the same"
            )
    raise ConfigError(faults)

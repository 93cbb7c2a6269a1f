"""Processes of one run must have been given the same settings, or each computes something else."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils

from dsjax.config import Config, differences
from dsjax.errors import ConfigError

# These may differ from host to host: what a process runs on and whom it tells.
_OWN = ("runtime", "observe")


def require_same_settings(config: Config) -> None:
    """Compares the processes' settings; every process gets to know of a difference.

    Raises:
      ConfigError: a line a setting, naming the ranks that differ from rank 0.
    """
    if jax.process_count() == 1:
        return
    told = np.frombuffer(config.model_dump_json(exclude=set(_OWN)).encode(), np.uint8)
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

"""What the processes of a job tell each other, all at once: every call here is made by all of them together."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from dsjax.errors import Damaged, DsjaxError

Result = TypeVar("Result")


def gather(message: Any) -> list[Any]:
    """Every process's message (plain JSON), by rank."""
    if jax.process_count() == 1:
        return [message]
    data = zlib.compress(json.dumps(message, separators=(",", ":")).encode(), 1)
    sizes = multihost_utils.process_allgather(np.int32(len(data))).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(zlib.decompress(row[:size].tobytes())) for row, size in zip(rows, sizes, strict=True)]


def together(act: Callable[[], Result]) -> Result:
    """What `act` returns; if it fails on any process, an error of every process that says on which.

    Raises:
      DsjaxError: of the kind that the first process that failed raised, with the lines of all.
    """
    error: DsjaxError | None = None
    try:
        result = act()
    except DsjaxError as raised:
        error = raised
    if jax.process_count() == 1:
        if error is not None:
            raise error
        return result
    told = gather(None if error is None else [type(error).__name__, error.faults])
    failed = {rank: said for rank, said in enumerate(told) if said is not None}
    if not failed:
        return result
    kinds = {kind.__name__: kind for kind in (*DsjaxError.__subclasses__(), Damaged)}
    kind, _ = next(iter(failed.values()))
    lines = [f"rank {rank}: {line}" for rank, (_, faults) in failed.items() for line in faults]
    raise kinds.get(kind, DsjaxError)(list(dict.fromkeys(lines)))


def everywhere(held: bool) -> bool:
    """Whether something holds on every process."""
    return all(gather(held))

"""Does the compiled step fit, and if not, what would."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import psutil

from dsjax.errors import OutOfDeviceMemory

GIB = 1024**3


def compiled_bytes(compiled: Any) -> int | None:
    """Bytes a device needs to run a compiled program, by XLA's own accounting; None if it tells none."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return (
        stats.argument_size_in_bytes
        + stats.temp_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.generated_code_size_in_bytes
    )


def bytes_a_device(tree: Any) -> int:
    """Bytes that each device holds of a tree of (abstract) arrays with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def refuse_oversized_state(state: Any, devices: Sequence[jax.Device]) -> None:
    """Refuses a state that does not fit, before any of it is made.

    Raises:
      OutOfDeviceMemory: parameters and optimizer state alone take more than a device has.
    """
    needed, limit = bytes_a_device(state), device_bytes(devices)
    if limit is not None and needed > limit:
        raise OutOfDeviceMemory(
            f"parameters and optimizer state take {needed / GIB:.2f} GiB a device and there are "
            f"{limit / GIB:.2f} GiB; use more devices (mesh.fsdp), a smaller model, or an optimizer with less "
            "state (optimizer.kind=sgd)"
        )


def device_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Memory one device can use: its own, or its share of the host's where it is a CPU."""
    local = [d for d in devices if d.process_index == jax.process_index()]
    if not local:
        return None
    if local[0].platform == "cpu":
        return psutil.virtual_memory().total // len(local)
    stats = local[0].memory_stats() or {}
    return stats.get("bytes_limit")


def peak_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Highest memory in use so far on this process's devices; None where the backend tells none."""
    peaks = [
        (d.memory_stats() or {}).get("peak_bytes_in_use")
        for d in devices
        if d.process_index == jax.process_index()
    ]
    known = [p for p in peaks if p is not None]
    return max(known) if known else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device ran out of memory."""
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text or "Out of memory" in text


def refuse_oversized(
    needed: int, limit: int, alternatives: Iterable[tuple[str, Callable[[], int | None]]]
) -> OutOfDeviceMemory:
    """The error for a step that does not fit: what was asked, what there is, what would fit.

    Args:
      needed, limit: bytes a device.
      alternatives: settings as they would be typed, each with a function that compiles the step
        with them and returns its bytes a device.
    """
    lines = [f"the training step needs {needed / GIB:.2f} GiB a device and there are {limit / GIB:.2f} GiB"]
    fitting = []
    for text, measure in alternatives:
        size = measure()
        if size is not None and size <= limit:
            fitting.append(f"would fit (compiled: {size / GIB:.2f} GiB a device): {text}")
        if len(fitting) == 3:
            break
    if not fitting:
        fitting = ["no combination of gradient accumulation and train.remat fits; use more devices "
                   "(mesh.fsdp), a shorter train.sequence_length or a smaller model"]  # fmt: skip
    return OutOfDeviceMemory(lines + fitting)

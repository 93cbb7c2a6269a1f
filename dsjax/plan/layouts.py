"""The layouts that a search looks at: meshes, microbatches, recomputation; and the same with a pipeline."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from dsjax import aot
from dsjax.config import Config
from dsjax.errors import ConfigError
from dsjax.mesh.axes import divisors
from dsjax.plan.compiled import check_mesh

REMATS = ("none", "dots", "full")
# Schedule, chunks a stage.
_SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 1))
_MOST_STAGES = 16
# Microbatches a stage: fewer idle too much, more are too small to keep a device busy.
_A_STAGE = (4, 8)


def layouts(config: Config, target: aot.Target, experts: int) -> Iterator[dict[str, Any]]:
    """Every mesh of data, fsdp, context, expert and tensor on the target, microbatches and remat that divide the batch.

    Matrices are cut along one dimension or along both (`mesh.tensor: [columns, rows]`).

    Args:
      experts: of a layer, 0 where there are none.
    """
    devices, train = target.size, config.train
    flat = {"mesh.pipeline": 1} if config.mesh.pipeline != 1 else {}
    for tensor, context in itertools.product(divisors(devices), repeat=2):
        if tensor > target.domain or tensor * context > devices or devices % (tensor * context):
            continue
        if context > 1 and train.sequence_length % (2 * context):
            continue
        rest = devices // (tensor * context)
        if train.global_batch_size % rest:
            continue
        micros = divisors(train.global_batch_size // rest)
        shards = [(fsdp, expert) for expert in _shares(experts, rest) for fsdp in divisors(rest // expert)]
        for (fsdp, expert), sizes, micro, remat in itertools.product(shards, _sizes(tensor), micros, REMATS):
            yield flat | {
                "mesh.data": rest // (fsdp * expert),
                "mesh.fsdp": fsdp,
                **_of_experts(experts, expert),
                "mesh.context": context,
                "mesh.tensor": sizes,
                "train.gradient_accumulation_steps": micro,
                "train.remat": remat,
            }


def _shares(experts: int, devices: int) -> list[int]:
    """Numbers of devices that can share the experts of a layer."""
    return divisors(math.gcd(experts, devices)) if experts else [1]


def _of_experts(experts: int, expert: int) -> dict[str, Any]:
    """The setting of the axis, for models that have it."""
    return {"mesh.expert": expert} if experts else {}


def _sizes(tensor: int) -> list[int | list[int]]:
    """Matrices cut into so many parts along one dimension, or along both: columns and rows."""
    return [tensor, *([tensor // rows, rows] for rows in divisors(tensor) if 1 < rows < tensor)]


def pipelines(config: Config, target: aot.Target, layers: int, experts: int) -> Iterator[dict[str, Any]]:
    """Meshes with `pipeline`, a few of each: parameters replicated or sharded over all that is left.

    Microbatches pass the pipeline in one go.

    Args:
      layers, experts: of the model, and of a layer.
    """
    devices, train = target.size, config.train
    stages = [p for p in divisors(devices) if 1 < p <= min(_MOST_STAGES, layers)]
    for p, tensor in itertools.product(stages, divisors(target.domain)):
        rest = devices // (p * tensor)
        if devices % (p * tensor) or train.global_batch_size % rest:
            continue
        counts = _microbatches(train.global_batch_size // rest, p)
        near = min(rest, max(1, target.domain // tensor))
        shards = [
            (fsdp, expert)
            for expert in _shares(experts, near)
            for fsdp in dict.fromkeys((rest // expert, near // expert, 1))
        ]
        for (fsdp, expert), micro, (schedule, virtual) in itertools.product(shards, counts, _SCHEDULES):
            if rest % (fsdp * expert) or layers < p * virtual or (virtual > 1 and micro < p):
                continue
            for remat in ("none",) if schedule == "zero_bubble" else ("none", "full"):
                yield {
                    "mesh.pipeline": p,
                    "mesh.data": rest // (fsdp * expert),
                    "mesh.fsdp": fsdp,
                    **_of_experts(experts, expert),
                    "mesh.context": 1,
                    "mesh.tensor": tensor,
                    "pipeline.schedule": schedule,
                    "pipeline.virtual_stages": virtual,
                    "pipeline.microbatches": micro,
                    "train.gradient_accumulation_steps": 1,
                    "train.remat": remat,
                }


def _microbatches(rows: int, stages: int) -> list[int]:
    """Of the numbers that divide a device's rows: those next to so many a stage, and the largest."""
    fitting = [n for n in divisors(rows) if n >= stages] or [rows]
    near = [min(fitting, key=lambda n: abs(n - each * stages)) for each in _A_STAGE]
    return list(dict.fromkeys((*near, fitting[-1])))


def own(config: Config, target: aot.Target, experts: int) -> dict[str, Any] | None:
    """The layout that the config has already; None where it does not fit the target."""
    try:
        mesh = check_mesh(config, target)
    except ConfigError:
        return None
    pipeline = mesh["pipeline"]
    settings: dict[str, Any] = {"mesh.pipeline": pipeline} if pipeline > 1 else {}
    tensor, rows = mesh["tensor"], mesh["tensor_rows"]
    settings |= {
        "mesh.data": mesh["data"],
        "mesh.fsdp": mesh["fsdp"],
        **_of_experts(experts, mesh["expert"]),
        "mesh.context": mesh["context"],
        "mesh.tensor": tensor if rows == 1 else [tensor, rows],
    }
    if pipeline > 1:
        keys = ("schedule", "virtual_stages", "microbatches")
        settings |= {f"pipeline.{key}": getattr(config.pipeline, key) for key in keys}
    return settings | {
        "train.gradient_accumulation_steps": config.train.gradient_accumulation_steps,
        "train.remat": config.train.remat,
    }

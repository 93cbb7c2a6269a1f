"""A job with fewer nodes than it was made for: another mesh, the same batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dsjax.config import Config
from dsjax.config.parallel import MeshConfig
from dsjax.errors import ConfigError
from dsjax.mesh import divisors, resolve_sizes

_FREE = ("data", "fsdp")  # any number of devices will do for these


def replanned(config: Config, devices: int, environ: Mapping[str, str]) -> tuple[Config, list[str]]:
    """The settings of a run for the nodes that are there.

    `dsjax launch --nodes MIN:MAX` tells by DSJAX_NODES and DSJAX_NODES_WANTED how many there are and would be.
    Axes that cut the model stay as they are; `fsdp` keeps its size or grows, so that parameters still fit;
    `data` takes the rest.  A device's microbatch gets no larger: more of them make the same batch.

    Args:
      devices: that are there.

    Raises:
      ConfigError: the axes that cut the model need more devices, or divide them otherwise.
    """
    here, wanted = (int(environ.get(name) or 0) for name in ("DSJAX_NODES", "DSJAX_NODES_WANTED"))
    if not 0 < here < wanted:
        return config, []
    before = resolve_sizes(config.mesh.model_dump(), devices * wanted // here)
    cut = math.prod(size for axis, size in before.items() if axis not in _FREE)
    if devices % cut:
        raise ConfigError(
            f"mesh: with {here} of {wanted} nodes there are {devices} devices, which the axes that cut the model "
            f"({cut} devices) do not divide; keep at least {math.ceil(cut * here / devices)} nodes (launch --nodes)"
        )
    rest = devices // cut
    fsdp = min((d for d in divisors(rest) if d >= before["fsdp"]), default=rest)
    now = {**before, "fsdp": fsdp, "data": rest // fsdp}
    train, expert = config.train, before["expert"]
    rows = before["data"] * before["fsdp"] * expert * train.gradient_accumulation_steps
    most = math.ceil(train.global_batch_size / rows)  # rows of a device in a microbatch
    accumulation = math.ceil(train.global_batch_size / (rest * expert * most))
    mesh: dict[str, Any] = {axis: size for axis, size in now.items() if axis in MeshConfig.model_fields}
    mesh["tensor"] = config.mesh.tensor if config.mesh.tensor != -1 else now["tensor"]
    changed = config.model_copy(
        update={
            "mesh": MeshConfig(**mesh),
            "train": train.model_copy(update={"gradient_accumulation_steps": accumulation}),
        }
    )
    shown = " x ".join(f"{axis} {now[axis]}" for axis in now if now[axis] > 1) or "one device"
    told = f"{here} of {wanted} nodes: the mesh is {shown}, a step has {accumulation} microbatch(es) for the same batch"
    return changed, [told]


def padded_rows(batch: int, parts: int) -> int:
    """Rows of a batch filled up with empty ones until they divide into equal parts."""
    return -(-batch // parts) * parts

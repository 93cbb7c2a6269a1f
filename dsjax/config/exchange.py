"""Settings of the exchange of gradients over `data`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from dsjax.config.fields import (
    BelowOne,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    PatternList,
    PositiveFloat,
    PositiveInt,
    Section,
    Takes,
    described,
)


class LevelConfig(Section):
    """Devices that are near to each other: a node, those behind one switch, a rack."""

    devices: PositiveInt = Field(description="Devices of one such group, in the mesh's order.")
    gbytes_per_second: PositiveFloat | None = described(
        None, "What a device sends to another of its group, GB/s. Default: that of a link of the kind."
    )
    latency_us: NonNegativeFloat | None = described(None, "Latency of a message in the group, microseconds.")


def _devices_alone(value: Any) -> Any:
    return {"devices": value} if isinstance(value, int) else value


Level = Annotated[
    LevelConfig,
    BeforeValidator(_devices_alone),
    Takes("a number of devices, or {devices, gbytes_per_second, latency_us}"),
]


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("is no power of two")
    return value


Block = Annotated[
    int, Field(ge=16, le=4096), AfterValidator(_power_of_two), Takes("a power of two from 16 to 4096")
]


def _nested(levels: Mapping[str, LevelConfig]) -> Mapping[str, LevelConfig]:
    """Refuses levels of which one is no multiple of the one before; a fault is told of the level that has it."""
    faults = []
    for (_, inner), (name, level) in pairwise(levels.items()):
        if level.devices <= inner.devices or level.devices % inner.devices:
            fault = ValueError(
                f"{level.devices} devices is not a multiple of the level before it ({inner.devices}); name the "
                "smallest groups first"
            )
            faults.append(
                {"type": "value_error", "loc": (name,), "input": level.devices, "ctx": {"error": fault}}
            )
    if faults:
        raise ValidationError.from_exception_data("topology", faults)  # type: ignore[arg-type]
    return levels


Levels = Annotated[
    dict[NonEmpty, Level], AfterValidator(_nested), Takes("a mapping of levels to numbers of devices")
]


class GradSyncConfig(Section):
    """How gradients are exchanged between the replicas of `mesh.data`, once a step."""

    codec: Literal["dense", "int8", "int4", "e2m4", "topk", "topk_int4"] = described(
        "dense",
        "Form of gradients between nodes: dense; int8, int4, e2m4 (a sign, 2 bits of exponent, 4 of mantissa), each "
        "with a scale a block; topk (the largest only); topk_int4 (those in 4 bits).",
    )
    block: Block = described(128, "Numbers that share a scale.")
    error_feedback: bool = described(
        True, "Add what a codec lost to the next step's gradient (fp32 state of a gradient's size)."
    )
    feedback_decay: BelowOne = described(
        0.0, "Share of the residual that is kept as it was: e = d * e + (1 - d) * (what was lost)."
    )
    stochastic: bool = described(
        False, "Round int8 and int4 up or down by chance, so that errors are 0 on average."
    )
    hadamard: bool = described(
        False, "Turn every block by a Hadamard matrix before int8, int4 and e2m4, which spreads outliers."
    )
    fraction: Annotated[float, Field(gt=0.0, le=1.0), Takes("a number above 0, at most 1")] = described(
        0.05, "Share of the numbers that topk and topk_int4 send."
    )
    warmup_steps: NonNegativeInt = described(
        0,
        "Steps that are exchanged dense before the codec begins (Lin et al. 2018); the step is compiled anew then. "
        "topk wants a quarter of a short run, less of a long one.",
    )
    min_size: NonNegativeInt = described(
        16384, "Parameters of fewer numbers (over all devices) stay dense, as do all vectors."
    )
    dense: PatternList | None = described(
        None, "Path patterns of parameters that stay dense. Default: embeddings (*embed*)."
    )
    dense_dtype: Literal["float32", "bfloat16"] = described(
        "float32", "Type in which dense gradients are exchanged; sums are made in fp32."
    )
    route: Literal["auto", "flat", "hierarchical", "tree"] = described(
        "auto",
        "flat: all replicas at once; hierarchical: reduced inside a node first, coded between nodes; tree: at every "
        "level of the topology in turn, its leaves first; auto: the one that should take the least time.",
    )
    topology: Levels = described(
        {},
        "Groups of near devices, the smallest first, as {node: 8, rack: 64}. Default: the hosts that are there.",
    )
    overlap: bool | None = described(
        None,
        "Exchange the gradients of a group of layers while those of the group before are computed (models of "
        "stacked layers, no pipeline). Default: where replicas are in different nodes and train.remat is full; "
        "with less recomputation XLA holds more activations for it, and it takes longer to compile everywhere.",
    )
    bucket_bytes: PositiveInt = described(
        2**27,
        "Bytes (fp32, of a device) that are exchanged at a time: small parameters together, layers in groups.",
    )


class DilocoConfig(Section):
    """Local steps between exchanges (DiLoCo, Douillard et al. 2023): replicas train apart and are then averaged."""

    inner_steps: NonNegativeInt = described(
        0,
        "Steps that every node trains by itself between two exchanges; 0: exchange gradients at every step.",
    )
    outer_learning_rate: NonNegativeFloat = described(0.7, "Learning rate of the outer Nesterov step.")
    outer_momentum: BelowOne = described(0.9, "Momentum of the outer Nesterov step.")

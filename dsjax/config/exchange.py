"""Settings of the exchange of gradients over `data`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

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


class GradSyncConfig(Section):
    """How gradients are exchanged between the replicas of `mesh.data`, once a step."""

    codec: Literal["dense", "int8", "int4", "e2m4", "topk", "topk_int4"] = described(
        "dense",
        "Form of gradients between nodes: dense; int8, int4, e2m4 (a sign, 2 bits of exponent, 4 of mantissa), each "
        "with a scale a block; topk (the largest only); topk_int4 (those in 4 bits).",
    )
    block: PositiveInt = described(128, "Numbers that share a scale; a power of two, at least 16.")
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
    topology: dict[NonEmpty, Level] = described(
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

    @model_validator(mode="after")
    def _together(self) -> GradSyncConfig:
        faults = []
        if self.block < 16 or self.block & (self.block - 1):
            faults.append(f"block {self.block}: takes a power of two of at least 16, as 128")
        sizes = [level.devices for level in self.topology.values()]
        for name, small, large in zip(list(self.topology)[1:], sizes, sizes[1:], strict=False):
            if large <= small or large % small:
                faults.append(
                    f"topology.{name}: {large} devices is not a multiple of the level before it ({small}); name the "
                    "smallest groups first"
                )
        if faults:
            raise ValueError("\n".join(faults))
        return self


class DilocoConfig(Section):
    """Local steps between exchanges (DiLoCo, Douillard et al. 2023): replicas train apart and are then averaged."""

    inner_steps: NonNegativeInt = described(
        0,
        "Steps that every node trains by itself between two exchanges; 0: exchange gradients at every step.",
    )
    outer_learning_rate: NonNegativeFloat = described(0.7, "Learning rate of the outer Nesterov step.")
    outer_momentum: BelowOne = described(0.9, "Momentum of the outer Nesterov step.")

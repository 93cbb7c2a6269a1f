"""Settings of the mesh and of the pipeline over it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dsjax.config.fields import (
    AxisSize,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Section,
    Takes,
    TensorSize,
    described,
)

MESH_ALIASES = {"pp": "pipeline", "dp": "data", "cp": "context", "ep": "expert", "tp": "tensor"}


class MeshConfig(Section):
    """Sizes of the mesh axes; one may be -1: all the devices that the others leave."""

    pipeline: AxisSize = described(1, "Stages of depth.")
    data: AxisSize = described(1, "Replicas of the parameters, usually across nodes.")
    fsdp: AxisSize = described(-1, "Shards of parameters, gradients and optimizer state (ZeRO-3).")
    context: AxisSize = described(1, "Shards of the sequence.")
    expert: AxisSize = described(1, "Shards of a mixture's experts; the batch is cut over them too.")
    tensor: TensorSize = described(
        1,
        "Shards of matrices (attention heads, feed-forward, vocabulary); [columns, rows]: matrices are cut "
        "along both their dimensions, and what is hidden between layers along the rows.",
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_aliases(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        named = {}
        for key, value in data.items():
            name = MESH_ALIASES.get(key, key)
            if name in named:
                raise ValueError(f"{name} is given twice ({key} is its short name)")
            named[name] = value
        if "fsdp" not in named and any(v == -1 for v in named.values()):
            named["fsdp"] = 1
        return named

    @model_validator(mode="after")
    def _one_axis_is_free(self) -> MeshConfig:
        free = [name for name in type(self).model_fields if getattr(self, name) == -1]
        if len(free) > 1:
            raise ValueError(f"only one axis may be -1 (the rest of the devices), got {' and '.join(free)}")
        return self


class PipelineConfig(Section):
    """How a mesh with `pipeline` above 1 shares a model's layers out over its stages."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = described(
        "1f1b",
        "Order of forwards and backwards: gpipe, 1f1b, interleaved (several chunks of layers a stage), "
        "zero_bubble (weight gradients fill the gaps; keeps activations).",
    )
    microbatches: PositiveInt | None = described(
        None,
        "Microbatches that pass the pipeline in one go; train.gradient_accumulation_steps such goes make a "
        "step. Default: the most up to four a stage that divide the batch.",
    )
    virtual_stages: PositiveInt | None = described(
        None, "Chunks of layers a stage holds; default 1, for interleaved 2."
    )
    recompute: bool | None = described(
        None,
        "Keep of a microbatch only each stage's input and compute the stage again in the backward pass; false "
        "keeps what train.remat says. Default: true, for zero_bubble false.",
    )
    layers: Annotated[
        list[PositiveInt] | None, Field(min_length=1), Takes("a list of integers >= 1, or null")
    ] = described(
        None, "Layers of each (virtual) stage in order, as [4, 4, 4, 3]; default: balanced by their cost."
    )
    rebalance_every: NonNegativeInt = described(
        100, "Steps after which stages are timed and layers moved if that pays; 0: never."
    )
    rebalance_gain: NonNegativeFloat = described(
        0.05, "Share of the step's time that a move of layers must save."
    )

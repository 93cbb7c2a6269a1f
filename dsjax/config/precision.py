"""Settings of number formats and of what happens when numbers go wrong."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from dsjax.config.fields import (
    BelowOne,
    NonEmpty,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Takes,
    described,
)


def _power_of_two(value: float) -> float:
    if math.frexp(value)[0] != 0.5:
        raise ValueError("is no power of two")
    return value


Scale = Annotated[
    float, Field(ge=1.0, le=2.0**24), AfterValidator(_power_of_two), Takes("a power of two from 1 to 2^24")
]


class LossScaleConfig(Section):
    """The dynamic loss scale of fp16 (policy fp16 only)."""

    initial: Scale = described(2.0**16, "Scale of the first step; a power of two.")
    growth_interval: PositiveInt = described(1000, "Steps without overflow after which the scale is doubled.")
    hysteresis: PositiveInt = described(
        2, "The scale is halved at the N-th overflow since it last grew, and at each one after it."
    )
    minimum: Scale = described(1.0, "The scale falls no lower.")
    maximum: Scale = described(2.0**24, "The scale rises no higher.")
    target_rate: BelowOne = described(
        0.003,
        "While a moving average of the share of steps that overflow is above this, the scale does not rise.",
    )

    @model_validator(mode="after")
    def _in_order(self) -> LossScaleConfig:
        if not self.minimum <= self.initial <= self.maximum:
            raise ValueError("initial: lies between minimum and maximum")
        return self


class Fp8Config(Section):
    """Products in fp8 (policy fp8, or a table that names it)."""

    scaling: Literal["tensor", "delayed", "block"] = described(
        "tensor",
        "What has a scale. tensor: each operand, E4M3 forward and E5M2 for gradients. delayed: likewise, by the "
        "largest magnitudes of passes before. block: 1 x 128 tiles of activations and gradients, 128 x 128 blocks of "
        "weights, E4M3; a weight's gradient is a product in bf16.",
    )
    history: PositiveInt = described(16, "delayed: forward passes (microbatches) that are remembered.")


Format = Literal["fp32", "bf16", "fp16", "fp8"]


class PrecisionConfig(Section):
    """Number formats."""

    policy: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = described(
        "auto",
        "Type of matrix products and lookups; normalisations, softmax, router and loss stay fp32, and so do the "
        "parameters and the optimizer's state unless set otherwise. auto: bf16 on GPU and TPU, fp32 on CPU. fp16 "
        "scales its loss. fp8: bf16, and the products of layers in fp8, but for the model's own first and last layer "
        "(embedding, head).",
    )
    table: dict[NonEmpty, Format] = described(
        {},
        "Formats of single layers: a kind (matmul, embedding, norm), or a pattern of paths of layers or of what they "
        "are part of, to fp32, bf16, fp16 or fp8; the last that fits counts: {layers/mlp: fp8, norm: bf16}.",
    )
    fp8: Fp8Config = Field(default_factory=Fp8Config, description="Products in fp8.")
    params: Literal["float32", "bfloat16"] = described(
        "float32",
        "Type of the parameters between steps: of matrices; vectors are float32. bfloat16: updates are computed in "
        "fp32 and rounded at random, so that their mean is kept.",
    )
    gradients: Literal["float32", "bfloat16"] = described(
        "float32",
        "Type in which the gradients of matrices are summed over microbatches and handed to the optimizer. bfloat16: "
        "sums are rounded at random. Norms and sums over replicas are fp32.",
    )
    loss_scale: LossScaleConfig = Field(
        default_factory=LossScaleConfig, description="The dynamic loss scale of fp16."
    )


class StabilityConfig(Section):
    """What happens when numbers go wrong."""

    clip: Literal["fixed", "median"] = described(
        "fixed",
        "fixed: gradients of a larger norm are scaled down to optimizer.max_grad_norm. median: to clip_factor times "
        "the median norm of late steps; before 10 of them are known, to optimizer.max_grad_norm.",
    )
    clip_factor: PositiveFloat = described(1.5, "median: the multiple.")
    clip_window: PositiveInt = described(100, "median: steps that are remembered.")
    clip_groups: Literal["all", "parts"] = described(
        "all",
        "median: one norm of all, or one of each part of the model (embedding, layers, head), clipped alone.",
    )
    on_nonfinite: Literal["skip", "recompute", "rollback"] = described(
        "skip",
        "A step whose loss or gradient is not finite changes no parameter. recompute: it is first computed again in "
        "fp32, and counts if that is finite. rollback: after rollback_after of them in a row, or a loss spike, the run "
        "goes back to the newest good state and leaves out the batches that led there.",
    )
    give_up_after: PositiveInt = described(
        10, "skip, recompute: end with exit code 3 after this many skipped steps in a row."
    )
    rollback_after: PositiveInt = described(5, "rollback: skipped steps in a row.")
    spike: PositiveFloat | None = described(
        10.0,
        "rollback: a loss is a spike where it is above the median of late losses by more than so many times their "
        "usual distance from it (1.48 times the median of the distances); null: no loss is.",
    )
    max_rollbacks: PositiveInt = described(
        3, "rollback: end with exit code 3 when so many in a row got no further."
    )
    rollback_learning_rate: Annotated[float, Field(gt=0, le=1), Takes("a factor above 0, at most 1")] = (
        described(1.0, "rollback: the learning rate is multiplied by this for rollback_steps updates.")
    )
    rollback_steps: PositiveInt = described(100, "rollback: updates with that learning rate.")

    locate_nonfinite: bool = described(
        True,
        "Of the first skipped step in a row of them, compute loss and gradient once more with taps on the model's "
        "modules, and tell which layer and operator was the first that was not finite, in the forward or the backward "
        "pass (at most 5 times a run). Other steps pay nothing.",
    )
    check_replicas_every: NonNegativeInt = described(
        0,
        "Compare every N steps, bit by bit, what devices hold alike (replicas of parameters and optimizer state); end "
        "with exit code 3, naming the device, where they differ. 0: never. Waits for the step.",
    )
    check_recompute_every: NonNegativeInt = described(
        0,
        "Compute the gradient of a microbatch twice before every N-th step and compare bit by bit; end with exit code "
        "3, naming the device, where they differ. 0: never. No pipeline.",
    )

    @property
    def patience(self) -> float:
        """Skipped steps in a row after which a run ends; one that goes back does so instead."""
        return math.inf if self.on_nonfinite == "rollback" else self.give_up_after

"""Mixtures of experts: Mixtral (Jiang et al. 2024) and Qwen 3 (Yang et al. 2025), whose layers are all mixtures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from flax import nnx
from pydantic import Field

from dsjax.config.fields import NonNegativeFloat, PositiveFloat, PositiveInt, Takes
from dsjax.models.decoder import Frame
from dsjax.models.families.base import PASSED_OVER, Axes, TransformerConfig, of_layer
from dsjax.models.families.llama import MistralConfig
from dsjax.models.families.qwen import Qwen3Config
from dsjax.models.moe import Mixture, MixtureConfig, Routing, balanced, mixture_axes, mixture_extras
from dsjax.models.weights import Entry


class SparseConfig(TransformerConfig):
    """Families whose feed-forward layers are mixtures; from `router_z_loss_coef` on the fields are ours.

    The balance loss is added in training whatever `output_router_logits` says; it is of each sequence and layer, and
    the coefficients are of the mean over layers.
    """

    passed_over: ClassVar[frozenset[str]] = PASSED_OVER | {"output_router_logits"}
    tensors: ClassVar[tuple[str, str, str, str]] = ("mlp", "gate_proj", "up_proj", "down_proj")
    """What a saved model calls the mixture and its experts' matrices."""

    num_experts_per_tok: PositiveInt
    router_aux_loss_coef: NonNegativeFloat = 0.001
    router_z_loss_coef: NonNegativeFloat = 0.0
    router_bias_update_rate: NonNegativeFloat = 0.0
    capacity_factor: PositiveFloat | None = None
    expert_headroom: PositiveFloat = 1.25

    @property
    def expert_columns(self) -> int:
        """Hidden columns of an expert."""
        return self.intermediate_size

    @property
    def normalised(self) -> bool:
        """Whether a token's gates add up to 1."""
        return True

    def mixture(self) -> MixtureConfig:
        """A layer's mixture."""
        routing = Routing(
            self.experts, self.num_experts_per_tok, normalised=self.normalised, capacity=self.capacity_factor,
            biased=self.router_bias_update_rate > 0,
        )  # fmt: skip
        return MixtureConfig(
            self.hidden_size, self.expert_columns, routing, self.num_hidden_layers, self.router_aux_loss_coef,
            self.router_z_loss_coef, self.expert_headroom,
        )  # fmt: skip

    def faults(self) -> list[str]:
        chosen, experts = self.num_experts_per_tok, self.experts
        if chosen > experts:
            return [
                f"model.num_experts_per_tok: {chosen} of {experts} experts; choose no more than there are"
            ]
        return super().faults()

    def unsaved(self) -> list[str]:
        faults = super().unsaved()
        if self.capacity_factor is not None:
            faults.append(
                "model.capacity_factor: transformers drops no rows; train to the end without it (null)"
            )
        if self.router_bias_update_rate and not self.saved:
            faults.append(
                f"model.router_bias_update_rate: {self.model_type} has no place for the router's biases; "
                "deepseek_v3 has"
            )
        return faults

    def mlp(self, rngs: nnx.Rngs) -> nnx.Module:
        return Mixture(self.mixture(), init=self.matrix_init, rngs=rngs)

    def frame(self) -> Frame:
        return replace(super().frame(), adds=tuple(mixture_extras(self.mixture()).items()))

    def axes(self) -> Axes:
        return {**super().axes(), **mixture_axes("layers/mlp")}

    def after_step(self) -> Callable[[Any, Mapping[str, Any]], Any] | None:
        rate = self.router_bias_update_rate
        return balanced(rate) if rate else None

    def entries(self) -> list[Entry]:
        mixture, *matrices = self.tensors
        experts = [
            of_layer(
                f"mlp/experts/{ours}/kernel", f"{mixture}.experts.{{expert}}.{theirs}.weight", "d m -> m d"
            )
            for ours, theirs in zip(("gate_proj", "up_proj", "down_proj"), matrices, strict=True)
        ]
        router = of_layer("mlp/router/kernel", f"{mixture}.gate.weight", "d e -> e d")
        return [*super().entries(), router, *experts]

    def flops_per_token(self, length: int) -> float:
        columns = self.num_experts_per_tok * self.expert_columns - self.intermediate_size
        more = self.hidden_size * (3 * columns + self.experts)
        return super().flops_per_token(length) + 6.0 * self.num_hidden_layers * more


class MixtralConfig(SparseConfig, MistralConfig):
    """Mixtral."""

    model_type: ClassVar[str] = "mixtral"
    architecture: ClassVar[str] = "MixtralForCausalLM"
    renamed: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}
    tensors: ClassVar[tuple[str, str, str, str]] = ("block_sparse_moe", "w1", "w3", "w2")

    rms_norm_eps: PositiveFloat = 1e-5
    num_experts_per_tok: PositiveInt = 2
    num_local_experts: PositiveInt = 8
    router_jitter_noise: Annotated[float, Field(ge=0, le=0), Takes("0")] = 0.0
    sliding_window: PositiveInt | None = None

    @property
    def experts(self) -> int:
        return self.num_local_experts

    @property
    def theta(self) -> float:
        return self.rope_theta or (self.scaling or {}).get("rope_theta") or 1e6


class Qwen3MoeConfig(SparseConfig, Qwen3Config):
    """Qwen 3 with experts in every layer."""

    model_type: ClassVar[str] = "qwen3_moe"
    architecture: ClassVar[str] = "Qwen3MoeForCausalLM"
    renamed: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}

    num_key_value_heads: PositiveInt | None = 4
    head_dim: PositiveInt | None = None
    intermediate_size: PositiveInt = 6144
    moe_intermediate_size: PositiveInt = 768
    num_experts: PositiveInt = 128
    num_experts_per_tok: PositiveInt = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: Annotated[Literal[1], Takes("1: a mixture in every layer")] = 1
    mlp_only_layers: Annotated[list[int] | None, Field(max_length=0), Takes("an empty list")] = None

    @property
    def experts(self) -> int:
        return self.num_experts

    @property
    def expert_columns(self) -> int:
        return self.moe_intermediate_size

    @property
    def normalised(self) -> bool:
        return self.norm_topk_prob

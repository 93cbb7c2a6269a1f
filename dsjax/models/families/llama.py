"""Llama 2 and 3 (Dubey et al. 2024), and Mistral (Jiang et al. 2023), which looks back through a window."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from flax import nnx

from dsjax.config.fields import PositiveInt, Takes
from dsjax.models.families.base import TransformerConfig
from dsjax.models.layers import GatedMLP


class LlamaConfig(TransformerConfig):
    """Llama; `sliding_window` is ours."""

    model_type: ClassVar[str] = "llama"
    architecture: ClassVar[str] = "LlamaForCausalLM"

    mlp_bias: bool = False
    sliding_window: PositiveInt | None = None

    def layer_windows(self) -> list[int | None]:
        return [self.sliding_window] * self.num_hidden_layers

    def unsaved(self) -> list[str]:
        if self.sliding_window is None or self.model_type != "llama":
            return super().unsaved()
        return [
            "model.sliding_window: transformers' llama looks back without a window; train it as model.kind "
            "mistral, which is the same model with one"
        ]

    def mlp(self, rngs: nnx.Rngs) -> nnx.Module:
        return GatedMLP(
            self.hidden_size, self.intermediate_size, init=self.matrix_init, bias=self.mlp_bias, rngs=rngs
        )


class MistralConfig(LlamaConfig):
    """Mistral."""

    model_type: ClassVar[str] = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"

    num_key_value_heads: PositiveInt | None = 8
    attention_bias: Annotated[Literal[False], Takes("false")] = False
    mlp_bias: Annotated[Literal[False], Takes("false")] = False
    sliding_window: PositiveInt | None = 4096

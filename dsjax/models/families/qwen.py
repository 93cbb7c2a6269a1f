"""Qwen 2 and 2.5 (Yang et al. 2024): biases on queries, keys and values; Qwen 3 (2025): their norms instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from dsjax.config.fields import NonNegativeInt, PositiveInt, Takes
from dsjax.models.families.base import LayerTypes, TransformerConfig, type_faults, typed_windows
from dsjax.models.transformer import Heads


class Qwen2Config(TransformerConfig):
    """Qwen 2; with `use_sliding_window` layers from `max_window_layers` on look back through a window."""

    model_type: ClassVar[str] = "qwen2"
    architecture: ClassVar[str] = "Qwen2ForCausalLM"

    num_key_value_heads: PositiveInt | None = 32
    attention_bias: Annotated[Literal[True], Takes("true")] = True
    use_mrope: Annotated[Literal[False], Takes("false")] = False
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = 4096
    max_window_layers: NonNegativeInt = 28
    layer_types: LayerTypes = None

    def layer_windows(self) -> list[int | None]:
        window, count = self.sliding_window if self.use_sliding_window else None, self.num_hidden_layers
        if self.layer_types is not None:
            return typed_windows(self.layer_types, window)
        return [window if layer >= self.max_window_layers else None for layer in range(count)]

    def faults(self) -> list[str]:
        window = self.sliding_window if self.use_sliding_window else None
        return super().faults() + type_faults(self.layer_types, window, self.num_hidden_layers)

    def heads(self) -> Heads:
        return replace(super().heads(), bias=True, out_bias=False)


class Qwen3Config(Qwen2Config):
    """Qwen 3."""

    model_type: ClassVar[str] = "qwen3"
    architecture: ClassVar[str] = "Qwen3ForCausalLM"

    head_dim: PositiveInt | None = 128
    attention_bias: bool = False  # type: ignore[assignment]

    def heads(self) -> Heads:
        heads = super().heads()
        bias = self.attention_bias
        return replace(heads, bias=bias, out_bias=bias, norm=lambda _, rngs: self.norm(self.head_size, rngs))

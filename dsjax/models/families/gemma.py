"""Gemma 2 (Riviere et al. 2024) and the text model of Gemma 3 (Kamath et al. 2025).

Norms stand before and after attention and feed-forward and learn what is added to a scale of 1; embeddings are
scaled by sqrt(hidden); layers alternate between a window and the whole sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from flax import nnx

from dsjax.config.fields import PositiveFloat, PositiveInt, Takes
from dsjax.models.decoder import Frame
from dsjax.models.families.base import (
    LayerTypes,
    Scaling,
    TransformerConfig,
    scaling_faults,
    type_faults,
    typed_windows,
)
from dsjax.models.layers import RMSNorm
from dsjax.models.rotary import Rotary
from dsjax.models.transformer import Heads, Parts

OnlyCausal = Annotated[Literal[False] | None, Takes("false")]


class Gemma2Config(TransformerConfig):
    """Gemma 2: every other layer, the first included, looks back through a window; scores and logits are capped."""

    model_type: ClassVar[str] = "gemma2"
    architecture: ClassVar[str] = "Gemma2ForCausalLM"
    norms: ClassVar[Mapping[str, str]] = {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
        "attention/q_norm": "self_attn.q_norm",
        "attention/k_norm": "self_attn.k_norm",
    }
    pattern: ClassVar[int] = 2
    """One layer in so many sees the whole sequence."""

    num_key_value_heads: PositiveInt | None = 4
    head_dim: PositiveInt | None = 256
    hidden_activation: Literal["gelu_pytorch_tanh"] | None = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: PositiveFloat = 256
    sliding_window: PositiveInt | None = 4096
    sliding_window_size: PositiveInt | None = None
    layer_types: LayerTypes = None
    final_logit_softcapping: PositiveFloat | None = 30.0
    attn_logit_softcapping: PositiveFloat | None = 50.0
    use_bidirectional_attention: OnlyCausal = None
    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"  # type: ignore[assignment]

    def types(self) -> list[str]:
        """The type of each layer."""
        if self.layer_types is not None:
            return list(self.layer_types)
        every = self.pattern
        layers = range(1, self.num_hidden_layers + 1)
        return ["sliding_attention" if layer % every else "full_attention" for layer in layers]

    def layer_windows(self) -> list[int | None]:
        return typed_windows(self.types(), self.sliding_window)

    def faults(self) -> list[str]:
        faults = super().faults() + type_faults(self.types(), self.sliding_window, self.num_hidden_layers)
        if self.sliding_window_size not in (None, self.sliding_window):
            faults.append(
                f"model.sliding_window_size: {self.sliding_window_size}, and model.sliding_window "
                f"{self.sliding_window}: they are one thing"
            )
        return faults

    def norm(self, features: int | tuple[int, ...], rngs: nnx.Rngs) -> nnx.Module:
        return RMSNorm(features, eps=self.rms_norm_eps, offset=1.0, rngs=rngs)

    def heads(self) -> Heads:
        scale = self.query_pre_attn_scalar**-0.5
        return replace(super().heads(), scale=scale, cap=self.attn_logit_softcapping)

    def parts(self) -> Parts:
        return replace(super().parts(), after=True)

    def frame(self) -> Frame:
        scale = self.hidden_size**0.5
        return replace(super().frame(), embed_scale=scale, logit_cap=self.final_logit_softcapping)


class Gemma3TextConfig(Gemma2Config):
    """Gemma 3's text model: norms of queries and keys; layers with a window have rotary positions of their own."""

    model_type: ClassVar[str] = "gemma3_text"
    architecture: ClassVar[str] = "Gemma3ForCausalLM"
    renamed: ClassVar[Mapping[str, str]] = {"_sliding_window_pattern": "sliding_window_pattern"}

    final_logit_softcapping: PositiveFloat | None = None
    attn_logit_softcapping: Annotated[None, Takes("null")] = None  # type: ignore[assignment]
    sliding_window_pattern: PositiveInt = 6
    rope_local_base_freq: PositiveFloat | None = None
    rope_parameters: Annotated[
        Scaling, Takes("a mapping of full_attention and sliding_attention to mappings with rope_type")
    ] = None

    @property
    def pattern(self) -> int:  # type: ignore[override]
        return self.sliding_window_pattern

    def ropes(self) -> dict[str, dict[str, Any]]:
        """Rotary scaling of each type of layer, with its theta."""
        given = self.rope_parameters or {"full_attention": self.rope_scaling}
        thetas = {
            "full_attention": self.rope_theta or 1e6,
            "sliding_attention": self.rope_local_base_freq or 1e4,
        }
        return {kind: {"rope_theta": theta, **(given.get(kind) or {})} for kind, theta in thetas.items()}

    def scaling_faults(self) -> list[str]:
        unknown = (self.rope_parameters or {}).keys() - {"full_attention", "sliding_attention"}
        if unknown:
            wanted = "Gemma 3 has one for full_attention and one for sliding_attention"
            return [f"model.rope_parameters.{name}: unknown key; {wanted}" for name in sorted(unknown)]
        name = "model.rope_parameters" if self.rope_parameters else "model.rope_scaling"
        return [
            f for kind, scaling in self.ropes().items() for f in scaling_faults(scaling, f"{name}.{kind}")
        ]

    def rotaries(self) -> tuple[Rotary, ...]:
        ropes, made = self.ropes(), []
        for kind in dict.fromkeys(self.types()):
            scaling = dict(ropes[kind])
            theta = scaling.pop("rope_theta")
            made.append(Rotary(self.head_size, theta, tuple(scaling.items()), self.max_position_embeddings))
        return tuple(made)

    def heads(self) -> Heads:
        return replace(super().heads(), norm=lambda _, rngs: self.norm(self.head_size, rngs))

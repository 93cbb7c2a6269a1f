"""OLMo 2 (Walsh et al. 2024): norms after attention and feed-forward only, and of queries and keys over all heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from dsjax.config.fields import PositiveFloat
from dsjax.models.families.base import PARAM_AXES, Axes, TransformerConfig, of_layer
from dsjax.models.transformer import Heads, Parts
from dsjax.models.weights import Entry


class Olmo2Config(TransformerConfig):
    """OLMo 2."""

    model_type: ClassVar[str] = "olmo2"
    architecture: ClassVar[str] = "Olmo2ForCausalLM"
    norms: ClassVar[Mapping[str, str]] = {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }

    rms_norm_eps: PositiveFloat = 1e-5

    def heads(self) -> Heads:
        return replace(super().heads(), norm=lambda heads, rngs: self.norm((heads, self.head_size), rngs))

    def parts(self) -> Parts:
        return replace(super().parts(), before=False, after=True)

    def axes(self) -> Axes:
        own = {
            "layers/attention/q_norm/scale": ("layers", "heads", "head_dim"),
            "layers/attention/k_norm/scale": ("layers", "kv_heads", "head_dim"),
        }
        return own | {path: names for path, names in PARAM_AXES.items() if "[qk]_norm" not in path}

    def entries(self) -> list[Entry]:
        whole = (
            of_layer(f"attention/{x}_norm/scale", f"self_attn.{x}_norm.weight", "n h -> (n h)") for x in "qk"
        )
        return [*super().entries(), *whole]

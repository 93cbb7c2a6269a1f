"""GPT-2 (Radford et al. 2019): a learned table of positions, LayerNorm, biases everywhere.

Positions are counted anew in each packed document, as rotary ones are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from dsjax.config.fields import BelowOne, PositiveFloat, PositiveInt, Takes
from dsjax.models.decoder import Frame
from dsjax.models.families.base import (
    ACTIVATIONS,
    PARAM_AXES,
    PASSED_OVER,
    Axes,
    FamilyConfig,
    NoDropout,
    seen,
)
from dsjax.models.layers import MLP, Init, LayerNorm, normal
from dsjax.models.transformer import Attention, Heads, Layer, Parts
from dsjax.models.weights import Entry


class GPT2Config(FamilyConfig):
    """GPT-2; attention weights have no dropout here, so `attn_pdrop` is 0 unlike in Hugging Face."""

    model_type: ClassVar[str] = "gpt2"
    architecture: ClassVar[str] = "GPT2LMHeadModel"
    renamed: ClassVar[Mapping[str, str]] = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    }
    passed_over: ClassVar[frozenset[str]] = PASSED_OVER | {
        "n_ctx", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
        "summary_first_dropout", "reorder_and_upcast_attn",
    }  # fmt: skip
    positions_field: ClassVar[str] = "n_positions"
    ignored_tensors: ClassVar[Sequence[str]] = ("*.attn.bias", "*.attn.masked_bias")
    prefix: ClassVar[str] = "transformer."

    n_embd: PositiveInt
    n_layer: PositiveInt
    n_head: PositiveInt
    n_inner: PositiveInt | None = None
    n_positions: PositiveInt
    activation_function: Literal["gelu_new", "gelu", "gelu_pytorch_tanh", "relu"] = "gelu_new"
    layer_norm_epsilon: PositiveFloat = 1e-5
    resid_pdrop: BelowOne = 0.1
    embd_pdrop: BelowOne = 0.1
    attn_pdrop: NoDropout = 0.0
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: Annotated[Literal[False], Takes("false")] = False
    add_cross_attention: Annotated[Literal[False], Takes("false")] = False
    tie_word_embeddings: bool = True

    @property
    def layers(self) -> int:
        return self.n_layer

    @property
    def inner(self) -> int:
        """Width of the feed-forward part."""
        return self.n_inner or 4 * self.n_embd

    def faults(self) -> list[str]:
        if self.n_embd % self.n_head:
            return [f"model.n_head: {self.n_head} does not divide model.n_embd {self.n_embd}; change one"]
        return []

    def frame(self) -> Frame:
        d, h = self.n_embd, self.n_embd // self.n_head

        def init(inputs: int, outputs: int) -> Init:
            return normal(self.initializer_range)

        scale = None if self.scale_attn_weights else 1.0
        heads = Heads(
            d, self.n_head, self.n_head, h, init, bias=True, out_bias=True, rotary=False, scale=scale
        )
        activation = ACTIVATIONS[self.activation_function]
        parts = Parts(
            norm=lambda rngs: LayerNorm(d, eps=self.layer_norm_epsilon, rngs=rngs),
            attention=lambda rngs: Attention(heads, rngs=rngs),
            mlp=lambda rngs: MLP(d, self.inner, init=init, activation=activation, bias=True, rngs=rngs),
            dropout=self.resid_pdrop,
        )
        return Frame(
            vocab_size=self.vocab_size, hidden_size=d, layers=self.n_layer,
            layer=lambda rngs: Layer(parts, rngs=rngs), norm=parts.norm, init=normal(self.initializer_range),
            tied=self.tie_word_embeddings, positions=self.n_positions, dropout=self.embd_pdrop,
        )  # fmt: skip

    def axes(self) -> Axes:
        return {**PARAM_AXES, "positions/embedding": ("vocab", "embed")}

    def entries(self) -> list[Entry]:
        d, layer = self.n_embd, "transformer.h.{layer}"
        found = [
            Entry("embed/embedding", "transformer.wte.weight", "v d", {"v": self.vocab_size}),
            Entry("positions/embedding", "transformer.wpe.weight", "p d", {"p": self.n_positions}),
            Entry("head/kernel", "lm_head.weight", "d v -> v d", {"v": self.vocab_size}),
            Entry("layers/attention/o_proj/kernel", f"{layer}.attn.c_proj.weight", "n h d -> (n h) d"),
            Entry("layers/attention/o_proj/bias", f"{layer}.attn.c_proj.bias", "d"),
        ]
        for i, x in enumerate("qkv"):
            at = f"layers/attention/{x}_proj"
            # One tensor holds all three side by side, inputs first.
            kernel, bias = (1, i * d, 3 * d), (0, i * d, 3 * d)
            found += [
                Entry(f"{at}/kernel", f"{layer}.attn.c_attn.weight", "d n h -> d (n h)", part=kernel),
                Entry(f"{at}/bias", f"{layer}.attn.c_attn.bias", "n h -> (n h)", part=bias),
            ]
        for ours, theirs in (("up", "c_fc"), ("down", "c_proj")):
            found.append(Entry(f"layers/mlp/{ours}_proj/kernel", f"{layer}.mlp.{theirs}.weight", "d m"))
            found.append(Entry(f"layers/mlp/{ours}_proj/bias", f"{layer}.mlp.{theirs}.bias", "m"))
        norms = {"layers/attention_norm": f"{layer}.ln_1", "layers/mlp_norm": f"{layer}.ln_2"}
        for ours, theirs in {**norms, "norm": "transformer.ln_f"}.items():
            found += [
                Entry(f"{ours}/scale", f"{theirs}.weight", "d"),
                Entry(f"{ours}/bias", f"{theirs}.bias", "d"),
            ]
        return found

    def flops_per_token(self, length: int) -> float:
        layer = 4 * self.n_embd**2 + 2 * self.n_embd * self.inner
        matrices = self.n_layer * layer + self.n_embd * self.vocab_size
        return 6.0 * matrices + 12.0 * self.n_embd * self.n_layer * seen(None, length)

"""DeepSeek-V3 (DeepSeek-AI 2024): latent attention, many small experts and shared ones, tokens predicted ahead."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from flax import nnx

from dsjax.config.fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Takes
from dsjax.models.decoder import Ahead, Frame
from dsjax.models.families.base import Axes, linear, seen
from dsjax.models.families.mixtures import SparseConfig
from dsjax.models.latent_attention import LatentAttention, Latents
from dsjax.models.layers import GatedMLP
from dsjax.models.moe import Routing, balanced, mixture_axes
from dsjax.models.moe.block import MixtureConfig
from dsjax.models.moe.router import RouterBias
from dsjax.models.rotary import Rotary
from dsjax.models.transformer import Layer, Parts
from dsjax.models.weights import Entry

_STACKS = ("dense_layers", "layers", "ahead")


class DeepseekV3Config(SparseConfig):
    """DeepSeek-V3; `router_bias_update_rate` and `mtp_loss_weight` are ours."""

    model_type: ClassVar[str] = "deepseek_v3"
    architecture: ClassVar[str] = "DeepseekV3ForCausalLM"
    renamed: ClassVar[dict[str, str]] = {
        "aux_loss_alpha": "router_aux_loss_coef",
        "num_mtp_layers": "num_nextn_predict_layers",
        "num_local_experts": "n_routed_experts",
    }
    passed_over: ClassVar[frozenset[str]] = SparseConfig.passed_over | {
        "ep_size", "head_dim", "qk_head_dim", "seq_aux", "auto_map",
    }  # fmt: skip
    saved: ClassVar[tuple[type[nnx.Variable], ...]] = (RouterBias,)
    exact_tensors: ClassVar[tuple[str, ...]] = ("*.e_score_correction_bias",)
    ours: ClassVar[frozenset[str]] = SparseConfig.ours | {"mtp_loss_weight"}

    moe_intermediate_size: PositiveInt = 2048
    n_shared_experts: NonNegativeInt = 1
    n_routed_experts: PositiveInt = 256
    num_experts_per_tok: PositiveInt = 8
    routed_scaling_factor: PositiveFloat = 2.5
    kv_lora_rank: PositiveInt = 512
    q_lora_rank: PositiveInt | None = 1536
    qk_rope_head_dim: PositiveInt = 64
    v_head_dim: PositiveInt = 128
    qk_nope_head_dim: PositiveInt = 128
    n_group: PositiveInt = 8
    topk_group: PositiveInt = 4
    first_k_dense_replace: NonNegativeInt = 3
    norm_topk_prob: bool = True
    scoring_func: Literal["sigmoid"] = "sigmoid"
    rope_interleave: bool = True
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    moe_layer_freq: Annotated[Literal[1], Takes("1: experts in every layer after the dense ones")] = 1
    num_nextn_predict_layers: NonNegativeInt = 0
    router_aux_loss_coef: NonNegativeFloat = 1e-4
    router_bias_update_rate: NonNegativeFloat = 1e-3
    mtp_loss_weight: NonNegativeFloat = 0.3

    # ---- what the fields come to -----------------------------------------------------------------

    @property
    def experts(self) -> int:
        return self.n_routed_experts

    @property
    def expert_columns(self) -> int:
        return self.moe_intermediate_size

    @property
    def head_size(self) -> int:
        return self.qk_rope_head_dim

    @property
    def sparse_layers(self) -> int:
        """Layers with experts, the ones that look ahead not counted."""
        return self.num_hidden_layers - self.first_k_dense_replace

    def faults(self) -> list[str]:
        faults = super().faults()
        experts, groups = self.n_routed_experts, self.n_group
        if experts % groups:
            faults.append(f"model.n_group: {groups} does not divide model.n_routed_experts {experts}")
        elif self.topk_group > groups or self.num_experts_per_tok > self.topk_group * experts // groups:
            faults.append(
                f"model.topk_group: {self.topk_group} of {groups} groups hold {self.topk_group * experts // groups} "
                f"experts; model.num_experts_per_tok is {self.num_experts_per_tok}"
            )
        if self.sparse_layers < 1:
            faults.append(
                f"model.first_k_dense_replace: {self.first_k_dense_replace} leaves no layer with experts of "
                f"model.num_hidden_layers {self.num_hidden_layers}"
            )
        if self.kv_heads != self.num_attention_heads:
            faults.append("model.num_key_value_heads: all heads share one latent; leave it out")
        return faults

    def saved_config(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        values = super().saved_config(kept)
        if "num_mtp_layers" not in values:  # of which the library's own default is 1
            values.setdefault("num_nextn_predict_layers", self.num_nextn_predict_layers)
        return values

    def rotaries(self) -> tuple[Rotary, ...]:
        scaling = tuple((self.scaling or {}).items())
        return (Rotary(self.qk_rope_head_dim, self.theta, scaling, self.max_position_embeddings),)

    def mixture(self) -> MixtureConfig:
        routing = Routing(
            self.experts, self.num_experts_per_tok, "sigmoid", normalised=self.norm_topk_prob, groups=self.n_group,
            kept=self.topk_group, scale=self.routed_scaling_factor, biased=True, capacity=self.capacity_factor,
        )  # fmt: skip
        layers = self.sparse_layers + self.num_nextn_predict_layers
        return replace(super().mixture(), routing=routing, layers=layers, shared=self.n_shared_experts)

    def latents(self) -> Latents:
        """The attention of a layer."""
        whole = self.qk_nope_head_dim + self.qk_rope_head_dim
        scaling = self.scaling or {}
        # YaRN sharpens the scores of long contexts.
        sharper = scaling.get("mscale_all_dim") and scaling.get("factor", 1) > 1
        mscale = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1 if sharper else 1.0
        return Latents(
            self.hidden_size, self.num_attention_heads, self.q_lora_rank, self.kv_lora_rank, self.qk_nope_head_dim,
            self.qk_rope_head_dim, self.v_head_dim, self.rope_interleave, self.matrix_init, self.norm,
            mscale * mscale / math.sqrt(whole), self.attention_bias,
        )  # fmt: skip

    # ---- the layers ------------------------------------------------------------------------------

    def parts(self) -> Parts:
        latents = self.latents()
        return replace(super().parts(), attention=lambda rngs: LatentAttention(latents, rngs=rngs))

    def frame(self) -> Frame:
        frame, sparse = super().frame(), self.parts()

        def mlp(rngs: nnx.Rngs) -> nnx.Module:
            return GatedMLP(self.hidden_size, self.intermediate_size, init=self.matrix_init, rngs=rngs)

        dense, count = replace(sparse, mlp=mlp), self.num_nextn_predict_layers
        return replace(
            frame,
            layers=self.sparse_layers,
            dense_layers=self.first_k_dense_replace,
            dense_layer=lambda rngs: Layer(dense, rngs=rngs),
            ahead=Ahead(count, self.mtp_loss_weight, self.matrix_init) if count else None,
        )

    # ---- tables ----------------------------------------------------------------------------------

    def axes(self) -> Axes:
        attention: dict[str, tuple[str | None, ...]] = {
            "q_a_proj/kernel": ("embed", None), "q_a_proj/bias": (None,), "*_a_norm/scale": ("embed",),
            "q_proj/kernel": ("embed", "heads", "head_dim"), "kv_a_proj/kernel": ("embed", None),
            "kv_a_proj/bias": (None,), "kv_proj/kernel": ("embed", "heads", "head_dim"),
            "o_proj/kernel": ("heads", "head_dim", "embed"), "o_proj/bias": ("embed",),
        }  # fmt: skip
        table: dict[str, Any] = {**super().axes(), "ahead/proj/kernel": ("layers", "embed", None)}
        for stack in _STACKS:
            block = f"{stack}/block" if stack == "ahead" else stack
            table |= {f"{block}/attention/{name}": ("layers", *names) for name, names in attention.items()}
            table |= {
                f"{stack}/*_norm/scale": ("layers", "embed"),
                f"{block}/*_norm/scale": ("layers", "embed"),
            }
            for mlp in ("mlp", "mlp/shared"):
                table |= {
                    f"{block}/{mlp}/{x}_proj/kernel": ("layers", "embed", "mlp") for x in ("gate", "up")
                }
                table[f"{block}/{mlp}/down_proj/kernel"] = ("layers", "mlp", "embed")
            table |= mixture_axes(f"{block}/mlp")
        return table

    def entries(self) -> list[Entry]:
        dense, at = self.first_k_dense_replace, self.num_hidden_layers
        layer = [
            entry
            for entry in super().entries()
            if entry.path.startswith("layers/") and "attention/" not in entry.path
        ]
        layer += [
            *linear("attention/q_a_proj", "self_attn.q_a_proj", "d q -> q d", "q"),
            *linear("attention/kv_a_proj", "self_attn.kv_a_proj_with_mqa", "d c -> c d", "c"),
            *linear("attention/q_proj", "self_attn.q_b_proj" if self.q_lora_rank else "self_attn.q_proj",
                    "d n h -> (n h) d", "n h -> (n h)"),
            *linear("attention/kv_proj", "self_attn.kv_b_proj", "c n h -> (n h) c", "n h -> (n h)"),
            *linear("attention/o_proj", "self_attn.o_proj", "n h d -> d (n h)", "d"),
            *(Entry(f"layers/attention/{x}_norm/scale", f"model.layers.{{layer}}.self_attn.{x}_layernorm.weight", "d")
              for x in ("q_a", "kv_a")),
            *(entry for x in ("gate", "up", "down")
              for entry in linear(f"mlp/shared/{x}_proj", f"mlp.shared_experts.{x}_proj", "d m -> m d", "m")),
            Entry("layers/mlp/router/bias", "model.layers.{layer}.mlp.gate.e_score_correction_bias", "e"),
        ]  # fmt: skip
        norms = {"embed_norm": "enorm", "hidden_norm": "hnorm", "last_norm": "shared_head.norm"}
        own = [
            *(Entry(f"ahead/{ours}/scale", f"model.layers.{{layer}}.{theirs}.weight", "d", first=at)
              for ours, theirs in norms.items()),
            Entry("ahead/proj/kernel", "model.layers.{layer}.eh_proj.weight", "d o -> o d", first=at),
        ]  # fmt: skip
        rest = [entry for entry in super().entries() if not entry.path.startswith("layers/")]
        return [
            *rest,
            *own,
            *(moved(entry, "dense_layers", 0) for entry in layer),
            *(moved(entry, "layers", dense) for entry in layer),
            *(moved(entry, "ahead/block", at) for entry in layer),
        ]

    @property
    def ignored_tensors(self) -> list[str]:  # type: ignore[override]
        """Copies of what all share, which a saved model may hold beside the layers that look ahead."""
        ahead = range(self.num_hidden_layers, self.num_hidden_layers + max(1, self.num_nextn_predict_layers))
        names = ["embed_tokens.*", "shared_head.head.*"] if self.num_nextn_predict_layers else ["*"]
        return ["*.rotary_emb.inv_freq", *(f"model.layers.{i}.{name}" for i in ahead for name in names)]

    def after_step(self) -> Any:
        rate = self.router_bias_update_rate
        return balanced(rate) if rate else None

    def flops_per_token(self, length: int) -> float:
        d, n = self.hidden_size, self.num_attention_heads
        whole = self.qk_nope_head_dim + self.qk_rope_head_dim
        queries = (d + n * whole) * self.q_lora_rank if self.q_lora_rank else d * n * whole
        keys = d * (self.kv_lora_rank + self.qk_rope_head_dim)
        keys += self.kv_lora_rank * n * (self.qk_nope_head_dim + self.v_head_dim)
        attention = queries + keys + n * self.v_head_dim * d
        active = self.num_experts_per_tok + self.n_shared_experts
        sparse = d * (3 * active * self.moe_intermediate_size + self.experts)
        ahead = self.num_nextn_predict_layers
        layers = self.num_hidden_layers + ahead
        matrices = layers * attention + (self.sparse_layers + ahead) * sparse + ahead * 2 * d * d
        matrices += (
            self.first_k_dense_replace * 3 * d * self.intermediate_size + (1 + ahead) * d * self.vocab_size
        )
        return 6.0 * matrices + 6.0 * layers * n * (whole + self.v_head_dim) * seen(None, length)


def moved(entry: Entry, stack: str, first: int) -> Entry:
    """An entry of `layers` as one of another stack, whose first layer has this number."""
    return replace(entry, path=f"{stack}/{entry.path.removeprefix('layers/')}", first=first)

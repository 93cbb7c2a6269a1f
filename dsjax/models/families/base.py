"""What families of models have in common: the fields of their configs, their layer, its tables and weight map."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import jax
from flax import nnx
from pydantic import Field

from dsjax.config.fields import BelowOne, PositiveFloat, PositiveInt, Section, Takes
from dsjax.errors import ConfigError
from dsjax.mesh import named_leaves
from dsjax.models.decoder import Decoder, Frame, padded
from dsjax.models.layers import GatedMLP, Init, RMSNorm, normal, xavier_uniform
from dsjax.models.rotary import Rotary, check_scaling
from dsjax.models.transformer import Attention, Heads, Layer, Parts
from dsjax.models.weights import Entry, WeightMap

Axes = Mapping[str, tuple[str | None, ...]]
NoDropout = Annotated[float, Field(ge=0, le=0), Takes("0, as there is no such dropout here")]
Scaling = Annotated[dict[str, Any] | None, Takes("a mapping with rope_type, or null")]
LayerTypes = Annotated[
    list[Literal["full_attention", "sliding_attention"]] | None,
    Takes("a list of full_attention and sliding_attention, one a layer, or null"),
]

# Fields of a config.json that change no number of the model that is trained.
PASSED_OVER = frozenset({
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache", "bos_token_id",
    "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "cache_implementation", "pretraining_tp",
    "_name_or_path", "task_specific_params", "id2label", "label2id", "problem_type", "finetuning_task",
    "tokenizer_class", "output_attentions", "output_hidden_states", "return_dict", "gradient_checkpointing",
    "attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "chunk_size_feed_forward",
    "is_encoder_decoder", "is_decoder", "use_bfloat16", "unsloth_version", "unsloth_fixed",
})  # fmt: skip

# Activations by the names that configs have for them.
ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class FamilyConfig(Section):
    """A family: its config in Hugging Face's names, and what follows from it.

    A class of its own sets `model_type` and `architecture` and gives `frame`, `axes`, `entries` and
    `flops_per_token`.

    Raises:
      TypeError: a class that names its `model_type` and not its `architecture`.
    """

    model_type: ClassVar[str]
    renamed: ClassVar[Mapping[str, str]] = {}
    """Other names of fields -> their own."""
    passed_over: ClassVar[frozenset[str]] = PASSED_OVER
    positions_field: ClassVar[str] = "max_position_embeddings"
    ours: ClassVar[frozenset[str]] = frozenset({"dropout", "init"})
    """Fields that Hugging Face's config does not have and a trained model does not need."""
    exact_tensors: ClassVar[Sequence[str]] = ()
    """Patterns of names of tensors that are saved in float32 whatever the others are in."""
    saved: ClassVar[tuple[type[nnx.Variable], ...]] = ()
    """Kinds of variables that a saved model has besides parameters."""
    architecture: ClassVar[str]
    """Name of the class that reads it in the transformers library."""
    ignored_tensors: ClassVar[Sequence[str]] = ("*.rotary_emb.inv_freq",)
    prefix: ClassVar[str] = "model."

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if "model_type" in vars(cls) and "architecture" not in vars(cls):
            raise TypeError(f"{cls.__name__}: set architecture, the transformers library's class for it, too")

    vocab_size: PositiveInt
    tie_word_embeddings: bool = False
    initializer_range: PositiveFloat = 0.02

    @property
    def layers(self) -> int:
        """Number of layers."""
        raise AttributeError("a family says how many layers it has")

    @property
    def experts(self) -> int:
        """Experts of a layer; 0 where there are none."""
        return 0

    def faults(self) -> list[str]:
        """What makes no model, a line each."""
        return []

    def check(self) -> None:
        """Refuses what makes no model.

        Raises:
          ConfigError: a line a fault, naming the fields.
        """
        faults = self.faults()
        if faults:
            raise ConfigError(faults)

    def unsaved(self) -> list[str]:
        """Settings of a model that the transformers library would compute otherwise, a line each."""
        return []

    def saved_config(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """A config.json for a model of these settings.

        Args:
          kept: the one that it came with; fields of which the family knows nothing stay.
        """
        values = {name: value for name, value in kept.items() if name != "quantization_config"}
        for name, known in type(self).model_fields.items():
            if name in self.ours:
                continue
            value = getattr(self, name)
            name = next((n for n, own in self.renamed.items() if own == name and n in values), name)
            given = values[name] if name in values else None if known.is_required() else known.default
            if value != given:
                values[name] = value
        own = {"architectures": [self.architecture], "model_type": self.model_type}
        return {**own, **values} if not kept else {**values, **own}

    def frame(self) -> Frame:
        """What a `Decoder` is made of."""
        raise AttributeError("a family says what it is made of")

    def axes(self) -> Axes:
        """Path pattern -> logical names of a parameter's dimensions; more than the model has do no harm."""
        raise AttributeError("a family says how its parameters are cut")

    def entries(self) -> list[Entry]:
        """What tensors parameters are; more than the model has do no harm."""
        raise AttributeError("a family says what tensors it is saved as")

    def flops_per_token(self, length: int) -> float:
        """Model FLOPs a token, forward and backward: matrix products, and the scores that the mask keeps."""
        raise AttributeError("a family says what it computes")

    def after_step(self) -> Callable[[Any, Mapping[str, Any]], Any] | None:
        """What changes variables that are no parameters once a step (`ModelSpec.after_step`)."""
        return None

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding and columns of the head."""
        return padded(self.vocab_size)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Path of each parameter, and of what else is saved with them -> its shape."""
        frame = self.frame()
        abstract = nnx.eval_shape(lambda: Decoder(frame, rngs=nnx.Rngs(0)))
        saved = nnx.state(abstract, nnx.Any(nnx.Param, *self.saved))
        return {path: leaf.shape for path, leaf in named_leaves(saved).items()}

    def param_axes(self) -> dict[str, tuple[str | None, ...]]:
        """`axes` of the parameters that a model of these settings has."""
        paths = list(self.shapes())
        return {pattern: names for pattern, names in self.axes().items() if fnmatch.filter(paths, pattern)}

    def weights(self) -> WeightMap:
        """How the model's parameters and Hugging Face's tensors become one another."""
        ignored = list(self.ignored_tensors) + ["lm_head.weight"] * self.tie_word_embeddings
        return WeightMap(self.entries(), self.shapes(), ignored, self.prefix)


class TransformerConfig(FamilyConfig):
    """Families of rotary positions, RMSNorm and gated feed-forward layers; `dropout` and `init` are ours."""

    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    intermediate_size: PositiveInt
    max_position_embeddings: PositiveInt
    rms_norm_eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat | None = None
    rope_scaling: Scaling = None
    rope_parameters: Scaling = None
    hidden_act: Literal["silu"] = "silu"
    attention_bias: bool = False
    attention_dropout: NoDropout = 0.0
    dropout: BelowOne = 0.0
    init: Literal["default", "xavier_uniform"] = "default"

    norms: ClassVar[Mapping[str, str]] = {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attention/q_norm": "self_attn.q_norm",
        "attention/k_norm": "self_attn.k_norm",
    }
    """A layer's norms -> what they are called in a saved model."""
    feed_forward: ClassVar[Mapping[str, str]] = {
        "gate_proj": "mlp.gate_proj",
        "up_proj": "mlp.up_proj",
        "down_proj": "mlp.down_proj",
    }
    """The same of the matrices of its feed-forward part."""

    # ---- what the fields come to -----------------------------------------------------------------

    @property
    def layers(self) -> int:
        return self.num_hidden_layers

    @property
    def kv_heads(self) -> int:
        """Key/value heads: as many as query heads unless set."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Dimension of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def scaling(self) -> dict[str, Any] | None:
        """The rotary scaling, under whichever of its two names it was given."""
        return self.rope_parameters or self.rope_scaling

    @property
    def theta(self) -> float:
        """Base of the rotary frequencies."""
        return self.rope_theta or (self.scaling or {}).get("rope_theta") or 10000.0

    def rotaries(self) -> tuple[Rotary, ...]:
        """The rotary positions of heads, of each kind of layer where those differ in them."""
        scaling = tuple((self.scaling or {}).items())
        return (Rotary(self.head_size, self.theta, scaling, self.max_position_embeddings),)

    def layer_windows(self) -> list[int | None]:
        """How far back each layer looks."""
        return [None] * self.num_hidden_layers

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The different ones of `layer_windows`, in the order of the layers."""
        return tuple(dict.fromkeys(self.layer_windows()))

    def matrix_init(self, inputs: int, outputs: int) -> Init:
        """How a matrix of so many inputs and outputs is drawn."""
        if self.init == "xavier_uniform":
            return xavier_uniform(inputs, outputs)
        return normal(self.initializer_range)

    def faults(self) -> list[str]:
        faults = []
        heads, hidden = self.num_attention_heads, self.hidden_size
        if self.head_dim is None and hidden % heads:
            faults.append(
                f"model.num_attention_heads: {heads} does not divide model.hidden_size {hidden}; change one "
                "or set model.head_dim"
            )
        if heads % self.kv_heads:
            faults.append(
                f"model.num_key_value_heads: {self.kv_heads} does not divide model.num_attention_heads "
                f"{heads}"
            )
        if self.head_size % 2:
            faults.append(f"model.head_dim: rotary positions need an even number, got {self.head_size}")
        inner = (self.scaling or {}).get("rope_theta")
        if self.rope_theta and inner and self.rope_theta != inner:
            faults.append(
                f"model.rope_theta: {self.rope_theta:g}, and {inner:g} in the rope parameters; give one, or the same"
            )
        if self.rope_scaling and self.rope_parameters:
            faults.append("model.rope_scaling and model.rope_parameters are two names of one thing; give one")
        return faults or self.scaling_faults()

    def scaling_faults(self) -> list[str]:
        """What is wrong with the rotary scaling."""
        name = "model.rope_parameters" if self.rope_parameters else "model.rope_scaling"
        return scaling_faults(self.scaling, name)

    # ---- the layer, and what else differs ---------------------------------------------------------

    def norm(self, features: int | tuple[int, ...], rngs: nnx.Rngs) -> nnx.Module:
        """A norm over so many features."""
        return RMSNorm(features, eps=self.rms_norm_eps, rngs=rngs)

    def heads(self) -> Heads:
        """The attention of a layer."""
        return Heads(
            self.hidden_size, self.num_attention_heads, self.kv_heads, self.head_size, self.matrix_init,
            bias=self.attention_bias, out_bias=self.attention_bias, windows=self.windows,
        )  # fmt: skip

    def mlp(self, rngs: nnx.Rngs) -> nnx.Module:
        """The feed-forward part of a layer."""
        activation = ACTIVATIONS[self.hidden_act]
        return GatedMLP(
            self.hidden_size, self.intermediate_size, init=self.matrix_init, activation=activation, rngs=rngs
        )

    def parts(self) -> Parts:
        """What a layer is made of."""
        heads = self.heads()
        return Parts(
            norm=lambda rngs: self.norm(self.hidden_size, rngs),
            attention=lambda rngs: Attention(heads, rngs=rngs),
            mlp=self.mlp,
            dropout=self.dropout,
        )

    def frame(self) -> Frame:
        parts, windows = self.parts(), self.windows
        several = len(windows) > 1
        return Frame(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            layers=self.num_hidden_layers,
            layer=lambda rngs: Layer(parts, rngs=rngs),
            norm=lambda rngs: self.norm(self.hidden_size, rngs),
            init=self.matrix_init(self.hidden_size, self.vocab_size),
            tied=self.tie_word_embeddings,
            rotary=self.rotaries(),
            kinds=tuple(windows.index(width) for width in self.layer_windows()) if several else None,
        )

    def axes(self) -> Axes:
        return PARAM_AXES

    def entries(self) -> list[Entry]:
        vocabulary = {"v": self.vocab_size}
        return [
            Entry("embed/embedding", "model.embed_tokens.weight", "v d", vocabulary),
            Entry("head/kernel", "lm_head.weight", "d v -> v d", vocabulary),
            Entry("norm/scale", "model.norm.weight", "d"),
            Entry("norm/bias", "model.norm.bias", "d"),
            *(of_layer(f"{ours}/scale", f"{theirs}.weight", "d") for ours, theirs in self.norms.items()),
            *(of_layer(f"{ours}/bias", f"{theirs}.bias", "d") for ours, theirs in self.norms.items()),
            *linear("attention/q_proj", "self_attn.q_proj", "d n h -> (n h) d", "n h -> (n h)"),
            *linear("attention/k_proj", "self_attn.k_proj", "d n h -> (n h) d", "n h -> (n h)"),
            *linear("attention/v_proj", "self_attn.v_proj", "d n h -> (n h) d", "n h -> (n h)"),
            *linear("attention/o_proj", "self_attn.o_proj", "n h d -> d (n h)", "d"),
            *itertools.chain.from_iterable(
                linear(f"mlp/{ours}", theirs, "d m -> m d", "m") for ours, theirs in self.feed_forward.items()
            ),
        ]

    def flops_per_token(self, length: int) -> float:
        q, kv = self.num_attention_heads * self.head_size, self.kv_heads * self.head_size
        layer = 2 * self.hidden_size * (q + kv)
        layer += len(self.feed_forward) * self.hidden_size * self.intermediate_size
        matrices = self.num_hidden_layers * layer + self.hidden_size * self.vocab_size
        return 6.0 * matrices + 12.0 * q * sum(seen(width, length) for width in self.layer_windows())


PARAM_AXES: Axes = {
    "embed/embedding": ("vocab", "embed"),
    "layers/attention/[qk]_norm/scale": ("layers", "head_dim"),
    "layers/*_norm/scale": ("layers", "embed"),
    "layers/*_norm/bias": ("layers", "embed"),
    "layers/attention/q_proj/kernel": ("layers", "embed", "heads", "head_dim"),
    "layers/attention/[kv]_proj/kernel": ("layers", "embed", "kv_heads", "head_dim"),
    "layers/attention/o_proj/kernel": ("layers", "heads", "head_dim", "embed"),
    "layers/attention/q_proj/bias": ("layers", "heads", "head_dim"),
    "layers/attention/[kv]_proj/bias": ("layers", "kv_heads", "head_dim"),
    "layers/attention/o_proj/bias": ("layers", "embed"),
    "layers/mlp/gate_proj/kernel": ("layers", "embed", "mlp"),
    "layers/mlp/up_proj/kernel": ("layers", "embed", "mlp"),
    "layers/mlp/down_proj/kernel": ("layers", "mlp", "embed"),
    "layers/mlp/gate_proj/bias": ("layers", "mlp"),
    "layers/mlp/up_proj/bias": ("layers", "mlp"),
    "layers/mlp/down_proj/bias": ("layers", "embed"),
    "norm/scale": ("embed",),
    "norm/bias": ("embed",),
    "head/kernel": ("embed", "vocab"),
}


def of_layer(ours: str, theirs: str, pattern: str) -> Entry:
    """A parameter of the stacked layers, and the tensor of each."""
    return Entry(f"layers/{ours}", f"model.layers.{{layer}}.{theirs}", pattern)


def linear(ours: str, theirs: str, kernel: str, bias: str) -> list[Entry]:
    """A projection's kernel and bias by their patterns."""
    return [
        of_layer(f"{ours}/kernel", f"{theirs}.weight", kernel),
        of_layer(f"{ours}/bias", f"{theirs}.bias", bias),
    ]


def seen(window: int | None, length: int) -> float:
    """Keys that a query sees, on average, in a causal sequence of a length."""
    if not length:
        return 0.0
    window = min(window or length, length)
    return window - window * (window - 1) / (2 * length)


def scaling_faults(scaling: Mapping[str, Any] | None, name: str) -> list[str]:
    """What is wrong with a rotary scaling that was given under this name."""
    try:
        check_scaling(scaling, name)
    except ConfigError as error:
        return list(error.faults)
    return []


def typed_windows(types: Sequence[str], window: int | None) -> list[int | None]:
    """How far back layers of these types look."""
    return [window if kind == "sliding_attention" else None for kind in types]


def type_faults(types: Sequence[str] | None, window: int | None, layers: int) -> list[str]:
    """What is wrong with `layer_types`."""
    if types is None:
        return []
    if len(types) != layers:
        return [f"model.layer_types: names {len(types)} layers, model.num_hidden_layers is {layers}"]
    if window is None and "sliding_attention" in types:
        return ["model.layer_types: has sliding_attention, but no window is set; set model.sliding_window"]
    return []

"""The Llama 3 family: RMSNorm, rotary positions, grouped-query attention, SwiGLU (Dubey et al. 2024).

Letters of shapes: b batch, s sequence, n query heads, k key/value heads, h head dimension, d hidden.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from pydantic import Field

from dsjax.config.fields import BelowOne, PositiveFloat, PositiveInt, Section, Takes
from dsjax.errors import ConfigError
from dsjax.mesh import constrain, current_layout, gathered, zigzag_order
from dsjax.models.attention import attention
from dsjax.models.layers import (
    Embedding,
    GatedMLP,
    Init,
    Linear,
    Matrix,
    RMSNorm,
    gather_sequence,
    normal,
    xavier_uniform,
)
from dsjax.models.rotary import Rotary, Tables, check_scaling, rotate
from dsjax.models.spec import Trunk
from dsjax.models.stack import run_stacked, stacked

# Columns of the vocabulary are padded to a multiple of this, so that they divide over any mesh.
_VOCAB_MULTIPLE = 128

PARAM_AXES: dict[str, tuple[str, ...]] = {
    "embed/embedding": ("vocab", "embed"),
    "layers/*_norm/scale": ("layers", "embed"),
    "layers/attention/q_proj/kernel": ("layers", "embed", "heads", "head_dim"),
    "layers/attention/[kv]_proj/kernel": ("layers", "embed", "kv_heads", "head_dim"),
    "layers/attention/o_proj/kernel": ("layers", "heads", "head_dim", "embed"),
    "layers/mlp/gate_proj/kernel": ("layers", "embed", "mlp"),
    "layers/mlp/up_proj/kernel": ("layers", "embed", "mlp"),
    "layers/mlp/down_proj/kernel": ("layers", "mlp", "embed"),
    "norm/scale": ("embed",),
    "head/kernel": ("embed", "vocab"),
}


def param_axes(config: LlamaConfig) -> dict[str, tuple[str, ...]]:
    """Logical names of the dimensions of the parameters that a model of these settings has."""
    return {
        path: names
        for path, names in PARAM_AXES.items()
        if path != "head/kernel" or not config.tie_word_embeddings
    }


class LlamaConfig(Section):
    """Sizes and settings, in Hugging Face's names; `dropout`, `init` and `sliding_window` are ours."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    intermediate_size: PositiveInt
    max_position_embeddings: PositiveInt
    rms_norm_eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat | None = None
    rope_scaling: Annotated[dict[str, Any] | None, Takes("a mapping with rope_type, or null")] = None
    rope_parameters: Annotated[dict[str, Any] | None, Takes("a mapping with rope_type, or null")] = None
    tie_word_embeddings: bool = False
    initializer_range: PositiveFloat = 0.02
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Annotated[Literal[False], Takes("false")] = False
    mlp_bias: Annotated[Literal[False], Takes("false")] = False
    attention_dropout: Annotated[float, Field(ge=0, le=0), Takes("0")] = 0.0
    dropout: BelowOne = 0.0
    init: Literal["default", "xavier_uniform"] = "default"
    sliding_window: PositiveInt | None = None

    @property
    def kv_heads(self) -> int:
        """Key/value heads: as many as query heads unless set."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Dimension of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding and columns of the head."""
        return -(-self.vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE

    @property
    def scaling(self) -> dict[str, Any] | None:
        """The rotary scaling, under whichever of its two names it was given."""
        return self.rope_parameters or self.rope_scaling

    @property
    def theta(self) -> float:
        """Base of the rotary frequencies."""
        return self.rope_theta or (self.scaling or {}).get("rope_theta") or 10000.0

    def check(self) -> None:
        """Refuses sizes that make no model.

        Raises:
          ConfigError: a line a fault, naming the fields.
        """
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
        if self.rope_scaling and self.rope_parameters:
            faults.append("model.rope_scaling and model.rope_parameters are two names of one thing; give one")
        if faults:
            raise ConfigError(faults)
        check_scaling(self.scaling, "model.rope_parameters" if self.rope_parameters else "model.rope_scaling")

    @property
    def rotary(self) -> Rotary:
        """The rotary positions of a head."""
        scaling = tuple((self.scaling or {}).items())
        return Rotary(self.head_size, self.theta, scaling, self.max_position_embeddings)

    def matrix_init(self, inputs: int, outputs: int) -> Init:
        """How a matrix of so many inputs and outputs is drawn."""
        if self.init == "xavier_uniform":
            return xavier_uniform(inputs, outputs)
        return normal(self.initializer_range)

    def flops_per_token(self, length: int) -> float:
        """Model FLOPs a token, forward and backward: matrix products, and the scores that the mask keeps."""
        q, kv = self.num_attention_heads * self.head_size, self.kv_heads * self.head_size
        layer = 2 * self.hidden_size * (q + kv) + 3 * self.hidden_size * self.intermediate_size
        matrices = self.num_hidden_layers * layer + self.hidden_size * self.vocab_size
        window = min(self.sliding_window or length, length)
        seen = window - window * (window - 1) / (2 * length)
        return 6.0 * matrices + 12.0 * self.num_hidden_layers * q * seen


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        d, h = config.hidden_size, config.head_size
        self.window = config.sliding_window

        def projection(inputs: tuple[int, ...], outputs: tuple[int, ...], size: int) -> Linear:
            init = config.matrix_init(*((d, size) if inputs == (d,) else (size, d)))
            return Linear(inputs, outputs, init=init, rngs=rngs)

        n, k = config.num_attention_heads, config.kv_heads
        self.q_proj = projection((d,), (n, h), n * h)
        self.k_proj = projection((d,), (k, h), k * h)
        self.v_proj = projection((d,), (k, h), k * h)
        self.o_proj = projection((n, h), (d,), n * h)

    def __call__(
        self, x_bsd: jax.Array, rope: Tables, segment_ids_bs: jax.Array | None, zigzag: bool
    ) -> jax.Array:
        q = constrain(rotate(self.q_proj(x_bsd), *rope), "batch", "sequence", "heads", None)
        k = constrain(rotate(self.k_proj(x_bsd), *rope), "batch", "sequence", "kv_heads", None)
        v = constrain(self.v_proj(x_bsd), "batch", "sequence", "kv_heads", None)
        out = attention(q, k, v, segment_ids_bs=segment_ids_bs, window=self.window, zigzag=zigzag)
        return self.o_proj(constrain(out, "batch", "sequence", "columns", None))


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), each with dropout on what is added.

    What stands between the products (norms, dropout, sums) is cut along the sequence over `tensor` too.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        d, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(d, eps=eps, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(d, eps=eps, rngs=rngs)
        self.mlp = GatedMLP(d, config.intermediate_size, init=config.matrix_init, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs) if config.dropout else None

    def __call__(
        self, x_bsd: jax.Array, rope: Tables, segment_ids_bs: jax.Array | None, zigzag: bool
    ) -> jax.Array:
        def added(y_bsd: jax.Array) -> jax.Array:
            y_bsd = y_bsd if self.dropout is None else self.dropout(y_bsd)
            return constrain(y_bsd, "batch", "residual", "embed")

        attended = self.attention(gather_sequence(self.attention_norm(x_bsd)), rope, segment_ids_bs, zigzag)
        x_bsd = x_bsd + added(attended)
        return x_bsd + added(self.mlp(gather_sequence(self.mlp_norm(x_bsd))))


class Llama(nnx.Module):
    """A causal language model.

    Args:
      config: checked sizes.
      remat, unroll: how the stack of layers runs (see `dsjax.models.stack`); on a mesh of several
        devices it always loops.
    """

    def __init__(self, config: LlamaConfig, *, remat: str = "none", unroll: bool = False, rngs: nnx.Rngs):
        self.remat, self.unroll = remat, unroll
        self.vocab_size = config.vocab_size
        self.rotary = config.rotary
        d, padded = config.hidden_size, config.padded_vocab
        init = config.matrix_init(d, config.vocab_size)
        self.embed = Embedding(padded, d, init=init, rngs=rngs)
        self.layers = stacked(lambda rngs: Layer(config, rngs=rngs), config.num_hidden_layers, rngs)
        self.norm = RMSNorm(d, eps=config.rms_norm_eps, rngs=rngs)
        self.head = None if config.tie_word_embeddings else Matrix((d,), (padded,), init=init, rngs=rngs)

    def embedded(self, tokens_bs: jax.Array) -> jax.Array:
        """The input [b, s, d] of the first layer for int32 tokens."""
        return constrain(self.embed(tokens_bs), "batch", "residual", "embed")

    def hidden(
        self,
        tokens_bs: jax.Array,
        *,
        positions_bs: jax.Array | None = None,
        segment_ids_bs: jax.Array | None = None,
        zigzag: bool = False,
    ) -> jax.Array:
        """States [b, s, d] after the last norm, in the compute type.

        Args:
          tokens_bs: int32.
          positions_bs: int32, a token's place in its document, for rotary positions; default 0, 1, ...
          segment_ids_bs: int32, a token's document; attention stays within it.
          zigzag: the columns lie in `zigzag_order` over the mesh's `context` axis.
        """
        layout = current_layout()
        if positions_bs is None:
            length = tokens_bs.shape[1]
            order = zigzag_order(length, layout.axis_size("context")) if zigzag and layout else range(length)
            positions_bs = jnp.asarray(order)[None]
        rope = self.rotary.tables(positions_bs)
        x_bsd = run_stacked(
            self.layers,
            self.embedded(tokens_bs),
            lambda layer, x: layer(x, rope, segment_ids_bs, zigzag),
            remat=self.remat,
            unroll=self.unroll and (layout is None or layout.alone),
        )
        return self.norm(x_bsd, "norm")

    @property
    def head_dtype(self) -> Any:
        """The type in which the head multiplies; None: that of its input."""
        return self.embed.dtype if self.head is None else self.head.dtype

    def unembedding(self) -> jax.Array:
        """The head [d, padded vocabulary], gathered over `fsdp`; the embedding's transpose if tied."""
        if self.head is None:
            return self.embed.table("embed").T
        return gathered({"kernel": self.head.kernel[...]}, "head")["kernel"]

    def __call__(self, tokens_bs: jax.Array, **where: Any) -> jax.Array:
        """Logits, float32 [b, s, vocab_size]; keyword arguments as for `hidden`."""
        hidden_bsd = self.hidden(tokens_bs, **where)
        dtype = self.head_dtype or hidden_bsd.dtype
        kernel = self.unembedding().astype(dtype)
        logits = jnp.dot(hidden_bsd.astype(dtype), kernel, preferred_element_type=jnp.float32)
        return constrain(logits, "batch", "sequence", "vocab")[..., : self.vocab_size]


def trunk(config: LlamaConfig) -> Trunk:
    """The model's pieces, for a pipeline."""
    rotary = config.rotary
    return Trunk(
        where=lambda positions, segments, zigzag: (rotary.tables(positions), segments, zigzag),
        embed=lambda model, tokens: model.embedded(tokens),
        layer=lambda layer, x, where: layer(x, *where),
        norm=lambda model, x: model.norm(x, "norm"),
    )

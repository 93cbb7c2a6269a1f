"""A causal language model of any family: embedding, a stack of layers, last norm, head.

A family says in a `Frame` what its layers are and in what else it differs.

Letters of shapes: b batch, s sequence, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.mesh import constrain, current_layout, gathered, zigzag_order
from dsjax.models.layers import Embedding, Init, Linear, Matrix
from dsjax.models.rotary import Rotary
from dsjax.models.spec import LayerKind, Trunk, Where
from dsjax.models.stack import run_stacked, stacked
from dsjax.models.variables import LayerNumber

# Rows of tables (vocabulary, positions) are padded to a multiple of this, so that they divide over any mesh.
_ROWS_MULTIPLE = 128


def padded(rows: int) -> int:
    """Rows of a table with its padding."""
    return -(-rows // _ROWS_MULTIPLE) * _ROWS_MULTIPLE


@dataclass(frozen=True)
class Ahead:
    """Layers after the last one, each of which predicts a token further (DeepSeek-AI 2024, section 2.2).

    Attributes:
      count: of them.
      weight: of their mean loss.
      init: (inputs, outputs) -> initialiser of a matrix of that size.
    """

    count: int
    weight: float
    init: Callable[[int, int], Init]


class AheadLayer(nnx.Module):
    """States and the next token's embedding, joined into the input of a layer; norm of what comes out."""

    def __init__(self, frame: Frame, ahead: Ahead, *, rngs: nnx.Rngs):
        d = frame.hidden_size
        self.embed_norm, self.hidden_norm = frame.norm(rngs), frame.norm(rngs)
        self.proj = Linear((2 * d,), (d,), init=ahead.init(2 * d, d), rngs=rngs)
        self.block = frame.layer(rngs)
        self.last_norm = frame.norm(rngs)

    def __call__(self, hidden_bsd: jax.Array, embedded_bsd: jax.Array, where: Where) -> tuple[Any, ...]:
        """The states after it, and what else its layer returned."""
        both = jnp.concatenate([self.embed_norm(embedded_bsd), self.hidden_norm(hidden_bsd)], axis=-1)
        made = self.block(constrain(self.proj(both), "batch", "residual", "embed"), where)
        x, *more = made if isinstance(made, tuple) else (made,)
        return (self.last_norm(x), *more)


@dataclass(frozen=True)
class Frame:
    """What a family chooses of a decoder.

    Attributes:
      layer: makes one layer, called with (x_bsd, `Where`).
      norm: makes the last norm.
      init: draws embedding, table of positions and head.
      tied: the head is the embedding's transpose.
      rotary: each kind of rotary positions that layers take.
      positions: rows of a learned table of positions; None: there is none.
      kinds: of each layer, where layers differ in how they compute (`LayerKind`).
      embed_scale: factor on embeddings, rounded to their type.
      logit_cap: logits are cap * tanh(logits / cap).
      dropout: of the first layer's input.
      dense_layers, dense_layer: layers of another shape before the others, which return x alone.
      ahead: layers that look further ahead; None: there are none.
      adds: the metrics of layers that return (x, what they add to the loss, metrics): (name, shapes of (sum, weight)
        or `Tally`); None: they return x alone.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    layer: Callable[[nnx.Rngs], nnx.Module]
    norm: Callable[[nnx.Rngs], nnx.Module]
    init: Init
    tied: bool = False
    rotary: tuple[Rotary, ...] = ()
    positions: int | None = None
    kinds: tuple[int, ...] | None = None
    embed_scale: float | None = None
    logit_cap: float | None = None
    dropout: float = 0.0
    dense_layers: int = 0
    dense_layer: Callable[[nnx.Rngs], nnx.Module] | None = None
    ahead: Ahead | None = None
    adds: tuple[tuple[str, Any], ...] | None = None

    def where(
        self, positions_bs: Any, segment_ids_bs: Any, zigzag: bool, frequencies: tuple[Any, ...] | None = None
    ) -> Where:
        """What the model's parts need besides their input (see `Trunk.where`).

        Args:
          frequencies: of each kind of rotary positions, as `Rotary.tables` takes them.
        """
        own = frequencies or (None,) * len(self.rotary)
        ropes = tuple(r.tables(positions_bs, f) for r, f in zip(self.rotary, own, strict=True))
        return Where(ropes, segment_ids_bs, zigzag, None if self.positions is None else positions_bs)

    @property
    def trunk(self) -> Trunk:
        """The model's pieces, for a pipeline."""
        return Trunk(
            where=self.where,
            embed=lambda model, tokens, where: model.embedded(tokens, where),
            layer=lambda layer, x, where: layer(x, where),
            norm=lambda model, x: model.norm(x, "norm"),
            ahead=self.ahead.count if self.ahead else 0,
        )


class Decoder(nnx.Module):
    """A causal language model.

    Args:
      frame: the family's choices.
      remat, unroll: how the stack of layers runs (see `dsjax.models.stack`); on a mesh of several devices it
        always loops.
    """

    def __init__(self, frame: Frame, *, remat: str = "none", unroll: bool = False, rngs: nnx.Rngs):
        self.remat, self.unroll, self.frame = remat, unroll, frame
        self.vocab_size, self.logit_cap = frame.vocab_size, frame.logit_cap
        d, rows = frame.hidden_size, padded(frame.vocab_size)
        self.embed = Embedding(rows, d, init=frame.init, rngs=rngs)
        table = frame.positions and padded(frame.positions)
        self.positions = Embedding(table, d, init=frame.init, rngs=rngs) if table else None
        self.dropout = nnx.Dropout(frame.dropout, rngs=rngs) if frame.dropout else None
        dense = frame.dense_layer
        self.dense_layers = stacked(dense, frame.dense_layers, rngs) if dense and frame.dense_layers else None
        self.layers = stacked(frame.layer, frame.layers, rngs)
        for _, variable in nnx.iter_graph(self.layers):
            if isinstance(variable, LayerKind):
                variable[...] = jnp.asarray(frame.kinds, jnp.int32)
        ahead = frame.ahead
        self.ahead = (
            stacked(lambda rngs: AheadLayer(frame, ahead, rngs=rngs), ahead.count, rngs) if ahead else None
        )
        for _, variable in nnx.iter_graph(self.ahead) if ahead else ():
            if isinstance(variable, LayerNumber):  # counted on from the layers before them
                variable[...] = variable[...] + frame.layers
        self.deterministic = False
        self.norm = frame.norm(rngs)
        self.head = None if frame.tied else Matrix((d,), (rows,), init=frame.init, rngs=rngs)

    def embedded(self, tokens_bs: jax.Array, where: Where) -> jax.Array:
        """The input [b, s, d] of the stack `layers` for int32 tokens."""
        x_bsd = self.embed(tokens_bs)
        if self.frame.embed_scale is not None:
            x_bsd = x_bsd * jnp.asarray(self.frame.embed_scale, x_bsd.dtype)
        if self.positions is not None:
            x_bsd = x_bsd + self.positions(jnp.broadcast_to(where.positions_bs, tokens_bs.shape))
        x_bsd = x_bsd if self.dropout is None else self.dropout(x_bsd)
        x_bsd = constrain(x_bsd, "batch", "residual", "embed")
        if self.dense_layers is None:
            return x_bsd
        return self._through(self.dense_layers, "dense_layers", x_bsd, lambda layer, x: layer(x, where))

    def _through(self, stack: nnx.Module, prefix: str, x: Any, call: Callable[[Any, Any], Any]) -> Any:
        layout = current_layout()
        unroll = self.unroll and (layout is None or layout.alone)
        return run_stacked(stack, x, call, prefix=prefix, remat=self.remat, unroll=unroll)

    def outputs(
        self,
        tokens_bs: jax.Array,
        *,
        positions_bs: jax.Array | None = None,
        segment_ids_bs: jax.Array | None = None,
        zigzag: bool = False,
    ) -> tuple[jax.Array, jax.Array | None, dict[str, Any]]:
        """(`hidden`, what the layers add to the loss, their metrics); None and {} where they add nothing."""
        if positions_bs is None:
            layout, length = current_layout(), tokens_bs.shape[1]
            order = zigzag_order(length, layout.axis_size("context")) if zigzag and layout else range(length)
            positions_bs = jnp.asarray(order)[None]
        return self._through_all(tokens_bs, self.frame.where(positions_bs, segment_ids_bs, zigzag))

    def _through_all(
        self, tokens_bs: jax.Array, where: Where
    ) -> tuple[jax.Array, jax.Array | None, dict[str, Any]]:
        x_bsd = self.embedded(tokens_bs, where)
        if self.frame.adds is None:
            x_bsd = self._through(self.layers, "layers", x_bsd, lambda layer, x: layer(x, where))
            return self.norm(x_bsd, "norm"), None, {}

        def call(layer: Any, carry: Any) -> Any:
            x, loss, metrics = carry
            x, more, named = layer(x, where)
            return x, loss + more, jax.tree.map(jnp.add, metrics, named)

        nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), dict(self.frame.adds))
        start = (x_bsd, jnp.zeros((), jnp.float32), nothing)
        x_bsd, loss, metrics = self._through(self.layers, "layers", start, call)
        return self.norm(x_bsd, "norm"), loss, metrics

    def further(
        self, hidden_bsd: jax.Array, tokens_bsk: jax.Array, where: Where
    ) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        """States [k, b, s, d] from which tokens further ahead are predicted, what is added to the loss, and metrics.

        Args:
          hidden_bsd: as `hidden` returns them.
          tokens_bsk: int32: the next token, the one after it, ...
        """
        embedded = jnp.stack([self.embed(tokens_bsk[..., k]) for k in range(tokens_bsk.shape[-1])])

        def call(layer: Any, carry: Any) -> Any:
            k, hidden, states, loss, metrics = carry
            here = jax.lax.dynamic_index_in_dim(embedded, k, keepdims=False)
            hidden, *more = layer(hidden, here, where)
            if more:
                loss, metrics = loss + more[0], jax.tree.map(jnp.add, metrics, more[1])
            return k + 1, hidden, states.at[k].set(hidden), loss, metrics

        nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), dict(self.frame.adds or ()))
        start = (jnp.int32(0), hidden_bsd, jnp.zeros_like(embedded, hidden_bsd.dtype), jnp.zeros(()), nothing)
        assert self.ahead is not None
        _, _, states, loss, metrics = run_stacked(self.ahead, start, call, prefix="ahead", remat=self.remat)
        return states, loss, metrics

    def hidden(self, tokens_bs: jax.Array, **where: Any) -> jax.Array:
        """States [b, s, d] after the last norm, in the compute type.

        Args:
          tokens_bs: int32.
          positions_bs: int32, a token's place in its document; default 0, 1, ...
          segment_ids_bs: int32, a token's document; attention stays within it.
          zigzag: the columns lie in `zigzag_order` over the mesh's `context` axis.
        """
        return self.outputs(tokens_bs, **where)[0]

    def decoded(
        self,
        tokens_bs: jax.Array,
        start_b: jax.Array,
        segment_ids_bs: jax.Array,
        frequencies: tuple[jax.Array, ...],
    ) -> jax.Array:
        """`hidden` of tokens that go on from what attentions kept of their rows (`dsjax.models.decoding`).

        Args:
          tokens_bs: int32, those at places `start_b`, `start_b` + 1, ... of their rows.
          segment_ids_bs: 0 where there is no token: nothing that counts may come of it.
          frequencies: of each kind of rotary positions, as `Rotary.tables` takes them.
        """
        positions = start_b[:, None] + jnp.arange(tokens_bs.shape[1])
        where = self.frame.where(positions, segment_ids_bs, False, frequencies)
        return self._through_all(tokens_bs, where._replace(start_b=start_b))[0]

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
        return self.logits(self.hidden(tokens_bs, **where))

    def logits(self, hidden_bsd: jax.Array) -> jax.Array:
        """Logits, float32 [b, s, vocab_size], of states as `hidden` returns them."""
        dtype = self.head_dtype or hidden_bsd.dtype
        kernel = self.unembedding().astype(dtype)
        logits = jnp.dot(hidden_bsd.astype(dtype), kernel, preferred_element_type=jnp.float32)
        if self.logit_cap is not None:
            logits = self.logit_cap * jnp.tanh(logits / self.logit_cap)
        return constrain(logits, "batch", "sequence", "vocab")[..., : self.vocab_size]

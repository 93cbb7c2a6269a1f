"""The layer of a transformer, with the choices in which families differ: biases, norms, windows, caps.

Letters of shapes: b batch, s sequence, n query heads, k key/value heads, h head dimension, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.mesh import constrain
from dsjax.models.attention import attention
from dsjax.models.decoding import Decodes
from dsjax.models.layers import Init, Linear, gather_sequence
from dsjax.models.moe import Mixture
from dsjax.models.rotary import rotate
from dsjax.models.spec import LayerKind, Where

Make = Callable[[nnx.Rngs], nnx.Module]
"""Makes a module of a layer."""


@dataclass(frozen=True)
class Heads:
    """Sizes and choices of grouped-query attention.

    Attributes:
      init: (inputs, outputs) -> initialiser of a matrix of that size.
      bias, out_bias: of the projections to queries, keys and values; of the one back.
      norm: makes the norms of queries and keys, ``norm(heads, rngs)``; None: there are none.
      rotary: whether queries and keys are rotated by their positions.
      windows: how far back a layer looks; several: each layer's kind tells which is its own, and which of the
        rotary positions, if there are several of those too.
      scale: of the scores; None: 1 / sqrt(head_dim).
      cap: of the scores (see `attention`).
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    init: Callable[[int, int], Init]
    bias: bool = False
    out_bias: bool = False
    norm: Callable[[int, nnx.Rngs], nnx.Module] | None = None
    rotary: bool = True
    windows: tuple[int | None, ...] = (None,)
    scale: float | None = None
    cap: float | None = None


class Attention(Decodes):
    """Grouped-query attention: project, normalise and rotate as `Heads` says, attend, project back."""

    def __init__(self, sizes: Heads, *, rngs: nnx.Rngs):
        d, n, k, h = sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_dim
        self.kv_shape = (k, h)
        self.windows, self.scale, self.cap = sizes.windows, sizes.scale, sizes.cap
        self.rotary = sizes.rotary

        def inwards(heads: int) -> Linear:
            return Linear((d,), (heads, h), init=sizes.init(d, heads * h), bias=sizes.bias, rngs=rngs)

        self.q_proj, self.k_proj, self.v_proj = inwards(n), inwards(k), inwards(k)
        self.o_proj = Linear((n, h), (d,), init=sizes.init(n * h, d), bias=sizes.out_bias, rngs=rngs)
        self.q_norm = sizes.norm(n, rngs) if sizes.norm else None
        self.k_norm = sizes.norm(k, rngs) if sizes.norm else None
        self.kind = LayerKind(jnp.zeros((), jnp.int32)) if len(sizes.windows) > 1 else None

    def __call__(self, x_bsd: jax.Array, where: Where) -> jax.Array:
        kind = None if self.kind is None else self.kind[...]
        rope = where.ropes[0] if self.rotary else ()
        if len(where.ropes) > 1 and kind is not None:
            rope = jax.tree.map(lambda *tables: jax.lax.select_n(kind, *tables), *where.ropes)

        def placed(projection: Any, norm: Any, name: str) -> jax.Array:
            y = projection(x_bsd)
            y = y if norm is None else norm(y)
            return constrain(rotate(y, *rope) if rope else y, "batch", "sequence", name, None)

        q = placed(self.q_proj, self.q_norm, "heads")
        k = placed(self.k_proj, self.k_norm, "kv_heads")
        v = constrain(self.v_proj(x_bsd), "batch", "sequence", "kv_heads", None)
        if self.cache is not None:
            out = self.cache.attend(
                q, k, v, where.start_b, windows=self.windows, kind=kind, scale=self.scale, cap=self.cap
            )
        else:
            out = attention(
                q, k, v, segment_ids_bs=where.segment_ids_bs, zigzag=where.zigzag,
                window=self.windows, kind=kind, scale=self.scale, cap=self.cap,
            )  # fmt: skip
        return self.o_proj(constrain(out, "batch", "sequence", "columns", None))

    def kept(self) -> dict[str, jax.ShapeDtypeStruct]:
        """See `Decodes`."""
        return {
            name: jax.ShapeDtypeStruct(self.kv_shape, projection.dtype or projection.kernel.dtype)
            for name, projection in (("keys", self.k_proj), ("values", self.v_proj))
        }


@dataclass(frozen=True)
class Parts:
    """What a layer is made of.

    Attributes:
      norm: makes each of its norms.
      attention: makes a module that is called with (x_bsd, where).
      mlp: makes a module that is called with x_bsd (a `Mixture` also with the documents of its tokens); besides what
        is added to x it may return what the layer adds to the loss and to the metrics.
      before, after: where norms stand: on what goes into attention and mlp, on what comes out.
      dropout: of what is added to x.
    """

    norm: Make
    attention: Make
    mlp: Make
    before: bool = True
    after: bool = False
    dropout: float = 0.0


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), each with dropout on what is added.

    What stands between the products (norms, dropout, sums) is cut along the sequence over `tensor` too.
    """

    def __init__(self, parts: Parts, *, rngs: nnx.Rngs):
        self.attention_norm = parts.norm(rngs) if parts.before else None
        self.attention = parts.attention(rngs)
        self.attention_post_norm = parts.norm(rngs) if parts.after else None
        self.mlp_norm = parts.norm(rngs) if parts.before else None
        self.mlp = parts.mlp(rngs)
        self.mlp_post_norm = parts.norm(rngs) if parts.after else None
        self.dropout = nnx.Dropout(parts.dropout, rngs=rngs) if parts.dropout else None

    def __call__(self, x_bsd: jax.Array, where: Where) -> Any:
        """x [b, s, d], or (x, *what else the mlp returned)."""

        def taken(norm: Any, x_bsd: jax.Array) -> jax.Array:
            return gather_sequence(x_bsd if norm is None else norm(x_bsd))

        def added(norm: Any, y_bsd: jax.Array) -> jax.Array:
            if norm is not None:
                y_bsd = norm(constrain(y_bsd, "batch", "residual", "embed"))
            y_bsd = y_bsd if self.dropout is None else self.dropout(y_bsd)
            return constrain(y_bsd, "batch", "residual", "embed")

        attended = self.attention(taken(self.attention_norm, x_bsd), where)
        x_bsd = x_bsd + added(self.attention_post_norm, attended)
        into = taken(self.mlp_norm, x_bsd)
        made = self.mlp(into, where.segment_ids_bs) if isinstance(self.mlp, Mixture) else self.mlp(into)
        y_bsd, *more = made if isinstance(made, tuple) else (made,)
        x_bsd = x_bsd + added(self.mlp_post_norm, y_bsd)
        return (x_bsd, *more) if more else x_bsd

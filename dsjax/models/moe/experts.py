"""Experts: gated feed-forward networks of which each row of the input passes one.

Rows are sorted by expert and multiplied block by block: a block is of one expert, so no product is larger than its
rows and no intermediate larger than a block, whatever the router does.  The backward pass makes those again.

Letters of shapes: n rows of the input, r sorted rows, e experts, d hidden, m feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Activation = Callable[[jax.Array], jax.Array]

# Rows of a block: a product of fewer is slow, and of more wastes more where an expert's rows end.
_FEWEST, _MOST, _BLOCKS_AN_EXPERT = 128, 512, 4


class Weights(NamedTuple):
    """Matrices of the experts, or gradients of them: gate and up [e, d, m], down [e, m, d]."""

    gate: jax.Array
    up: jax.Array
    down: jax.Array


class Sorted(NamedTuple):
    """Rows in the order of their experts.

    Attributes:
      order: int32 [r], the row in each place; those of no expert are the last.
      edges: int32 [e + 1], the place where each expert's rows begin, and where the last one's end.
    """

    order: jax.Array
    edges: jax.Array

    @property
    def sizes(self) -> jax.Array:
        """int32 [e], rows of each expert."""
        return jnp.diff(self.edges)

    @property
    def places(self) -> jax.Array:
        """int32 [r], the place of each row."""
        count = jnp.arange(self.order.shape[0], dtype=jnp.int32)
        return jnp.zeros_like(count).at[self.order].set(count, unique_indices=True)


def sorted_rows(expert_r: jax.Array, experts: int) -> Sorted:
    """The order of rows whose experts are given (int32; `experts` or more: of none)."""
    order = jnp.argsort(expert_r, stable=True).astype(jnp.int32)
    edges = jnp.searchsorted(expert_r[order], jnp.arange(experts + 1, dtype=expert_r.dtype))
    return Sorted(order, edges.astype(jnp.int32))


def block_rows(rows: int, experts: int) -> int:
    """Rows of a block, for so many rows of so many experts."""
    wanted = 1 << max(0, (rows // (_BLOCKS_AN_EXPERT * experts)).bit_length() - 1)
    return max(1, min(max(_FEWEST, min(_MOST, wanted)), rows))


@dataclass(frozen=True)
class _Blocks:
    """The blocks of sorted rows, one after the other: each begins where its expert's rows do, or a block later."""

    edges: jax.Array
    rows: int

    @property
    def ends(self) -> jax.Array:
        """int32 [e], blocks of the experts up to each."""
        return jnp.cumsum(-(-jnp.diff(self.edges) // self.rows))

    def run(self, block: Callable[[Any, Any, Any, Any], Any], carry: Any) -> Any:
        """``block(carry, expert, first row, which rows are the expert's) -> carry`` of all blocks in order."""
        ends = self.ends

        def turn(i: Any, carry: Any) -> Any:
            expert = jnp.sum(ends <= i)
            earlier = jnp.where(expert > 0, ends[jnp.maximum(expert - 1, 0)], 0)
            first = self.edges[expert] + (i - earlier) * self.rows
            own = first + jnp.arange(self.rows) < self.edges[expert + 1]
            return block(carry, expert, first, own)

        return lax.fori_loop(0, ends[-1], turn, carry)


def _padded(values: jax.Array, rows: int) -> jax.Array:
    """[r + rows, ...]: a block that begins with the last row has room."""
    return jnp.concatenate([values, jnp.zeros((rows, *values.shape[1:]), values.dtype)])


def _product(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """The product of two matrices along a dimension of each, in fp32."""
    numbers = (((contracted[0],), (contracted[1],)), ((), ()))
    return lax.dot_general(a, b, numbers, preferred_element_type=jnp.float32)


def forward(
    x_nd: jax.Array, row_r: jax.Array, edges: jax.Array, weights: Weights, act: Activation
) -> jax.Array:
    """down(act(gate(x)) * up(x)) of each sorted row by its expert, in x's type.

    Args:
      x_nd: the input.
      row_r: int32, the row of x in each place.
      edges: as of `Sorted`.

    Returns:
      [>= r, d]; what stands in places of no expert means nothing.
    """
    blocks = _Blocks(edges, block_rows(row_r.shape[0], edges.shape[0] - 1))
    rows = _padded(row_r, blocks.rows)

    def block(y: jax.Array, expert: Any, first: Any, own: Any) -> jax.Array:
        x = x_nd[lax.dynamic_slice_in_dim(rows, first, blocks.rows)]
        gate, up, down = (w[expert] for w in weights)
        hidden = act(_product(x, gate, (1, 0))) * _product(x, up, (1, 0))
        out = _product(hidden.astype(x.dtype), down, (1, 0)).astype(y.dtype)
        # Rows past the expert's own are the next one's, whose block comes later.
        return lax.dynamic_update_slice_in_dim(y, out, first, 0)

    return blocks.run(block, jnp.zeros((rows.shape[0], x_nd.shape[1]), x_nd.dtype))


def backward(
    x_nd: jax.Array,
    d_out_nd: jax.Array,
    row_r: jax.Array,
    scale_r: jax.Array,
    edges: jax.Array,
    weights: Weights,
    sums: Weights,
    act: Activation,
) -> tuple[jax.Array, jax.Array, Weights]:
    """The gradient of the sum of scale * forward(x), for the gradient of that.

    Args:
      scale_r: float32, the factor of each sorted row.
      sums: gradients of the weights up to now, fp32.

    Returns:
      Gradients of x by sorted row, in x's type [>= r, d]; of the scale by sorted row, fp32 [>= r]; the sums with
      this one's added.
    """
    blocks = _Blocks(edges, block_rows(row_r.shape[0], edges.shape[0] - 1))
    rows, scales = _padded(row_r, blocks.rows), _padded(scale_r, blocks.rows)
    dtype = x_nd.dtype

    def block(carry: Any, expert: Any, first: Any, own: Any) -> Any:
        dx, d_scale, sums = carry
        index = lax.dynamic_slice_in_dim(rows, first, blocks.rows)
        scale = jnp.where(own, lax.dynamic_slice_in_dim(scales, first, blocks.rows), 0)[:, None]
        x, d_out = x_nd[index], d_out_nd[index]
        gate, up, down = (w[expert] for w in weights)
        hidden, pull = jax.vjp(
            lambda gate, up: act(gate) * up, _product(x, gate, (1, 0)), _product(x, up, (1, 0))
        )
        # <d_out, down(hidden)> without that product: it is <d_out down^T, hidden>.
        d_hidden = _product(d_out, down, (1, 1))
        d_gate, d_up = (g.astype(dtype) for g in pull(d_hidden * scale))
        of_x = _product(d_gate, gate, (1, 1)) + _product(d_up, up, (1, 1))
        more = (
            _product(x, d_gate, (0, 0)),
            _product(x, d_up, (0, 0)),
            _product((hidden * scale).astype(dtype), d_out, (0, 0)),
        )
        dx = lax.dynamic_update_slice_in_dim(dx, of_x.astype(dtype), first, 0)
        d_scale = lax.dynamic_update_slice_in_dim(d_scale, jnp.sum(d_hidden * hidden, -1), first, 0)
        return dx, d_scale, Weights(*(s.at[expert].add(m) for s, m in zip(sums, more, strict=True)))

    empty = jnp.zeros((rows.shape[0], x_nd.shape[1]), dtype), jnp.zeros(rows.shape, jnp.float32)
    return blocks.run(block, (*empty, sums))

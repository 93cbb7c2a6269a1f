"""Experts: gated feed-forward networks of which each row of the input passes one.

Rows are sorted by expert and multiplied block by block: a block is of one expert, so no product is larger than its
rows and no intermediate larger than a block, whatever the router does.  The backward pass makes those again.

Letters of shapes: n rows of the input, r sorted rows, e experts, d hidden, m feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dsjax.mesh.turns import usually

Activation = Callable[[jax.Array], jax.Array]

# Rows of a block. Each block writes gradients of its expert's matrices and adds them up (48 bytes an element of one),
# and each expert's last block is half empty on average (22 FLOPs an element and row). With r rows of R an expert that
# costs (R / r + 1 / 2) (48 / B + 22 r / F), which is least at r = sqrt(2 R 48 F / (22 B)): 34 sqrt(R) on an H100, where
# large products reach F = 740 TFLOP/s and memory B = 2.8 TB/s.
_FEWEST, _MOST, _OF_A_ROOT = 128, 2048, 32


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
    wanted = 1 << math.isqrt(_OF_A_ROOT**2 * max(1, rows // experts)).bit_length() - 1
    return max(1, min(max(_FEWEST, min(_MOST, wanted)), rows))


@dataclass(frozen=True)
class _Blocks:
    """The blocks of sorted rows, expert by expert; each expert's first begins where its rows do.

    Attributes:
      rows: of a block.
      even: rows of each expert where all have as many.
    """

    edges: jax.Array
    rows: int
    even: int

    def of_each(self, expert: Callable[[Any, Any], Any], carry: Any) -> Any:
        """``expert(number, carry) -> carry`` of all experts in order."""
        return lax.fori_loop(0, self.edges.shape[0] - 1, expert, carry)

    def of(self, expert: Any, block: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        """``block(carry, first row, which rows are the expert's) -> carry`` of an expert's blocks in order."""
        begin, end = self.edges[expert], self.edges[expert + 1]

        def turn(i: Any, carry: Any) -> Any:
            first = begin + i * self.rows
            return block(carry, first, first + jnp.arange(self.rows) < end)

        with usually(-(-self.even // self.rows)):
            return lax.fori_loop(0, -(-(end - begin) // self.rows), turn, carry)


def _blocks(row_r: jax.Array, edges: jax.Array, even: int) -> _Blocks:
    return _Blocks(edges, block_rows(row_r.shape[0], edges.shape[0] - 1), even)


def _of(weights: Weights, expert: Any) -> Weights:
    return Weights(*(lax.dynamic_index_in_dim(w, expert, keepdims=False) for w in weights))


def _padded(values: jax.Array, rows: int) -> jax.Array:
    """[r + rows, ...]: a block that begins with the last row has room."""
    return jnp.concatenate([values, jnp.zeros((rows, *values.shape[1:]), values.dtype)])


def _product(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """The product of two matrices along a dimension of each, in fp32."""
    numbers = (((contracted[0],), (contracted[1],)), ((), ()))
    return lax.dot_general(a, b, numbers, preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class Network:
    """How an expert computes.

    Attributes:
      act: its activation.
      dot: multiplies in place of `jax.lax.dot_general`, with a gradient of its own; None: nothing does.
    """

    act: Activation
    dot: Any = None

    def times(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """x [r, i] times w [i, o], fp32."""
        if self.dot is None:
            return _product(x, w, (1, 0))
        return self.dot(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    def pulled(self, x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Gradients of x and w for the gradient of `times`, fp32; x's, w's and dy's type are one."""
        if self.dot is None:
            return _product(dy, w, (1, 1)), _product(x, dy, (0, 0))
        _, pull = jax.vjp(self.times, x.astype(jnp.float32), w.astype(jnp.float32))
        return pull(dy.astype(jnp.float32))


def forward(
    x_nd: jax.Array, row_r: jax.Array, edges: jax.Array, even: int, weights: Weights, net: Network
) -> jax.Array:
    """down(act(gate(x)) * up(x)) of each sorted row by its expert, in x's type.

    Args:
      x_nd: the input.
      row_r: int32, the row of x in each place.
      edges: as of `Sorted`.
      even: rows of an expert where all have as many; what the program says of its loop follows from it, no number.

    Returns:
      [>= r, d]; what stands in places of no expert means nothing.
    """
    blocks = _blocks(row_r, edges, even)
    rows = _padded(row_r, blocks.rows)

    def one(expert: Any, y: jax.Array) -> jax.Array:
        gate, up, down = _of(weights, expert)

        def block(y: jax.Array, first: Any, own: Any) -> jax.Array:
            x = x_nd[lax.dynamic_slice_in_dim(rows, first, blocks.rows)]
            hidden = net.act(net.times(x, gate)) * net.times(x, up)
            out = net.times(hidden.astype(x.dtype), down).astype(y.dtype)
            # Rows past the expert's own are the next one's, whose block comes later.
            return lax.dynamic_update_slice_in_dim(y, out, first, 0)

        return blocks.of(expert, block, y)

    return blocks.of_each(one, jnp.zeros((rows.shape[0], x_nd.shape[1]), x_nd.dtype))


def backward(
    x_nd: jax.Array,
    d_out_nd: jax.Array,
    row_r: jax.Array,
    scale_r: jax.Array,
    edges: jax.Array,
    even: int,
    weights: Weights,
    sums: Weights,
    net: Network,
) -> tuple[jax.Array, jax.Array, Weights]:
    """The gradient of the sum of scale * forward(x), for the gradient of that.

    Args:
      scale_r: float32, the factor of each sorted row.
      sums: gradients of the weights up to now, fp32.

    Returns:
      Gradients of x by sorted row, in x's type [>= r, d]; of the scale by sorted row, fp32 [>= r]; the sums with
      this one's added.
    """
    blocks = _blocks(row_r, edges, even)
    rows, scales = _padded(row_r, blocks.rows), _padded(scale_r, blocks.rows)
    dtype = x_nd.dtype

    def one(expert: Any, carry: Any) -> Any:
        gate, up, down = _of(weights, expert)

        def block(carry: Any, first: Any, own: Any) -> Any:
            dx, d_scale, sums = carry
            index = lax.dynamic_slice_in_dim(rows, first, blocks.rows)
            scale = jnp.where(own, lax.dynamic_slice_in_dim(scales, first, blocks.rows), 0)[:, None]
            x, d_out = x_nd[index], d_out_nd[index]
            hidden, pull = jax.vjp(lambda gate, up: net.act(gate) * up, net.times(x, gate), net.times(x, up))
            # <d_out, down(hidden)> without that product: it is <d_out down^T, hidden>.
            d_hidden, of_down = net.pulled((hidden * scale).astype(dtype), down, d_out)
            (of_x, of_gate), (more, of_up) = (
                net.pulled(x, w, g.astype(dtype))
                for w, g in zip((gate, up), pull(d_hidden * scale), strict=True)
            )
            dx = lax.dynamic_update_slice_in_dim(dx, (of_x + more).astype(dtype), first, 0)
            d_scale = lax.dynamic_update_slice_in_dim(d_scale, jnp.sum(d_hidden * hidden, -1), first, 0)
            return dx, d_scale, jax.tree.map(jnp.add, sums, Weights(of_gate, of_up, of_down))

        dx, d_scale, sums = carry
        # Only this expert's go round the loop over its blocks.
        dx, d_scale, own = blocks.of(expert, block, (dx, d_scale, _of(sums, expert)))
        placed = (lax.dynamic_update_index_in_dim(s, m, expert, 0) for s, m in zip(sums, own, strict=True))
        return dx, d_scale, Weights(*placed)

    empty = jnp.zeros((rows.shape[0], x_nd.shape[1]), dtype), jnp.zeros(rows.shape, jnp.float32)
    return blocks.of_each(one, (*empty, sums))

"""Rows to their experts and back: none is dropped, and memory does not depend on where they go.

Each device sorts its rows (a token and one of its choices) by expert, so that those for one peer along the mesh axis
`expert` stand together.  All tell each other how many they have for whom, then rows travel in rounds: at most so many
from each device to each in one.  Rows that the router spreads evenly take one round; uneven ones take more.  The
backward pass runs the same rounds with the gradient beside the rows, and computes the experts again.

Letters of shapes: t tokens, k choices of each, r = t * k rows, p peers, c rows to a peer in a round, e experts of all
peers, d hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dsjax.mesh.turns import usually
from dsjax.models.moe.experts import Network, Sorted, Weights, backward, forward, sorted_rows

AXIS = "expert"


@dataclass(frozen=True)
class Plan:
    """How rows travel.

    Attributes:
      experts: of all peers.
      peers: devices along `expert`.
      room: rows from a device to each in a round.
      rounds: how many there are; None: as many as the routing needs.
      even: rows of each expert here where all have as many.
      net: how experts compute.
    """

    experts: int
    peers: int
    room: int
    rounds: int | None
    even: int
    net: Network


def plan(
    tokens: int,
    choices: int,
    experts: int,
    peers: int,
    headroom: float,
    net: Network,
    most: int | None = None,
) -> Plan:
    """The plan for so many tokens a device.

    Args:
      headroom: room of a round over the rows to a peer where all are spread evenly.
      most: rows that an expert takes of a device at most, if the router sees to that.
    """
    rows = tokens * choices
    even = -(-rows * peers // experts)
    if most is not None:
        return Plan(experts, peers, min(rows, most * experts // peers), 1, min(even, most * peers), net)
    return Plan(experts, peers, min(rows, math.ceil(headroom * rows / peers)), None, even, net)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def mixture(
    x_td: jax.Array, gates_tk: jax.Array, choices_tk: jax.Array, weights: Weights, plan: Plan
) -> jax.Array:
    """Sum over a token's choices of gate * expert(x); inside a shard_map where there are peers.

    Args:
      gates_tk: float32.
      choices_tk: int32; `experts` where a row goes nowhere.
      weights: of this device's experts, in x's type.

    Returns:
      [t, d] in x's type; added up in fp32.
    """
    return _mixture_fwd(x_td, gates_tk, choices_tk, weights, plan)[0]


def _mixture_fwd(x: Any, gates: Any, choices: Any, weights: Weights, plan: Plan) -> tuple[Any, Any]:
    routes = _routes(choices, plan)

    def one(number: Any, out: jax.Array) -> jax.Array:
        turn = routes.turn(number, x)
        y = forward(turn.x, turn.rows.order, turn.rows.edges, plan.even, weights, plan.net)
        return out + routes.collected(routes.returned(turn, y), number, gates)

    out = routes.run(one, jnp.zeros(x.shape, jnp.float32))
    return out.astype(x.dtype), (x, gates, choices, weights)


def _mixture_bwd(plan: Plan, kept: Any, d_out: jax.Array) -> tuple[Any, ...]:
    x, gates, choices, weights = kept
    routes = _routes(choices, plan)

    def one(number: Any, carry: Any) -> Any:
        dx, d_gates, sums = carry
        turn = routes.turn(number, x, d_out, gates)
        of_x, of_scale, sums = backward(
            turn.x,
            turn.d_out,
            turn.rows.order,
            turn.scale,
            turn.rows.edges,
            plan.even,
            weights,
            sums,
            plan.net,
        )
        of_x = routes.returned(turn, of_x)
        of_scale = routes.returned(turn, _after(of_x, of_scale, plan))
        dx = dx + routes.collected(of_x, number)
        return dx, d_gates + routes.found(of_scale, number), sums

    start = (
        jnp.zeros(x.shape, jnp.float32),
        jnp.zeros(gates.shape, jnp.float32),
        Weights(*(jnp.zeros(w.shape, jnp.float32) for w in weights)),
    )
    dx, d_gates, sums = routes.run(one, start)
    d_weights = Weights(*(s.astype(w.dtype) for s, w in zip(sums, weights, strict=True)))
    return dx.astype(x.dtype), d_gates.astype(gates.dtype), None, d_weights


mixture.defvjp(_mixture_fwd, _mixture_bwd)


class _Turn(NamedTuple):
    """What a device has for its experts in a round: rows of x, and of the backward pass gradient and gate of each.

    `rows.order` are rows of x and of `d_out`; the scale is sorted already.
    """

    rows: Sorted
    x: jax.Array
    d_out: Any = None
    scale: Any = None


class _Alone:
    """All experts are here: rows stay where they are."""

    def __init__(self, choices: jax.Array, plan: Plan):
        self._shape = choices.shape
        self._rows = sorted_rows(choices.reshape(-1), plan.experts)
        self._valid = (choices < plan.experts)[..., None]

    def run(self, one: Callable[[Any, Any], Any], carry: Any) -> Any:
        """One round."""
        return one(0, carry)

    def turn(self, number: Any, x: Any, d_out: Any = None, gates: Any = None) -> _Turn:
        """All rows, by the tokens that they are of."""
        scale = None if gates is None else gates.reshape(-1)[self._rows.order]
        tokens = self._rows._replace(order=self._rows.order // self._shape[1])
        return _Turn(tokens, x, d_out, scale)

    def returned(self, turn: _Turn, y: jax.Array) -> jax.Array:
        """Sorted rows as they are."""
        return y

    def found(self, y: jax.Array, number: Any) -> jax.Array:
        """[t, k, ...]: what became of each row."""
        valid = self._valid if y.ndim > 1 else self._valid[..., 0]
        return jnp.where(valid, y[self._rows.places.reshape(self._shape)], 0)

    def collected(self, y: jax.Array, number: Any, gates: Any = None) -> jax.Array:
        """Sum over a token's choices [t, d], weighted by the gates, fp32."""
        return _weighed(self.found(y, number), gates)


class _Peers:
    """Experts are shared out over the devices along the axis, in order."""

    def __init__(self, choices: jax.Array, plan: Plan):
        self._plan, self._shape = plan, choices.shape
        flat, each = choices.reshape(-1), plan.experts // plan.peers
        self._rows = sorted_rows(flat, plan.experts)
        # Rows of each device for each expert; the same numbers on all devices.
        told = lax.all_gather(self._rows.sizes, AXIS).reshape(plan.peers, plan.peers, each)
        self._ends = jnp.cumsum(told[:, lax.axis_index(AXIS)], axis=1)
        self._rounds = jnp.max(-(-jnp.sum(told, axis=-1) // plan.room))
        self._first = self._rows.edges[:-1:each]
        self._peer = jnp.minimum(flat // each, plan.peers - 1)
        self._valid = flat < plan.experts
        self._rank = self._rows.places - self._first[self._peer]

    def run(self, one: Callable[[Any, Any], Any], carry: Any) -> Any:
        """The rounds, as many as there are on all devices."""
        if self._plan.rounds == 1:
            return one(0, carry)
        with usually(1):  # where rows are spread evenly
            return lax.fori_loop(0, self._rounds, one, carry)

    def turn(self, number: Any, x: Any, d_out: Any = None, gates: Any = None) -> _Turn:
        """What the peers send in a round."""
        room, peers = self._plan.room, self._plan.peers
        places = number * room + jnp.arange(room, dtype=jnp.int32)
        row = self._rows.order[jnp.minimum(self._first[:, None] + places, self._rows.order.shape[0] - 1)]
        token = row // self._shape[1]
        # Which expert a row is for is known from what was told.
        expert = jnp.sum(self._ends[:, None, :] <= places[:, None], axis=-1, dtype=jnp.int32)
        rows = sorted_rows(expert.reshape(-1), self._ends.shape[1])
        if d_out is None:
            return _Turn(rows, _sent(x[token]).reshape(peers * room, -1))
        both = _sent(jnp.concatenate([x[token], d_out[token].astype(x.dtype)], axis=-1))
        both = both.reshape(peers * room, -1)
        scale = _sent(_after(both, gates.reshape(-1)[row], self._plan)).reshape(-1)[rows.order]
        return _Turn(rows, both[:, : x.shape[-1]], both[:, x.shape[-1] :], scale)

    def returned(self, turn: _Turn, y: jax.Array) -> jax.Array:
        """Sorted rows back to where they came from: [p * c, ...], by the peer that has them."""
        own = y[turn.rows.places]
        return _sent(own.reshape(self._plan.peers, self._plan.room, *y.shape[1:])).reshape(own.shape)

    def found(self, y: jax.Array, number: Any) -> jax.Array:
        """[t, k, ...]: what became of each row; 0 of those of other rounds."""
        place = self._rank - number * self._plan.room
        here = self._valid & (place >= 0) & (place < self._plan.room)
        index = jnp.where(here, self._peer * self._plan.room + place, 0).reshape(self._shape)
        here = here.reshape(*self._shape, *(1,) * (y.ndim - 1))
        return jnp.where(here, y[index], 0)

    def collected(self, y: jax.Array, number: Any, gates: Any = None) -> jax.Array:
        """Sum over a token's choices that were in this round [t, d], weighted by the gates, fp32."""
        return _weighed(self.found(y, number), gates)


def _routes(choices: jax.Array, plan: Plan) -> _Alone | _Peers:
    return _Alone(choices, plan) if plan.peers == 1 else _Peers(choices, plan)


def _weighed(y_tkd: jax.Array, gates: Any) -> jax.Array:
    y_tkd = y_tkd.astype(jnp.float32)
    return jnp.sum(y_tkd if gates is None else y_tkd * gates[..., None], axis=1)


def _sent(x: jax.Array) -> jax.Array:
    """[p, ...]: what is for each peer -> what each peer had for this one."""
    return lax.all_to_all(x, AXIS, split_axis=0, concat_axis=0, tiled=True)


def _after(first: jax.Array, x: jax.Array, plan: Plan) -> jax.Array:
    """x, known only once `first` is there: the devices of a CPU have to come to all collectives in one order."""
    if plan.peers == 1:
        return x
    return jnp.where(lax.axis_index(AXIS) < 0, first.ravel()[0].astype(x.dtype), x)

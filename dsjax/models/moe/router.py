"""Which experts a token goes to, with what weight, and how evenly tokens are spread.

All of it is fp32, whatever the model computes in: a rounded score is another choice.

Letters of shapes: b batch, s sequence, k choices of a token, e experts, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from dsjax.mesh import current_layout
from dsjax.models.layers import Init, cut_axes
from dsjax.models.variables import Given, LayerNumber

LOAD = "expert_load"
"""Name of the extra that counts rows: [layers, e]."""


@dataclass(frozen=True)
class Routing:
    """How experts are chosen.

    Attributes:
      experts: how many there are.
      choices: of each token.
      scores: "softmax" over all experts, or "sigmoid" of each (DeepSeek-V3).
      normalised: gates of a token add up to `scale`.
      groups, kept: experts are chosen within those `kept` of so many equal groups whose two best scores add up to
        most.
      scale: of the gates.
      biased: choices (not gates) are by scores with a bias added that balances them (Wang et al. 2024).
      capacity: rows that an expert takes of one sequence, over its even share; None: all.
    """

    experts: int
    choices: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    groups: int = 1
    kept: int = 1
    scale: float = 1.0
    biased: bool = False
    capacity: float | None = None

    def most(self, length: int) -> int | None:
        """Rows that an expert takes of a sequence of so many tokens; None: all."""
        if self.capacity is None:
            return None
        return min(length, max(1, int(self.capacity * length * self.choices / self.experts + 0.999)))


class RouterBias(Given):
    """float32 [e]: added to scores where experts are chosen; changed once a step (`balanced`)."""


class Routed(NamedTuple):
    """Where tokens go.

    Attributes:
      gates: float32 [b, s, k].
      choices: int32 [b, s, k], the expert of each row; `experts` where it goes nowhere.
      logits, scores: float32 [b, s, e]; the scores of a token add up to 1.
      wanted: int32 [b, s, k], the choices before any was dropped.
    """

    gates: jax.Array
    choices: jax.Array
    logits: jax.Array
    scores: jax.Array
    wanted: jax.Array


class Router(nnx.Module):
    """Scores of all experts for a token, and the choice among them."""

    def __init__(self, features: int, routing: Routing, *, init: Init, rngs: nnx.Rngs):
        self.routing = routing
        self.kernel = nnx.Param(init(rngs.params(), (features, routing.experts), jnp.float32))
        self.bias = RouterBias(jnp.zeros((routing.experts,), jnp.float32)) if routing.biased else None

    def __call__(self, x_bsd: jax.Array, counts_bs: jax.Array) -> Routed:
        """Where the tokens of x go.

        Args:
          counts_bs: float32, 0 for padding, which goes nowhere.
        """
        routing = self.routing
        kernel = self.kernel[...].astype(jnp.float32)
        logits = jnp.einsum("bsd,de->bse", x_bsd.astype(jnp.float32), kernel, precision=lax.Precision.HIGHEST)
        scores = jax.nn.softmax(logits) if routing.scores == "softmax" else jax.nn.sigmoid(logits)
        bias = jnp.zeros((routing.experts,)) if self.bias is None else self.bias[...]
        gates, choices = _chosen(scores, bias, routing)
        choices = jnp.where(counts_bs[..., None] > 0, choices, routing.experts)
        if routing.scores == "sigmoid":
            scores = scores / jnp.sum(scores, -1, keepdims=True)
        taken = _within_capacity(choices, routing)
        return Routed(gates, taken, logits, scores, choices)


def _chosen(scores_bse: jax.Array, bias_e: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
    """(gates, choices) of each token, on the device that has it."""

    def local(scores: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
        wanted = lax.stop_gradient(scores + bias)
        if routing.groups > 1:
            wanted = _within_groups(wanted, routing)
        _, choices = lax.top_k(wanted, routing.choices)
        gates = jnp.take_along_axis(scores, choices, axis=-1)
        if routing.normalised:
            gates = gates / (jnp.sum(gates, -1, keepdims=True) + 1e-20)
        return gates * routing.scale, choices.astype(jnp.int32)

    layout = current_layout()
    if layout is None:
        return local(scores_bse, bias_e)
    batch, sequence = (
        cut_axes(layout, n, x) or None for n, x in zip(("batch", "sequence"), scores_bse.shape, strict=False)
    )
    tokens = P(batch, sequence, None)
    return layout.shard_map(local, (tokens, P()), (tokens, tokens))(scores_bse, bias_e)


def _within_groups(scores: jax.Array, routing: Routing) -> jax.Array:
    """Scores [..., e], those outside of the best groups -inf."""
    grouped = scores.reshape(*scores.shape[:-1], routing.groups, -1)
    best = jnp.sum(lax.top_k(grouped, min(2, grouped.shape[-1]))[0], -1)
    _, kept = lax.top_k(best, routing.kept)
    inside = jnp.any(kept[..., None] == jnp.arange(routing.groups), axis=-2)
    return jnp.where(inside[..., None], grouped, -jnp.inf).reshape(scores.shape)


def _within_capacity(choices_bsk: jax.Array, routing: Routing) -> jax.Array:
    """The choices without the rows that are too many for an expert in their sequence, the later ones."""
    most = routing.most(choices_bsk.shape[1])
    if most is None:
        return choices_bsk
    rows = choices_bsk.reshape(choices_bsk.shape[0], -1)
    chosen = rows[..., None] == jnp.arange(routing.experts)
    before = jnp.cumsum(chosen, axis=1, dtype=jnp.int32) - chosen
    rank = jnp.sum(jnp.where(chosen, before, 0), axis=-1)
    return jnp.where(rank < most, rows, routing.experts).reshape(choices_bsk.shape)


def load_of(choices_bsk: jax.Array, experts: int) -> jax.Array:
    """float32 [b, e]: rows of each sequence for each expert."""
    return jnp.sum(choices_bsk[..., None] == jnp.arange(experts), axis=(1, 2), dtype=jnp.float32)


def balance_loss(routed: Routed, counts_bs: jax.Array) -> jax.Array:
    """How unevenly experts are used, summed over sequences and weighted by their tokens: float32 [].

    e * sum over experts of (rows of the expert a token) * (its mean score), of each sequence (Fedus et al. 2021,
    DeepSeek-AI 2024): k where all are used alike, whatever the number of experts. Being a sum over sequences it does
    not depend on how a batch is cut.
    """
    experts = routed.scores.shape[-1]
    tokens = jnp.sum(counts_bs, axis=1)
    share = load_of(routed.wanted, experts) / jnp.maximum(tokens, 1)[:, None]
    scores = jnp.einsum("bse,bs->be", routed.scores, counts_bs, precision=lax.Precision.HIGHEST)
    return experts * jnp.sum(lax.stop_gradient(share) * scores)


def z_loss(routed: Routed, counts_bs: jax.Array) -> jax.Array:
    """Sum over tokens of logsumexp(logits)^2 (Zoph et al. 2022)."""
    return jnp.sum(jax.nn.logsumexp(routed.logits, axis=-1) ** 2 * counts_bs)


def entropy(routed: Routed, counts_bs: jax.Array) -> jax.Array:
    """Sum over tokens of the entropy of their scores, in nats."""
    scores = routed.scores
    return jnp.sum(-jnp.sum(scores * jnp.log(jnp.maximum(scores, 1e-30)), -1) * counts_bs)


def balanced(rate: float) -> Callable[[nnx.State, Mapping[str, Any]], nnx.State]:
    """An `after_step` that moves each router's bias by `rate` towards experts with fewer rows than the mean.

    b += rate * sign(mean(n) - n), n the rows of the whole step (Wang et al. 2024).
    """

    def after_step(model_state: nnx.State, extras: Mapping[str, Any]) -> nnx.State:
        rows = extras[LOAD].sum
        variables = dict(model_state.flat_state())
        numbers = {path[:-1]: v[...] for path, v in variables.items() if isinstance(v, LayerNumber)}
        changed = {}
        for path, variable in variables.items():
            if isinstance(variable, RouterBias):
                # The router's neighbour in its block tells which layers these are.
                load = rows[numbers[path[:-2]]]
                step = rate * jnp.sign(jnp.mean(load, -1, keepdims=True) - load)
                variable = variable.replace(variable[...] + step)
            changed[path] = variable
        return nnx.State.from_flat_path(changed)

    return after_step

"""How a token is drawn from a model's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dsjax.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the model's logits.

    Attributes:
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: draw from the k likeliest; 0: from all.
      top_p: draw from the fewest likeliest tokens that together have at least this probability
        (Holtzman et al. 2020).

    Raises (at construction):
      ConfigError: numbers that leave nothing to draw from.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        faults = []
        if not 0 <= self.temperature < float("inf"):
            faults.append(f"temperature: takes a number >= 0, got {self.temperature:g}")
        if self.top_k < 0:
            faults.append(f"top_k: takes an integer >= 0 (0: all tokens), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            faults.append(
                f"top_p: takes a number > 0 and <= 1, got {self.top_p:g}; for the likeliest token each time set "
                "temperature to 0"
            )
        if faults:
            raise ConfigError(faults)


def draw(logits_v: jax.Array, key: jax.Array, how: Sampling) -> jax.Array:
    """A token, int32 [], for float32 logits [V]."""
    logits = logits_v
    if how.temperature == 0:
        return jnp.argmax(logits).astype(jnp.int32)
    logits = logits / how.temperature
    if how.top_k:
        kth = jax.lax.top_k(logits, min(how.top_k, logits.shape[-1]))[0][-1]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    if how.top_p < 1:
        ordered = jnp.sort(logits, descending=True)
        shares = jax.nn.softmax(ordered)
        # A token stays while the tokens before it have less than top_p; the likeliest always does.
        kept = (jnp.cumsum(shares) - shares) < how.top_p
        kept = kept.at[0].set(True)
        logits = jnp.where(logits < jnp.min(jnp.where(kept, ordered, jnp.inf)), -jnp.inf, logits)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def draw_rows(logits_bv: jax.Array, places_b: jax.Array, names_bk: jax.Array, how: Sampling) -> jax.Array:
    """A token a row, int32 [b]: a function of the row's logits, its names and the place that it is drawn for.

    So it does not matter what other rows there are, nor where on a mesh the row lies.

    Args:
      names_bk: uint32, the seed and numbers that tell a row from all others (its prompt, the sample of it).
    """

    def one(logits: jax.Array, place: jax.Array, names: Sequence[jax.Array]) -> jax.Array:
        key = jax.random.key(0)
        for number in (*names, place):
            key = jax.random.fold_in(key, number)
        return draw(logits, key, how)

    names = tuple(names_bk[:, i] for i in range(names_bk.shape[1]))
    return jax.vmap(one)(logits_bv, places_b, names)

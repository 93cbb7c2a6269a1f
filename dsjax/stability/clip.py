"""Clipping by history: a gradient is out of the ordinary where its norm is, measured by those of late steps.

The threshold is `clip_factor` times their median; the median itself where they scatter widely: divided by the median,
their variance is over three times their mean.  A gradient that was clipped enters the history at the threshold, so that
a run of large ones does not make large ones ordinary.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from dsjax.config.precision import StabilityConfig
from dsjax.mesh import map_named, named_leaves

KNOWN = 10  # norms from which on the history counts


@flax.struct.dataclass
class History:
    """Norms of late gradients; part of a run's state.

    Attributes:
      norms: group -> float32 [window], in no order.
      seen: int32 [], steps that have entered.
    """

    norms: dict[str, jax.Array]
    seen: jax.Array


def first_history(config: StabilityConfig, parts: tuple[str, ...]) -> History:
    """The history before the first step; `parts` of the model are its groups if each is clipped alone."""
    groups = parts if config.clip_groups == "parts" else ("all",)
    return History({group: jnp.zeros(config.clip_window, jnp.float32) for group in groups}, jnp.int32(0))


def part_of(path: str) -> str:
    """The part of the model that a parameter is in: the first name of its path."""
    return path.partition("/")[0]


def parts_of(params: Any) -> tuple[str, ...]:
    """The parts of a model, in order."""
    return tuple(dict.fromkeys(map(part_of, named_leaves(params))))


def clipped(
    config: StabilityConfig, fixed: float | None, history: History, grads: Any
) -> tuple[Any, History]:
    """Gradients scaled down group by group.

    Args:
      fixed: the threshold while too few norms are known; None: there is none.

    Returns:
      The gradients, and the history with this step's norms in it.
    """

    def group_of(path: str) -> str:
        return part_of(path) if config.clip_groups == "parts" else "all"

    members: dict[str, list[jax.Array]] = {group: [] for group in history.norms}
    map_named(lambda path, grad: members[group_of(path)].append(grad), grads)
    norms = {
        group: optax.tree.norm([leaf.astype(jnp.float32) for leaf in leaves])
        for group, leaves in members.items()
    }
    thresholds = {group: _threshold(config, fixed, history.norms[group], history.seen) for group in members}
    scales = {
        group: jnp.minimum(1.0, thresholds[group] / jnp.maximum(norms[group], 1e-12)) for group in members
    }
    at = history.seen % config.clip_window
    entered = {
        group: history.norms[group].at[at].set(jnp.minimum(norms[group], thresholds[group]))
        for group in members
    }
    grads = map_named(lambda path, grad: grad * scales[group_of(path)], grads)
    return grads, History(entered, history.seen + 1)


def _threshold(config: StabilityConfig, fixed: float | None, norms: jax.Array, seen: jax.Array) -> jax.Array:
    known = jnp.minimum(seen, config.clip_window)
    there = jnp.arange(config.clip_window) < known
    ordered = jnp.sort(jnp.where(there, norms, jnp.inf))
    median = (ordered[jnp.maximum(known - 1, 0) // 2] + ordered[known // 2]) / 2
    relative = jnp.where(there, norms / jnp.maximum(median, 1e-12), 0.0)
    mean = jnp.sum(relative) / jnp.maximum(known, 1)
    variance = jnp.sum(jnp.where(there, (relative - mean) ** 2, 0.0)) / jnp.maximum(known, 1)
    by_history = median * jnp.where(variance > 3 * mean, 1.0, config.clip_factor)
    # A part that has had no gradient so far is not held to that.
    known = jnp.where(median > 0, known, 0)
    return jnp.where(known < min(KNOWN, config.clip_window), jnp.inf if fixed is None else fixed, by_history)

"""Clipping by history against the same rules in numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.config.precision import StabilityConfig
from dsjax.stability.clip import KNOWN, clipped, first_history, parts_of

FIXED = 5.0


def threshold(config: StabilityConfig, norms: list[float]) -> float:
    """By the rules, of the norms that have entered."""
    if len(norms) < KNOWN:
        return FIXED
    late = np.array(norms[-config.clip_window :])
    median = float(np.median(late))
    relative = late / median
    return median * (1.0 if np.var(relative) > 3 * np.mean(relative) else config.clip_factor)


def of_norm(norm: float) -> dict[str, dict[str, jax.Array]]:
    """Gradients of two parts, whose norms are as 3 to 4."""
    return {"a": {"x": jnp.full(9, norm * 0.2)}, "b": {"y": jnp.full(16, norm * 0.2)}}


@pytest.mark.parametrize("window", [12, 15])
def test_the_threshold_is_by_the_median_of_late_norms(window: int) -> None:
    config = StabilityConfig(clip="median", clip_window=window, clip_factor=1.5)
    rng = np.random.default_rng(0)
    given = np.exp(rng.normal(size=60))
    given[[20, 40]] = 50.0
    history, entered = first_history(config, ()), []
    turn = jax.jit(lambda history, grads: clipped(config, FIXED, history, grads))
    for norm in given:
        limit = threshold(config, entered)
        grads, history = turn(history, of_norm(norm))
        got = np.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(grads)))
        entered.append(min(norm, limit))
        np.testing.assert_allclose(got, entered[-1], rtol=1e-5)
    assert int(history.seen) == 60


def test_norms_that_scatter_widely_are_cut_to_their_median() -> None:
    config = StabilityConfig(clip="median", clip_window=20, clip_factor=10.0)
    history = first_history(config, ())
    # Through the fixed bound, while few are known: nine small ones and a huge one scatter widely.
    for norm in [1.0] * 9 + [1e4]:
        _, history = clipped(config, None, history, of_norm(norm))
    assert threshold(config, [1.0] * 9 + [1e4]) == 1.0
    grads, _ = clipped(config, None, history, of_norm(3.0))
    np.testing.assert_allclose(grads["a"]["x"], 0.2, rtol=1e-5)


def test_parts_are_clipped_alone() -> None:
    config = StabilityConfig(clip="median", clip_window=10, clip_groups="parts")
    history = first_history(config, parts_of(of_norm(1.0)))
    for _ in range(10):
        _, history = clipped(config, None, history, of_norm(1.0))
    grads, _ = clipped(config, None, history, {"a": of_norm(1.0)["a"], "b": of_norm(9.0)["b"]})
    np.testing.assert_allclose(grads["a"]["x"], 0.2, rtol=1e-5)
    np.testing.assert_allclose(grads["b"]["y"], 0.3, rtol=1e-5)

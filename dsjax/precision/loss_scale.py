"""Dynamic loss scale: what keeps fp16 gradients between underflow and overflow.

A loss is a sum over examples.  Its gradient starts from scale / W0 instead of 1, W0 being about the weight of a
batch, so that neither sums over a batch nor a single example leave fp16's range; gradients are divided by it
again, in fp32, before anything looks at them.  Both are powers of two, so nothing is rounded.

The scale is halved when gradients overflow (the first overflow is borne with: `hysteresis`) and doubled after
`growth_interval` steps without, unless overflows have been frequent: a moving average over some thousand steps of
how many there were vetoes growth while it is over `target_rate`.  Below `SOUND`, before any overflow, it is doubled
at every step, so that a scale that starts too low does not cost a run its beginning.
"""

from __future__ import annotations

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dsjax.config.precision import LossScaleConfig

SOUND = 2.0**16
_DECAY = 0.999  # of the moving average, a step


@flax.struct.dataclass
class LossScale:
    """The scale and what it is changed by; part of a run's state.

    Attributes:
      scale: float32 [].
      clean: int32 [], steps without overflow since the scale last changed.
      spare: int32 [], overflows that are still borne with, plus one.
      rate: float32 [], moving average of the share of steps that overflowed.
      overflows: int32 [], all there were.
    """

    scale: jax.Array
    clean: jax.Array
    spare: jax.Array
    rate: jax.Array
    overflows: jax.Array


def first_scale(config: LossScaleConfig) -> LossScale:
    """The scale before the first step."""
    return LossScale(
        jnp.float32(config.initial), jnp.int32(0), jnp.int32(config.hysteresis), jnp.float32(0), jnp.int32(0)
    )


def nominal_weight(batch: Any) -> float:
    """About the weight of a batch [A, B / A, ...], a power of two: the size of its `weights`, else its rows."""
    weights = batch.get("weights") if isinstance(batch, dict) else None
    rows = math.prod(jax.tree.leaves(batch)[0].shape[:2])
    return 2.0 ** round(math.log2(rows if weights is None else weights.size))


def next_scale(config: LossScaleConfig, now: LossScale, overflow: jax.Array) -> LossScale:
    """The scale after a step.

    Args:
      overflow: bool [], whether the step's gradient or loss was not finite, on any device.
    """
    clean = jnp.where(overflow, 0, now.clean + 1)
    rate = _DECAY * now.rate + (1 - _DECAY) * overflow
    spare = jnp.maximum(now.spare - overflow, 0)
    climbing = (now.overflows == 0) & (now.scale < SOUND)
    due = clean >= jnp.where(climbing, 1, config.growth_interval)
    grows = ~overflow & due & (rate <= config.target_rate)
    factor = jnp.where(grows, 2.0, jnp.where(overflow & (spare == 0), 0.5, 1.0))
    return LossScale(
        scale=jnp.clip(now.scale * factor, config.minimum, config.maximum),
        clean=jnp.where(grows, 0, clean),
        spare=jnp.where(grows, config.hysteresis, spare),
        rate=rate,
        overflows=now.overflows + overflow,
    )

"""Which checkpoints may go."""

from __future__ import annotations

import math
from collections.abc import Mapping


def superfluous(
    metrics: Mapping[int, float | None], keep: int, keep_every: int = 0, keep_best: int = 0
) -> list[int]:
    """The steps that no rule keeps, oldest first.

    Args:
      metrics: every stored step with its metric (lower is better; None: not evaluated).
      keep: the newest so many stay; at least 1, so the newest always does.
      keep_every: multiples of this stay; 0: no such rule.
      keep_best: those with the lowest metrics stay; of equal ones the newest.
    """
    steps = sorted(metrics)
    kept = set(steps[-max(1, keep) :])
    if keep_every:
        kept |= {step for step in steps if step % keep_every == 0}
    known = {step: value for step, value in metrics.items() if value is not None and math.isfinite(value)}
    kept |= set(sorted(known, key=lambda step: (known[step], -step))[:keep_best])
    return [step for step in steps if step not in kept]

"""Whether a run has gone astray: steps in a row that were skipped, or a loss far above the late ones."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsjax.config.precision import StabilityConfig

LATE, KNOWN = 100, 20  # losses that are compared with, and how many of them it takes
_NORMAL = 1.4826  # the standard deviation of a normal distribution over its median distance from the median


@dataclass(frozen=True)
class Astray:
    """Steps that a run should not have taken.

    Attributes:
      first, last: the first and the last of them.
      reason: for people.
    """

    first: int
    last: int
    reason: str


class Watch:
    """Looks at each step's metrics, in order.

    Attributes:
      astray: what was found; None: nothing since `forget_after`.
    """

    def __init__(self, config: StabilityConfig):
        self._config = config
        self._late: deque[tuple[int, float]] = deque(maxlen=LATE)
        self._first_skipped = 0
        self.astray: Astray | None = None

    def forget_after(self, step: int) -> None:
        """The run has gone back to a step: what was found of later ones no longer counts."""
        self.astray = None
        self._late = deque((one for one in self._late if one[0] <= step), LATE)

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Looks at a step's metrics: loss, skipped (in a row), applied."""
        if self._config.on_nonfinite != "rollback" or self.astray is not None:
            return
        skipped, loss = int(values["skipped"]), float(values["loss"])
        if skipped == 1:
            self._first_skipped = step
        if skipped >= self._config.rollback_after:
            self.astray = Astray(self._first_skipped, step, f"{skipped} steps in a row were skipped")
        elif values["applied"] and (limit := self._limit()) is not None and loss > limit:
            usual = float(np.median([loss for _, loss in self._late]))
            self.astray = Astray(step, step, f"the loss rose to {loss:.4g} from about {usual:.4g}")
        elif values["applied"] and math.isfinite(loss):
            self._late.append((step, loss))

    def _limit(self) -> float | None:
        if self._config.spike is None or len(self._late) < KNOWN:
            return None
        late = np.array([loss for _, loss in self._late])
        median = np.median(late)
        # Losses that are all but equal would make a spike of any other.
        usual = max(_NORMAL * float(np.median(np.abs(late - median))), 1e-3 * abs(float(median)))
        return float(median) + self._config.spike * usual

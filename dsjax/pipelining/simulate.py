"""How long a schedule takes, from the times of its operations: what the tables cost before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from dsjax.pipelining.schedule import Schedule


@dataclass(frozen=True)
class Simulated:
    """Times, in the unit of the operations' times."""

    total: float
    bubble: float  # fraction of total x stages in which nothing is computed
    busy: np.ndarray  # float [stages]: time at work
    begin: np.ndarray  # float [3, ticks, stages]: of forward, backward, weight gradient; nan where none is
    end: np.ndarray

    @property
    def idle(self) -> np.ndarray:
        """float [stages]: fraction of the total time in which a stage computes nothing."""
        return 1.0 - self.busy / self.total


def simulate(
    schedule: Schedule,
    forward: ArrayLike,
    backward: ArrayLike,
    weight: ArrayLike = 0.0,
    link: float = 0.0,
    *,
    lockstep: bool = True,
) -> Simulated:
    """Runs the tables against a clock a stage.

    Args:
      forward, backward, weight: time of one microbatch in one chunk, a number or [virtual, stages];
        under zero_bubble `backward` is the half that gives the input's gradient, else the whole.
      link: time of one exchange between neighbours; both directions at once.  One stage alone has none.
      lockstep: between ticks a stage waits for both its neighbours in the ring, as a collective permute
        makes it.  Otherwise an operation begins once its message is there and its stage is free.
    """
    shape = (schedule.virtual, schedule.stages)
    durations = [np.broadcast_to(np.asarray(time, float), shape) for time in (forward, backward, weight)]
    nothing = np.full_like(schedule.forward, -1)
    tables = [schedule.forward, schedule.backward, nothing if schedule.weight is None else schedule.weight]
    begin = np.full((3, schedule.ticks, schedule.stages), np.nan)
    end = begin.copy()
    # When each virtual stage has the message of each microbatch, for forwards and for backwards; an
    # unsent one (virtual stage 0, the last one) is there from the beginning.
    ready = np.zeros((2, schedule.virtual * schedule.stages + 1, schedule.microbatches))
    clock = np.zeros(schedule.stages)
    link = link if schedule.stages > 1 else 0.0
    for tick in range(schedule.ticks):
        if lockstep and tick:
            clock = np.maximum(clock, np.maximum(np.roll(clock, 1), np.roll(clock, -1))) + link
        for stage in range(schedule.stages):
            for kind, table in enumerate(tables):
                unit = int(table[tick, stage])
                if unit < 0:
                    continue
                chunk, microbatch = divmod(unit, schedule.microbatches)
                k = chunk * schedule.stages + stage
                free = clock[stage]
                if kind < 2 and not lockstep:
                    free = max(free, ready[kind, k, microbatch])
                begin[kind, tick, stage] = free
                end[kind, tick, stage] = clock[stage] = free + durations[kind][chunk, stage]
                if kind == 0:
                    ready[0, k + 1, microbatch] = clock[stage] + link
                elif kind == 1 and k:
                    ready[1, k - 1, microbatch] = clock[stage] + link
    total = float(np.nanmax(end))
    busy = np.nansum(end - begin, axis=(0, 1))
    return Simulated(total, 1.0 - float(busy.sum()) / (total * schedule.stages), busy, begin, end)

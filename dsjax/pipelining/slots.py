"""Where messages and stashes lie: every one gets a slot of a ring buffer, by interval colouring.

Time points: 2t is the start of tick t, 2t + 1 its end.  A value occupies a slot in [begin, end), and a
slot freed at the end of a tick takes what arrives at that end.  The number of slots is that of the
stage that needs most: buffers have one shape on all stages.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dsjax.errors import ConfigError, InternalError
from dsjax.pipelining.schedule import Schedule

Keep = Literal["inputs", "residuals"]
# begin, end, stage and the unit that is held
Interval = tuple[int, int, int, int]


@dataclass(frozen=True)
class Slots:
    """Slots of four buffers: stage inputs, residuals, arriving gradients, what B leaves for W.

    Counts are slots a stage and may be 0.  Tables are int32 [ticks, stages]: the slot touched in that
    tick, -1 where none is.  A tick goes in this order: the gradient sent in the previous tick is
    stored; forward; backward; weight gradient; the neighbour's activation of this tick is stored.
    """

    keep: Keep
    inputs: int
    read_input: np.ndarray  # the forward's input; on virtual stage 0 where it puts its own embedding
    store_input: np.ndarray  # the activation that arrives at the end of this tick
    backward_input: np.ndarray  # the backward's input, to compute the forward again (keep="inputs")
    residuals: int
    write_residual: np.ndarray  # by the forward
    read_residual: np.ndarray  # by the backward
    weight_residual: np.ndarray  # by the weight gradient (zero_bubble)
    gradients: int
    store_gradient: np.ndarray  # the gradient sent in the previous tick, stored at the start of this one
    read_gradient: np.ndarray  # by the backward; -1 on the last virtual stage, whose gradient is the head's
    crossings: int
    write_crossing: np.ndarray  # by the backward (zero_bubble)
    read_crossing: np.ndarray  # by the weight gradient


def allot(schedule: Schedule, keep: Keep) -> Slots:
    """Gives everything that outlives its operation a slot.

    Args:
      keep: "inputs": a stage input stays until its backward, which computes the forward again.  The
        forward of the last virtual stage may then be skipped: nothing but its backward needs it.
        "residuals": the input goes once the forward ran; what the forward saved stays until the
        backward (zero_bubble: the weight gradient).

    Raises:
      ConfigError: zero_bubble with keep="inputs".
    """
    if schedule.weight is not None and keep == "inputs":
        raise ConfigError(
            f"pipeline.schedule={schedule.name} needs saved residuals: its weight half would have to compute "
            "the forward a second time and gain nothing; set pipeline.recompute=false or pipeline.schedule=1f1b"
        )
    at = {"F": _when(schedule.forward), "B": _when(schedule.backward), "W": _when(schedule.weight)}
    last_use = at["F"] | (at["B"] if keep == "inputs" else {})
    inputs, residuals, gradients, crossings = [], [], [], []
    for (stage, unit), tick in at["F"].items():
        sender = _before(schedule, stage, unit)
        begin = 2 * at["F"][sender] + 1 if sender else 2 * tick
        inputs.append((begin, 2 * last_use[stage, unit] + 1, stage, unit))
    for (stage, unit), tick in at["B"].items():
        done = at["W"].get((stage, unit), tick)
        if keep == "residuals":
            residuals.append((2 * at["F"][stage, unit], 2 * done + 1, stage, unit))
        if schedule.weight is not None:
            crossings.append((2 * tick, 2 * done + 1, stage, unit))
        if receiver := _before(schedule, stage, unit):
            gradients.append((2 * (tick + 1), 2 * at["B"][receiver] + 1, *receiver))

    def table(slots: dict[tuple[int, int], int], ticks: dict[tuple[int, int], int]) -> np.ndarray:
        """The slot of each unit in `slots`, at its tick in `ticks`."""
        out = np.full(schedule.forward.shape, -1, np.int32)
        for place, slot in slots.items():
            if place in ticks:
                out[ticks[place], place[0]] = slot
        return out

    sent = {place: _before(schedule, *place) for place in at["F"]}
    arrival = {place: at["F"][sender] for place, sender in sent.items() if sender}
    returned = {
        receiver: at["B"][place] + 1 for place, receiver in sent.items() if receiver and place in at["B"]
    }
    of_input, of_residual, of_gradient, of_crossing = map(_colour, (inputs, residuals, gradients, crossings))
    return Slots(
        keep=keep,
        inputs=_count(of_input),
        read_input=table(of_input, at["F"]),
        store_input=table(of_input, arrival),
        backward_input=table(of_input if keep == "inputs" else {}, at["B"]),
        residuals=_count(of_residual),
        write_residual=table(of_residual, at["F"]),
        read_residual=table(of_residual, at["B"]),
        weight_residual=table(of_residual, at["W"]),
        gradients=_count(of_gradient),
        store_gradient=table(of_gradient, returned),
        read_gradient=table(of_gradient, at["B"]),
        crossings=_count(of_crossing),
        write_crossing=table(of_crossing, at["B"]),
        read_crossing=table(of_crossing, at["W"]),
    )


def _when(table: np.ndarray | None) -> dict[tuple[int, int], int]:
    """(stage, unit) -> tick."""
    if table is None:
        return {}
    return {(int(stage), int(table[tick, stage])): int(tick) for tick, stage in np.argwhere(table >= 0)}


def _before(schedule: Schedule, stage: int, unit: int) -> tuple[int, int] | None:
    """(stage, unit) that sends this one its activation and gets its gradient; None on virtual stage 0."""
    if stage:
        return stage - 1, unit
    return (schedule.stages - 1, unit - schedule.microbatches) if unit >= schedule.microbatches else None


def _colour(intervals: Iterable[Interval]) -> dict[tuple[int, int], int]:
    """(stage, unit) -> slot, each stage for itself: the lowest slot that is free when it begins."""
    slots: dict[tuple[int, int], int] = {}
    free: dict[int, list[int]] = {}
    held: dict[int, list[tuple[int, int]]] = {}
    for begin, end, stage, unit in sorted(intervals):
        unused, busy = free.setdefault(stage, []), held.setdefault(stage, [])
        while busy and busy[0][0] <= begin:
            heapq.heappush(unused, heapq.heappop(busy)[1])
        slot = heapq.heappop(unused) if unused else len(busy)
        heapq.heappush(busy, (end, slot))
        slots[stage, unit] = slot
    return slots


def _count(slots: dict[tuple[int, int], int]) -> int:
    return max(slots.values(), default=-1) + 1


def verify(schedule: Schedule, slots: Slots) -> None:
    """Replays the tables in the executor's order, with names of values for values.

    Raises:
      InternalError: an operation reads another value than its own, or something arrives unasked.
    """
    _Replay(schedule, slots).run()


class _Replay:
    """The buffers of all stages; a value is named (what, stage, unit)."""

    def __init__(self, schedule: Schedule, slots: Slots):
        self.schedule, self.slots = schedule, slots
        self.buffers: dict[tuple[str, int, int], tuple[str, int, int]] = {}
        self.sizes = {
            "input": slots.inputs,
            "residual": slots.residuals,
            "gradient": slots.gradients,
            "crossing": slots.crossings,
        }

    def run(self) -> None:
        stages = range(self.schedule.stages)
        for tick in range(self.schedule.ticks):
            for stage in stages:
                self.arrive(tick, "gradient", stage, self.gradient_for(tick, stage))
            for stage in stages:
                self.operate(tick, stage)
            for stage in stages:
                self.arrive(tick, "input", stage, self.activation_for(tick, stage))

    def gradient_for(self, tick: int, stage: int) -> int:
        """The unit whose gradient comes in from the next stage, -1 if none does."""
        s = self.schedule
        sent = s.backward[tick - 1, (stage + 1) % s.stages] if tick else -1
        if stage < s.stages - 1 or sent < 0:
            return int(sent)
        return int(max(sent - s.microbatches, -1))

    def activation_for(self, tick: int, stage: int) -> int:
        """The unit whose activation comes in from the previous stage, -1 if none does."""
        s = self.schedule
        sent = s.forward[tick, stage - 1]
        if stage or sent < 0:
            return int(sent)
        return int(sent + s.microbatches) if sent + s.microbatches < s.virtual * s.microbatches else -1

    def operate(self, tick: int, stage: int) -> None:
        s, slots = self.schedule, self.slots
        unit = int(s.forward[tick, stage])
        if unit >= 0:
            if stage == 0 and unit < s.microbatches:
                self.write(tick, "input", stage, unit, slots.read_input)
            self.read(tick, "input", stage, unit, slots.read_input)
            if slots.keep == "residuals" and s.name != "forward_only":
                self.write(tick, "residual", stage, unit, slots.write_residual)
        unit = int(s.backward[tick, stage])
        if unit >= 0:
            if slots.keep == "inputs":
                self.read(tick, "input", stage, unit, slots.backward_input)
            else:
                self.read(tick, "residual", stage, unit, slots.read_residual)
            if stage < s.stages - 1 or unit < (s.virtual - 1) * s.microbatches:
                self.read(tick, "gradient", stage, unit, slots.read_gradient)
            if s.weight is not None:
                self.write(tick, "crossing", stage, unit, slots.write_crossing)
        unit = -1 if s.weight is None else int(s.weight[tick, stage])
        if unit >= 0:
            self.read(tick, "residual", stage, unit, slots.weight_residual)
            self.read(tick, "crossing", stage, unit, slots.read_crossing)

    def arrive(self, tick: int, what: str, stage: int, unit: int) -> None:
        table = self.slots.store_input if what == "input" else self.slots.store_gradient
        if (unit >= 0) != (table[tick, stage] >= 0):
            raise InternalError(
                f"{what} of unit {unit} arrives for slot {table[tick, stage]}: tick {tick}, stage {stage}"
            )
        if unit >= 0:
            self.write(tick, what, stage, unit, table)

    def write(self, tick: int, what: str, stage: int, unit: int, table: np.ndarray) -> None:
        slot = int(table[tick, stage])
        if not 0 <= slot < self.sizes[what]:
            raise InternalError(f"{what} of unit {unit} has no slot: tick {tick}, stage {stage}")
        self.buffers[what, stage, slot] = (what, stage, unit)

    def read(self, tick: int, what: str, stage: int, unit: int, table: np.ndarray) -> None:
        found = self.buffers.get((what, stage, int(table[tick, stage])))
        if found != (what, stage, unit):
            raise InternalError(
                f"{what} of unit {unit} is not in its slot, but {found}: tick {tick}, stage {stage}"
            )

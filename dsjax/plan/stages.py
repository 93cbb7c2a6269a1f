"""A compiled step with a pipeline, read: how often its loops run on a stage, what a unit takes, what is stashed.

All stages run one program. Inside its loop over ticks tables decide what runs, and XLA does not see them; the
schedule does: a stage runs so many units in so many ticks, each through the layers of its chunk, some of them with
the embedding or the head.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from functools import cached_property

import numpy as np

from dsjax.aot import Collective, Inspection, Loop, Target, Turns
from dsjax.aot.hlo import Computation, Instruction, Module, Shape, flat
from dsjax.aot.work import Works
from dsjax.pipelining.executor import BACKWARD, FIRST, FORWARD, LAST, WEIGHT, Work
from dsjax.pipelining.simulate import Simulated, simulate
from dsjax.plan import cost
from dsjax.plan.cost import Reached
from dsjax.plan.result import Forecast, Pipelined
from dsjax.plan.timetable import pipelined

_IN_UNIT = re.compile(rf"/({FORWARD}|{BACKWARD}|{WEIGHT})/(.*)$")
_CALLS = ("body", "closed_call", "")


def turns_on(work: Work, units: Mapping[str, Fraction | int], virtual: Collection[int]) -> Turns:
    """The turns of loops that the program does not tell.

    Args:
      units: FORWARD, BACKWARD, WEIGHT -> how many run in a tick; none of a kind that it lacks.
      virtual: the virtual stages that they are of, each as often.
    """
    end = work.schedule.stages * work.schedule.virtual - 1
    first, last = (Fraction(sum(k == one for k in virtual), len(virtual)) for one in (0, end))

    def layers(of: Collection[int]) -> Fraction:
        return Fraction(sum(work.counts[k] for k in of), max(len(of), 1))

    within: dict[str, dict[tuple[str, ...], Fraction | int]] = {
        kind: {
            ("while",): units.get(kind, 0),
            ("while", FIRST, "while"): first,
            ("while", LAST, "while"): last,
            ("while", "while"): layers(virtual),
        }
        for kind in (FORWARD, BACKWARD, WEIGHT)
    }
    if work.slots.keep == "inputs":
        # The last virtual stage leaves its layers to its backward, which computes them again anyway.
        within[FORWARD] |= {
            ("while", "while"): 1 - last,
            ("while", "while", "while"): layers([k for k in virtual if k != end]),
        }

    def turns(loop: Loop) -> int | Fraction | None:
        found = _IN_UNIT.search(loop.op_name) if loop.trips is None else None
        if found is None:
            return loop.trips
        return within[found.group(1)].get(tuple(w for w in found.group(2).split("/") if w not in _CALLS))

    return turns


class PipelinedStep:
    """A compiled step with a pipeline.

    Args:
      inspection: of the program, as it is.
      passes: of the pipeline in a step (train.gradient_accumulation_steps).
    """

    def __init__(self, inspection: Inspection, work: Work, passes: int, target: Target, reached: Reached):
        self._as_it_is, self._work, self._passes = inspection, work, passes
        self._target, self._reached = target, reached
        self._tick_loops = {i.name: c for c, i in tick_loops(inspection.module)}

    @property
    def _runs(self) -> int:
        """Ticks of a step."""
        return self._work.schedule.ticks * self._passes

    @cached_property
    def busiest(self) -> int:
        """The stage that works longest."""
        return int(sum(times.sum(axis=0) for times in self.units).argmax())  # type: ignore[union-attr]

    @cached_property
    def inspection(self) -> Inspection:
        """The program as the busiest stage runs it."""
        return self.on_stage(self.busiest)

    def on_stage(self, stage: int) -> Inspection:
        """The program as a stage runs it, in the mean over its ticks."""
        return self._as_it_is.counted(self._on_stage(stage))

    def _turns(self, units: Mapping[str, Fraction | int], virtual: Collection[int]) -> Turns:
        """`turns_on`, and the ticks where the program does not tell them."""
        inside, ticks = turns_on(self._work, units, virtual), self._work.schedule.ticks

        def turns(loop: Loop) -> int | Fraction | None:
            return ticks if loop.trips is None and loop.name in self._tick_loops else inside(loop)

        return turns

    def _on_stage(self, stage: int) -> Turns:
        """The turns on a stage, in the mean over its ticks."""
        schedule = self._work.schedule
        share = Fraction(schedule.microbatches * schedule.virtual, schedule.ticks)
        own = range(stage, schedule.stages * schedule.virtual, schedule.stages)
        return self._turns(dict.fromkeys((FORWARD, BACKWARD, WEIGHT), share), own)

    @cached_property
    def flops(self) -> float:
        """FLOPs of products of a step on a device, in the mean over all."""
        module, stages = self._as_it_is.module, range(self._work.schedule.stages)
        works = [Works(module, self._on_stage(s)).of_computation(module.entry.name) for s in stages]
        return sum(work.total_flops for work in works) / len(works)

    # ---- seconds -------------------------------------------------------------------------------

    @cached_property
    def units(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds of a forward, a backward and a weight gradient, [virtual, stages] each."""
        schedule, known = self._work.schedule, dict[tuple[object, ...], float]()
        count = schedule.stages * schedule.virtual

        def unit(kind: str, k: int) -> float:
            alike = (kind, k == 0, k == count - 1, self._work.counts[k])
            if alike not in known:
                known[alike] = self._unit(kind, k)
            return known[alike]

        def table(kind: str) -> np.ndarray:
            return np.array([unit(kind, k) for k in range(count)]).reshape(schedule.virtual, -1)

        forward, backward = table(FORWARD), table(BACKWARD)
        return forward, backward, np.zeros_like(forward) if schedule.weight is None else table(WEIGHT)

    def _unit(self, kind: str, k: int) -> float:
        """Seconds of one unit of a virtual stage: what it computes, and what it waits for."""
        read = self._as_it_is.counted(self._turns({kind: 1}, [k]))
        inside = (c for c in read.collectives.in_loop(kind))
        return (self._compute(read) - self._without_units + self._exposed(inside)) / self._runs

    def _compute(self, inspection: Inspection) -> float:
        return cost.compute_seconds(inspection, self._target, self._reached)

    def _exposed(self, collectives: Iterable[Collective]) -> float:
        return sum(cost.exposed_seconds(c, self._target, self._reached) for c in collectives)

    @cached_property
    def _without_units(self) -> float:
        """Compute seconds of a step whose ticks are all idle: their bookkeeping, and what stands outside."""
        return self._compute(self._as_it_is.counted(self._turns({}, [0])))

    @cached_property
    def _outside(self) -> tuple[float, float]:
        """Seconds of compute and of waiting before and after the ticks: gathers, reductions, the optimizer."""

        def turns(loop: Loop) -> int | Fraction | None:
            return 0 if loop.name in self._tick_loops else loop.trips

        read = self._as_it_is.counted(turns)
        return self._compute(read), self._exposed(read.collectives)

    @cached_property
    def between(self) -> float:
        """Seconds of a tick beside its units: waiting for what is handed over, and putting it away."""
        handed = self._exposed(c for c in self.inspection.collectives if self._handed(c))
        return (handed + self._without_units - self._outside[0]) / self._runs

    def _handed(self, collective: Collective) -> bool:
        """Whether it stands in a tick, outside of its units."""
        return bool(collective.loops) and collective.loops[-1].name in self._tick_loops

    @cached_property
    def simulated(self) -> Simulated:
        """One pass."""
        return simulate(self._work.schedule, *self.units, self.between)

    def forecast(self) -> Forecast:
        """The predicted time of a step: the passes as simulated, and what comes before and after."""
        simulated, passes = self.simulated, self._passes
        step = max(
            passes * simulated.total + sum(self._outside),
            *cost.link_times(self.inspection, self._target, self._reached),
        )
        idle = simulated.total - float(simulated.busy.max()) - self.between * self._work.schedule.ticks
        return cost.corrected(step, self._compute(self.inspection), self._reached, passes * max(0.0, idle))

    # ---- what is told --------------------------------------------------------------------------

    def told(self) -> Pipelined:
        """What a plan says of the pipeline."""
        return pipelined(
            self._work, self._passes, self.units, self.between, self.stash_bytes, self._reached.step
        )

    @cached_property
    def stash_bytes(self) -> int:
        """Bytes that a device keeps from tick to tick: slots of inputs, of gradients, of residuals.

        Of what the loop over ticks carries, that is what it changes and nobody reads after it; not the two
        messages on their way, and not the workspace of stages that are computed again.
        """
        name, around = next(iter(self._tick_loops.items()))
        loop = around.by_name[name]
        body = self._as_it_is.module.computations[loop.called["body"][0]]
        messages = {
            array
            for i in body.instructions
            if i.opcode.removesuffix("-start") == "collective-permute"
            for operand in body.operands(i)
            for array in flat(operand.shape)
        }
        carried = [array for array in _scratch(around, loop, body) if array.dims and array not in messages]
        if self._work.slots.keep == "inputs":
            carried = [array for array in carried if Shape(array.dtype, array.dims[1:]) in messages]
        return sum(array.bytes for array in carried)


def tick_loops(module: Module) -> list[tuple[Computation, Instruction]]:
    """The loops over ticks, with the computations they stand in; several where XLA wrote out the passes."""
    unit = re.compile(rf"/({FORWARD}|{BACKWARD}|{WEIGHT})/while$")
    loops = [(c, i) for c in module for i in c.instructions if i.opcode == "while"]
    bodies = {c.name for c, i in loops if unit.search(i.op_name)}
    return [(c, i) for c, i in loops if i.called["body"][0] in bodies]


def _scratch(around: Computation, loop: Instruction, body: Computation) -> list[Shape]:
    """Arrays that a loop carries and changes, and that nobody reads after it."""
    read = {
        int(user.attributes["index"])
        for user in around.users[loop.name]
        if user.opcode == "get-tuple-element" and around.users[user.name]
    }
    assert isinstance(loop.shape, tuple)
    return [
        shape
        for index, (shape, result) in enumerate(zip(loop.shape, body.operands(body.root), strict=True))
        if isinstance(shape, Shape) and index not in read and not _passed_on(body, result, index)
    ]


def _passed_on(body: Computation, result: Instruction, index: int) -> bool:
    """Whether an element of what a loop carries comes out of its body as it went in."""
    while result.opcode in ("copy", "bitcast"):
        result = body.operands(result)[0]
    return (
        result.opcode == "get-tuple-element"
        and int(result.attributes["index"]) == index
        and body.operands(result)[0].opcode == "parameter"
    )

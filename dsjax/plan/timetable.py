"""The schedule of a pipelined run with the times of its units: what a plan tells of it, and its picture."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dsjax.pipelining.draw import as_svg, as_text
from dsjax.pipelining.executor import Work
from dsjax.pipelining.partition import Partition
from dsjax.pipelining.partition import told as layers_told
from dsjax.pipelining.schedule import Schedule, bubble_formula, make_schedule
from dsjax.pipelining.simulate import Simulated, simulate
from dsjax.plan.result import Pipelined

_UNITS = ((1.0, "seconds"), (1e-3, "milliseconds"), (1e-6, "microseconds"))

Units = tuple[np.ndarray, np.ndarray, np.ndarray]


def pipelined(
    work: Work, passes: int, units: Units, between: float, stash_bytes: int, ratio: float
) -> Pipelined:
    """What a plan says of a pipeline.

    Args:
      units: seconds of forward, backward, weight gradient, [virtual, stages] each; between: of the rest of a tick.
      ratio: of measured steps to the model's, by which all seconds are corrected.
    """
    schedule = work.schedule
    forward, backward, weight = (ratio * times for times in units)
    simulated = simulate(schedule, forward, backward, weight, ratio * between)
    formula = bubble_formula(
        schedule.name,
        schedule.stages,
        schedule.microbatches,
        schedule.virtual,
        float(forward.mean()),
        float((backward + weight).mean()),
        float(weight.mean()),
    )
    return Pipelined(
        schedule=schedule.name,
        stages=schedule.stages,
        microbatches=schedule.microbatches,
        passes=passes,
        virtual=schedule.virtual,
        layers=work.counts,
        ticks=schedule.ticks,
        bubble=simulated.bubble,
        bubble_formula=formula,
        stash_bytes=stash_bytes,
        forward_seconds=forward.tolist(),
        backward_seconds=backward.tolist(),
        weight_seconds=None if schedule.weight is None else weight.tolist(),
        link_seconds=ratio * between,
    )


def timetable(told: Pipelined) -> tuple[Schedule, Simulated]:
    """The schedule of a plan, and one pass of it with the plan's times."""
    schedule = make_schedule(told.schedule, told.stages, told.microbatches, told.virtual)
    weight = 0.0 if told.weight_seconds is None else told.weight_seconds
    return schedule, simulate(
        schedule, told.forward_seconds, told.backward_seconds, weight, told.link_seconds
    )


def picture(told: Pipelined, title: str) -> str:
    """The schedule as a page of SVG, drawn with the plan's times."""
    schedule, simulated = timetable(told)
    unit, name = next((u, n) for u, n in _UNITS if simulated.total >= u or u == _UNITS[-1][0])
    scaled = replace(
        simulated, total=simulated.total / unit, begin=simulated.begin / unit, end=simulated.end / unit
    )
    return as_svg(schedule, scaled, f"{title} (in {name})")


def letters(told: Pipelined, width: int) -> str:
    """The schedule in letters of a terminal, a line a stage."""
    return as_text(timetable(told)[0], width)


def layers_words(told: Pipelined) -> str:
    """Layers of each stage; of its chunks, where it has several."""
    return layers_told(Partition(told.stages, told.virtual, told.layers))

"""Pipeline schedules as tables: which unit each stage works on in each tick.

All stages run one program, a scan over ticks.  In a tick a stage does at most one forward, then at
most one backward, then at most one weight gradient; between ticks activations go to the next stage of
the ring and gradients to the previous one.  Chunk c on stage s is virtual stage c * stages + s; a unit
is one microbatch in one chunk, written chunk * microbatches + microbatch, and -1 where there is none.

The letters below: p stages, M microbatches, v chunks a stage, t tick, s stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsjax.errors import ConfigError, InternalError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


@dataclass(frozen=True)
class Schedule:
    """Who does what when.

    `name` is one of SCHEDULES, or "forward_only" for evaluation.  The tables are int32 [ticks, stages]
    and hold a unit or -1.
    """

    name: str
    stages: int
    microbatches: int
    virtual: int
    forward: np.ndarray
    backward: np.ndarray  # zero_bubble: only the half that gives the input's gradient
    weight: np.ndarray | None  # zero_bubble: the half that gives the weights' gradient

    @property
    def ticks(self) -> int:
        return len(self.forward)


def make_schedule(name: str, stages: int, microbatches: int, virtual: int = 1) -> Schedule:
    """The tables of a schedule.

    Args:
      name: one of SCHEDULES.
      stages: mesh.pipeline.
      microbatches: pipeline.microbatches.
      virtual: pipeline.virtual_stages, chunks of the model a stage holds.

    Raises:
      ConfigError: the schedule cannot be run so; the message says what would work.
    """
    _refuse(name, stages, microbatches, virtual)
    if name == "zero_bubble":
        return _zero_bubble(stages, microbatches)
    if name == "gpipe":
        # All forwards first: the first backward shares a tick with the last forward of the last stage.
        delay = stages + microbatches - 2
    else:
        # The first microbatch turns around in the tick in which it reaches the last virtual stage; with
        # v chunks it is the largest group that sets when that can be kept up without a gap.
        delay = (virtual - 1) * max(_groups(stages, microbatches)) + stages - 1
    ticks = delay + microbatches * virtual + stages - 1
    forward = _diagonal(_order(stages, microbatches, range(virtual)), ticks, range(stages))
    starts = range(delay + stages - 1, delay - 1, -1)
    backward = _diagonal(_order(stages, microbatches, range(virtual)[::-1]), ticks, starts)
    return Schedule(name, stages, microbatches, virtual, forward, backward, None)


def forward_only(stages: int, microbatches: int, virtual: int = 1) -> Schedule:
    """The forwards of 1f1b or interleaved alone, for evaluation; `backward` is all -1.

    Any number of microbatches will do: where chunks want more of them, stages stand idle.
    """
    order = _order(stages, microbatches, range(virtual))
    if microbatches < stages:
        gaps = np.full((virtual, stages - microbatches), -1, np.int32)
        order = np.concatenate([order.reshape(virtual, microbatches), gaps], axis=1).reshape(-1)
    ticks = len(order) + stages - 1
    forward = _diagonal(order, ticks, range(stages))
    nothing = np.full_like(forward, -1)
    return Schedule("forward_only", stages, microbatches, virtual, forward, nothing, None)


def bubble_formula(
    name: str,
    stages: int,
    microbatches: int,
    virtual: int = 1,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float = 1.0,
) -> float:
    """Fraction of time a stage is idle, for equal stages and links that take no time.

    GPipe (Huang et al. 2019) and 1F1B (Narayanan et al. 2019): (p - 1) / (M + p - 1).  Interleaved
    (Narayanan et al. 2021): (p - 1) / (vM + p - 1).  ZB-H1 (Qi et al. 2023): (p - 1)(F + B - 2W) of idle
    time on top of M(F + B), for M >= p.

    Args:
      forward, backward, weight: time of a microbatch on a stage, in any unit; `backward` is the whole
        backward and `weight` its half that gives the weights' gradient.
    """
    if name == "zero_bubble":
        idle = (stages - 1) * (forward + backward - 2 * weight)
        return idle / (microbatches * (forward + backward) + idle)
    return (stages - 1) / (virtual * microbatches + stages - 1)


def _refuse(name: str, stages: int, microbatches: int, virtual: int) -> None:
    """Raises the ConfigError of a schedule that cannot be run."""
    counts = {
        "mesh.pipeline": stages,
        "pipeline.microbatches": microbatches,
        "pipeline.virtual_stages": virtual,
    }
    faults = [f"{setting} must be at least 1, got {value}" for setting, value in counts.items() if value < 1]
    if name not in SCHEDULES:
        faults.append(f"pipeline.schedule takes {', '.join(SCHEDULES)}, got {name!r}")
    if faults:
        raise ConfigError(faults)
    if name != "interleaved" and virtual > 1:
        raise ConfigError(
            f"pipeline.schedule={name} holds one chunk a stage, got pipeline.virtual_stages={virtual}; "
            "set pipeline.virtual_stages=1 or pipeline.schedule=interleaved"
        )
    if name == "interleaved" and virtual == 1:
        raise ConfigError(
            "pipeline.schedule=interleaved needs pipeline.virtual_stages of at least 2, got 1; "
            "set pipeline.virtual_stages=2, or pipeline.schedule=1f1b, which is the same with one chunk"
        )
    if name == "interleaved" and microbatches < stages:
        raise ConfigError(
            "pipeline.schedule=interleaved needs at least as many microbatches as stages, got "
            f"pipeline.microbatches={microbatches} with mesh.pipeline={stages}; set "
            f"pipeline.microbatches={stages}, or pipeline.schedule=1f1b with pipeline.virtual_stages=1"
        )


# Interleaving: microbatches pass a chunk in groups, all of a group through one chunk, then through the
# next.  A group of at least p keeps every stage busy, since the first of it is back at stage 0 after p
# ticks.  As many groups as that allows, as even as possible, larger ones first: short groups shorten
# the delay until backwards start, and so hold less.
def _groups(stages: int, microbatches: int) -> list[int]:
    """Sizes of the groups; one group where there are fewer microbatches than stages."""
    count = max(microbatches // stages, 1)
    size, larger = divmod(microbatches, count)
    return [size + 1] * larger + [size] * (count - larger)


def _order(stages: int, microbatches: int, chunks: Sequence[int]) -> np.ndarray:
    """Units in the order in which every stage takes them, `chunks` in the order of passing."""
    units, first = [], 0
    for size in _groups(stages, microbatches):
        units += [chunk * microbatches + first + i for chunk in chunks for i in range(size)]
        first += size
    return np.array(units, np.int32)


# Step k of the order happens on stage s at tick starts[s] + k.
#   forwards: starts[s] = s
#   backwards: starts[s] = D + p - 1 - s, D = p - 1 (1f1b), M + p - 2 (gpipe),
#     (v - 1) * max group + p - 1 (interleaved)
# Time: D ticks with forwards only, then Mv + p - 1 - D with both, then D with backwards only, hence
# (Mv + p - 1)(F + B) in each case.
def _diagonal(order: np.ndarray, ticks: int, starts: Sequence[int]) -> np.ndarray:
    """int32 [ticks, stages]: the order on every stage, begun at its own tick."""
    table = np.full((ticks, len(starts)), -1, np.int32)
    for stage, start in enumerate(starts):
        table[start : start + len(order), stage] = order
    return table


# ZB-H1: one operation a tick.  Stage s keeps at most p - s microbatches between forward and backward,
# as 1F1B does, and lets s weight gradients wait, which fill what would be its bubble at the end.
# Hence p microbatches in flight on every stage.  With the next operation so fixed, and run as soon as
# its message is there, M >= p take 3M + p - 1 ticks and M < p take 2(M + p) - 1.
def _zero_bubble(stages: int, microbatches: int) -> Schedule:
    done = np.zeros((3, stages), int)  # forwards, backwards, weight gradients
    rows: list[np.ndarray] = []
    while done[2].min() < microbatches:
        before = done.copy()
        row = np.full((3, stages), -1, np.int32)
        for stage in range(stages):
            forwards, backwards, weights = before[:, stage]
            last = stage == stages - 1
            if weights == microbatches:
                continue
            if backwards - weights > stage:
                kind, ready = 2, True
            elif forwards < microbatches and forwards - backwards < stages - stage:
                kind, ready = 0, stage == 0 or before[0, stage - 1] > forwards
            elif backwards < forwards:
                kind, ready = 1, last or before[1, stage + 1] > backwards
            else:
                kind, ready = 2, True
            if ready:
                row[kind, stage] = done[kind, stage]
                done[kind, stage] += 1
        rows.append(row)
    forward, backward, weight = np.stack(rows, axis=1)
    return Schedule("zero_bubble", stages, microbatches, 1, forward, backward, weight)


def check(schedule: Schedule) -> None:
    """Proves that the tables can be run as they stand.

    Each unit once a stage; a forward in a later tick than that of the virtual stage before; a backward
    in a later tick than that of the virtual stage after, on the last one not before its forward; a
    weight gradient not before its backward.

    Raises:
      InternalError: naming tick, stage and unit.
    """
    p, last = schedule.stages, schedule.stages * schedule.virtual - 1
    forward = _ticks_of(schedule, schedule.forward, "forward")
    for k, microbatch in np.ndindex(forward.shape):
        if k and forward[k, microbatch] <= forward[k - 1, microbatch]:
            raise _fault("forward before its input came", int(forward[k, microbatch]), k, microbatch, p)
    if schedule.name == "forward_only":
        return
    backward = _ticks_of(schedule, schedule.backward, "backward")
    for k, microbatch in np.ndindex(backward.shape):
        tick = int(backward[k, microbatch])
        if k == last and tick < forward[k, microbatch]:
            raise _fault("backward before its forward", tick, k, microbatch, p)
        if k < last and tick <= backward[k + 1, microbatch]:
            raise _fault("backward before its gradient came", tick, k, microbatch, p)
    if schedule.weight is not None:
        weight = _ticks_of(schedule, schedule.weight, "weight gradient")
        for k, microbatch in np.argwhere(weight < backward):
            tick = int(weight[k, microbatch])
            raise _fault("weight gradient before its backward", tick, k, microbatch, p)


def _ticks_of(schedule: Schedule, table: np.ndarray, what: str) -> np.ndarray:
    """int [virtual stages, microbatches]: the tick of each unit; raises InternalError unless it has one."""
    p, m = schedule.stages, schedule.microbatches
    ticks = np.full((schedule.virtual * p, m), -1)
    for tick, stage in np.argwhere(table != -1):
        chunk, microbatch = divmod(int(table[tick, stage]), m)
        k = chunk * p + stage
        if not 0 <= chunk < schedule.virtual:
            raise InternalError(f"{what} of no unit: tick {tick}, stage {stage}, unit {table[tick, stage]}")
        if ticks[k, microbatch] >= 0:
            raise _fault(f"{what} a second time", tick, k, microbatch, p)
        ticks[k, microbatch] = tick
    for k, microbatch in np.argwhere(ticks < 0):
        raise _fault(f"{what} missing", None, k, microbatch, p)
    return ticks


def _fault(what: str, tick: int | None, k: int, microbatch: int, stages: int) -> InternalError:
    """The error for microbatch `microbatch` at virtual stage `k`."""
    chunk, stage = divmod(int(k), stages)
    when = "" if tick is None else f"tick {tick}, "
    return InternalError(f"{what}: {when}stage {stage}, unit (microbatch {microbatch}, chunk {chunk})")

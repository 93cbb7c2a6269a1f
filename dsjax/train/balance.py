"""Keeps the stages of a pipeline equally long while it runs: times them, and moves layers where that pays.

Every so often each device computes its own stage of one microbatch alone, queued between two steps, so that
neither the host nor any exchange is in the figure.  The loop goes on meanwhile; some steps later the times are
there, the partition is solved anew, and if enough is gained the state moves to it at a step boundary.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from dsjax.errors import ConfigError, OutOfDeviceMemory
from dsjax.mesh import batch_shards, map_named, named_leaves
from dsjax.pipelining.partition import Partition, restacked, told
from dsjax.pipelining.simulate import simulate
from dsjax.train.carried import Kept
from dsjax.train.host_batch import abstract
from dsjax.train.program import Program
from dsjax.train.recorder import LAG, Recorder
from dsjax.train.stacking import microbatches_of
from dsjax.train.stage_costs import Costs

# A stage is told to be slow where it takes so many times as long as the median one for its layers.
_SLOW = 1.5
# A device computes its stage so often; the shortest time counts, for what disturbs it only adds.
_TIMES = 3
# Steps before the first timing at which its program begins to be compiled, beside the training.
_AHEAD = 10
# Forwards and backwards of a stage are timed together; a backward is about so much of both.
_BACKWARD = 2 / 3


class _Timing:
    """Probes under way, one after the other: when each device of this process was done with each."""

    def __init__(self, due: int):
        self.due = due
        self._done: list[dict[int, float]] = []
        self._threads: list[threading.Thread] = []

    def watch(self, array: jax.Array) -> None:
        """Notes when each device's part of an array is there."""
        times: dict[int, float] = {}
        self._done.append(times)
        for shard in array.addressable_shards:
            thread = threading.Thread(target=self._wait, args=(times, shard), daemon=True)
            thread.start()
            self._threads.append(thread)

    @staticmethod
    def _wait(times: dict[int, float], shard: Any) -> None:
        shard.data.block_until_ready()
        times[shard.device.id] = time.monotonic()

    def seconds(self, probe: int) -> dict[int, float]:
        """Device id -> the shortest time in seconds that the devices took for a probe."""
        for thread in self._threads:
            thread.join()
        marks = self._done[probe * _TIMES : (probe + 1) * _TIMES + 1]
        took = [{device: end[device] - begin[device] for device in end} for begin, end in pairwise(marks)]
        return {device: min(times[device] for times in took) for device in took[0]}


class _Compiled:
    """A program's probe, compiled on a thread of its own."""

    def __init__(self, program: Program, batch: Any):
        self._thread = threading.Thread(target=self._compile, args=(program, batch))
        self._thread.start()
        if _one_after_the_other(program):
            self._thread.join()

    def _compile(self, program: Program, batch: Any) -> None:
        try:
            self._probe = program.probe(batch)
        except Exception as error:
            self._error = error

    def get(self) -> Any:
        """The compiled probe, once it is there."""
        self._thread.join()
        if hasattr(self, "_error"):
            raise self._error
        return self._probe


class Balancer:
    """Called once a step by the loop; idle where there is no pipeline or `pipeline.rebalance_every` is 0.

    Args:
      changed: told of the program that takes the place of the one before.
      last: the last step of this call; no timing begins that would not have as many steps before it again.
    """

    def __init__(self, program: Program, recorder: Recorder, changed: Callable[[Program], None], last: int):
        self._recorder, self._changed, self._last = recorder, changed, last
        self._every = program.pipeline.rebalance_every if program.stacking is not None else 0
        self._timing: _Timing | None = None
        self._probes: dict[int, _Compiled] = {}
        # The program with other microbatches that is timed beside the present one.
        self._trial: Program | None = None
        self._untried = _other_sizes(program) if self._every else []
        # What the next step waits for, so that it does not run beside the probe.
        self._after: jax.Array | None = None

    def votes(self, votes: jax.Array) -> jax.Array:
        """The step's votes, on each device only there once its probe is done."""
        after, self._after = self._after, None
        return votes if after is None else _sum(votes, after)

    def step_done(self, step: int, program: Program, state: Any, batch: Any) -> tuple[Program, Any]:
        """The program and state to go on with."""
        if not self._every:
            return program, state
        upcoming = -(-step // self._every) * self._every
        if self._timing is None and upcoming + self._every > self._last:
            return program, state
        if (step + min(_AHEAD, self._every // 2)) % self._every == 0:
            self._compile(program, batch)
        if step % self._every == 0 and self._timing is None:
            self._start(step, program, state, batch)
        elif self._timing is not None and step >= self._timing.due:
            timing, self._timing = self._timing, None
            return self._decide(step, program, state, batch, timing)
        return program, state

    def close(self) -> None:
        """Waits for what is still being compiled."""
        for probe in self._probes.values():
            with suppress(Exception):
                probe.get()

    # ---- timing --------------------------------------------------------------------------------

    def _compile(self, program: Program, batch: Any) -> None:
        """Begins to compile the probes of this program and of the next one to try, unless they are there."""
        if self._trial is None:
            self._trial = self._next_trial(program, batch)
        wanted = [(program, abstract(batch))]
        wanted += [(self._trial, self._trial.like_batch(batch))] if self._trial is not None else []
        for one, like in wanted:
            if one.microbatches not in self._probes:
                with self._recorder.progress.busy("compiling the probe of the stages"):
                    self._probes[one.microbatches] = _Compiled(one, like)
                self._recorder.start_clock()

    def _start(self, step: int, program: Program, state: Any, batch: Any) -> None:
        self._compile(program, batch)
        self._timing = _Timing(due=step + LAG + 1)
        self._after = _after(state.step, program.votes())
        self._timing.watch(self._after)
        self._queue(program, state, batch)
        if self._trial is not None:
            self._queue(self._trial, state, _zeros(self._trial.like_batch(batch)))

    def _queue(self, program: Program, state: Any, batch: Any) -> None:
        assert self._timing is not None
        probe, waits = self._probes[program.microbatches].get(), _one_after_the_other(program)
        for _ in range(_TIMES):
            _, self._after = probe(state, batch, self._after)
            self._timing.watch(self._after)
            if waits:
                jax.block_until_ready(self._after)

    def _next_trial(self, program: Program, batch: Any) -> Program | None:
        """A program of another number of microbatches that this process's rows allow, not timed before."""
        rows = math.prod(jax.tree.leaves(batch)[0].shape[:2])
        shards = batch_shards(program.mesh)
        while self._untried:
            count = self._untried.pop(0)
            if rows % (count * program.accumulation * shards):
                continue
            try:
                trial = replace(program, found=replace(program.found, microbatches=count))
            except ConfigError:
                continue
            # Another order of the rows would want another loader.
            if np.array_equal(trial.rows(rows), program.rows(rows)):
                return trial
        return None

    # ---- deciding ------------------------------------------------------------------------------

    def _decide(
        self, step: int, program: Program, state: Any, batch: Any, timing: _Timing
    ) -> tuple[Program, Any]:
        seconds = _agreed(program, timing.seconds(0))
        self._tell(step, program, seconds)
        wanted = self._wanted(program, batch, seconds)
        if wanted is None and self._trial is not None:
            wanted = self._resized(program, batch, seconds, _agreed(program, timing.seconds(1)))
        if self._trial is not None:
            self._probes.pop(self._trial.microbatches).get()
            after = program if wanted is None else wanted[0]
            after.found = replace(after.found, tried=(*program.found.tried, _passing(self._trial)))
            self._trial = None
        return (program, state) if wanted is None else self._move(step, program, state, *wanted, seconds)

    def _tell(self, step: int, program: Program, seconds: np.ndarray) -> None:
        """Puts the stages' times into the metrics; names slow ones."""
        self._recorder.stage_seconds = seconds.tolist()
        pace = _pace(program, seconds)
        for stage in np.flatnonzero(pace > _SLOW * np.median(pace)):
            times = float(pace[stage] / np.median(pace))
            self._recorder.event(
                "slow_stage", step, stage=int(stage), seconds=float(seconds[stage]), times=times
            )
            self._recorder.progress.message(
                f"step {step}: stage {stage} is slow: {seconds[stage]:.3g} s a microbatch, {times:.1f} times what its "
                "layers take elsewhere"
            )

    def _wanted(self, program: Program, batch: Any, seconds: np.ndarray) -> tuple[Program, float] | None:
        """The program of a better partition, and what it saves; None where it does not pay."""
        assert program.stacking is not None
        now, recompute, pace = program.stacking.partition, _recompute(program), _pace(program, seconds)
        best = _costs(program).partition(now.layers, now.stages, now.virtual, recompute, pace.tolist())
        gain = 1 - _predicted(program, best, pace) / _predicted(program, now, pace)
        set_by_hand = program.pipeline.layers is not None
        if set_by_hand or best.counts == now.counts or gain < program.pipeline.rebalance_gain:
            return None
        return self._fitting(replace(program, found=replace(program.found, layers=best.counts)), batch, gain)

    def _fitting(self, wanted: Program, batch: Any, gain: float) -> tuple[Program, float] | None:
        """The program and its gain, its step compiled; None where it does not fit."""
        try:
            with self._recorder.progress.busy("compiling the step with other stages"):
                wanted.step(wanted.like_batch(batch))
        except OutOfDeviceMemory:
            return None
        return wanted, gain

    def _resized(
        self, program: Program, batch: Any, seconds: np.ndarray, others: np.ndarray
    ) -> tuple[Program, float] | None:
        """The program of other microbatches, if it is faster by the measured times and fits."""
        trial = self._trial
        assert trial is not None and trial.stacking is not None and program.stacking is not None
        now, then = (
            _predicted(p, p.stacking.partition, _pace(p, s))  # type: ignore[union-attr]
            for p, s in ((program, seconds), (trial, others))
        )
        if 1 - then / now < program.pipeline.rebalance_gain:
            return None
        return self._fitting(trial, batch, 1 - then / now)

    def _move(
        self, step: int, program: Program, state: Any, wanted: Program, gain: float, seconds: np.ndarray
    ) -> tuple[Program, Any]:
        self._recorder.drain()
        before, after = _layout(program), _layout(wanted)
        words = ", ".join(
            f"{key} {before[key]} -> {after[key]}" for key in after if before[key] != after[key]
        )
        with self._recorder.progress.busy(f"rebalancing: {words}"):
            state = _moved(program, wanted, state)
        self._probes.clear()
        self._recorder.event(
            "rebalanced", step, before=before, after=after, stage_seconds=seconds.tolist(),
            predicted_gain=round(gain, 4),
        )  # fmt: skip
        self._recorder.progress.message(f"step {step}: {words}; a step should take {gain:.0%} less time")
        self._recorder.start_clock()
        self._changed(wanted)
        return wanted, state


def _one_after_the_other(program: Program) -> bool:
    """Whether programs are better not queued or compiled beside others.

    The devices of a CPU share its threads: programs that wait for each other's collectives can take them all.
    """
    return program.layout.on_cpu


def _layout(program: Program) -> dict[str, Any]:
    assert program.stacking is not None
    return {"layers a stage": told(program.stacking.partition), "microbatches": _passing(program)}


def _passing(program: Program) -> int:
    """Microbatches of a pass."""
    return program.stacking.pipelining.work.schedule.microbatches  # type: ignore[union-attr]


def _other_sizes(program: Program) -> list[int]:
    """Half and twice as many microbatches as by default, but for those tried; none where the config says how many."""
    if program.pipeline.microbatches is not None:
        return []
    count = microbatches_of(program.pipeline, program.mesh.shape["pipeline"], program.rows_a_pass)
    return [n for n in (count // 2, 2 * count) if n and n not in program.found.tried]


def _recompute(program: Program) -> bool:
    return program.stacking.pipelining.work.slots.keep == "inputs"  # type: ignore[union-attr]


def _costs(program: Program) -> Costs:
    return program.costs or Costs(1.0, 0.0, 0.0)


def _pace(program: Program, seconds: np.ndarray) -> np.ndarray:
    """Seconds per cost of each stage."""
    partition = program.stacking.partition  # type: ignore[union-attr]
    return seconds / np.sum(_costs(program).of_stages(partition, _recompute(program)), axis=0)


def _predicted(program: Program, partition: Partition, pace: np.ndarray) -> float:
    """Seconds of a step's passes of the pipeline with another partition."""
    schedule = program.stacking.pipelining.work.schedule  # type: ignore[union-attr]
    both = np.array(_costs(program).of_stages(partition, _recompute(program))) * pace
    back = both * _BACKWARD
    halves = (back, 0.0) if schedule.weight is None else (back / 2, back / 2)
    return program.accumulation * simulate(schedule, both - back, *halves).total


def _agreed(program: Program, seconds: dict[int, float]) -> np.ndarray:
    """Seconds of each stage, the same on every process: the slowest of its devices."""
    devices = program.mesh.devices
    table = np.zeros(devices.shape[0])
    for stage in range(devices.shape[0]):
        table[stage] = max((seconds.get(d.id, 0.0) for d in devices[stage].flat), default=0.0)
    if jax.process_count() > 1:
        table = np.max(multihost_utils.process_allgather(table), axis=0)
    return table


@jax.jit
def _sum(votes: jax.Array, after: jax.Array) -> jax.Array:
    return votes + after


def _begun(step: jax.Array, zeros: jax.Array) -> jax.Array:
    return zeros * 2


# The step's number is not used: the program waits for it all the same.
_after = jax.jit(_begun, keep_unused=True)


def _zeros(shapes: Any) -> Any:
    places = jax.tree.map(lambda s: s.sharding, shapes)
    return jax.jit(
        lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), out_shardings=places
    )()


def _moved(program: Program, wanted: Program, state: Any) -> Any:
    """The state with its layers where another program wants them, one array after the other."""
    assert program.stacking is not None and wanted.stacking is not None
    held, slots, stack = program.stacking.slots, wanted.stacking.slots, program.stack
    if np.array_equal(held, slots):
        return state
    places = named_leaves(wanted.state_shardings)

    def one(name: str, leaf: Any) -> Any:
        if not stack.holds(name, leaf.shape, len(held)):
            return leaf
        new = jax.jit(lambda leaf: restacked(leaf, held, slots), out_shardings=places[name])(leaf)
        # Only one array at a time is there twice.
        new.block_until_ready()
        leaf.delete()
        return new

    residuals = Kept.of(wanted, program.facts()).carried(state.residuals)
    return replace(map_named(one, replace(state, residuals={})), residuals=residuals)

"""The loop: batch, step, record; save and evaluate when due; stop when asked."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax

from dsjax.errors import InputError, InternalError, OutOfDeviceMemory, Preempted
from dsjax.faults import Faults
from dsjax.processes import everywhere
from dsjax.stability.replicas import Replicas, flipped
from dsjax.stability.watch import Astray
from dsjax.train.balance import Balancer
from dsjax.train.diagnosis import Diagnosis
from dsjax.train.memory import compiled_bytes, device_bytes, is_out_of_memory
from dsjax.train.program import Program
from dsjax.train.recheck import recompute_check
from dsjax.train.recorder import Recorder
from dsjax.train.saving import Saving
from dsjax.train.signals import StopRequest
from dsjax.train.state import State
from dsjax.train.votes import STOP

Results = dict[str, dict[str, float]]


@dataclass
class Plan:
    """When the loop does what.

    Attributes:
      steps: the run's last step.
      stop_after: end after this many steps of this call, as a pre-emption would.
      eval_every: every N steps and at the end; 0: never.
      evaluate: evaluates a state, calling before each batch what it is given with what is being done; None where
        there is nothing to evaluate on.
      log_examples: called with the number of each step and its batch (from 0), before it runs.
      on_eval: the user's callback.
      on_program: called with the program that takes over, when a pipeline's stages are balanced anew.
      evaluate_first: the evaluation of the state that the loop starts from is still owed.
      faults: those to be injected.
      check_replicas_every: compare replicas every N steps; 0: never.
      locate_nonfinite: tell where in the model a skipped step went wrong.
      check_recompute_every: compute a gradient twice every N steps; 0: never.
      roll_back: gives the state to go on from when the run has gone astray (`Rollback`).
    """

    steps: int
    stop_after: int | None = None
    eval_every: int = 0
    evaluate: Callable[[State, Callable[[str], None]], Results] | None = None
    log_examples: Callable[[int, int], None] | None = None
    on_eval: Callable[[int, Results], None] | None = None
    trace: Callable[[int], None] = lambda step: None
    on_program: Callable[[Program], None] = lambda program: None
    evaluate_first: bool = False
    faults: Faults = field(default_factory=Faults)
    check_replicas_every: int = 0
    locate_nonfinite: bool = False
    check_recompute_every: int = 0
    roll_back: Callable[[Program, Astray, int, int], State] | None = None


def run_loop(
    program: Program,
    state: State,
    batches: Iterator[Any],
    plan: Plan,
    recorder: Recorder,
    saving: Saving,
    stop: StopRequest,
) -> State:
    """Trains from the state's step to the plan's last one and returns the last state.

    Raises:
      Preempted: stopped by a signal or `stop_after`, after saving.
      InputError: the data ended early.
    """
    start = int(state.step)
    saving.started_at(start)
    offset = int(state.data_step) - start
    last_of_call = plan.steps if plan.stop_after is None else min(plan.steps, start + plan.stop_after)
    alone = jax.process_count() == 1
    evaluated = partial(_evaluate, plan, recorder, saving, stop)
    cut_off = plan.evaluate_first and not evaluated(start, state)
    check_replicas = _replica_check(plan.check_replicas_every, recorder)
    check_recompute = recompute_check(plan.check_recompute_every, recorder, plan.faults)
    balancer = Balancer(program, recorder, plan.on_program, last_of_call)
    diagnosis = Diagnosis(recorder, plan.locate_nonfinite)
    recorder.start_clock()
    step = start
    while step < last_of_call and not cut_off:
        step += 1
        plan.trace(step)
        plan.faults.before_step(step)
        state = _with_faults(plan.faults, step, state)
        recorder.beat(step, "waiting for data")
        waited = time.monotonic()
        batch = _next_batch(batches, step, plan.steps)
        placed = program.place(batch, step)
        if plan.log_examples is not None:
            plan.log_examples(step, step - 1 + offset)
        waited = time.monotonic() - waited
        check_recompute(program, step, state, placed)
        recorder.beat(step, "step")
        asked = (STOP if stop.requested else 0) | saving.votes()
        votes = balancer.votes(program.votes(asked))
        state, metrics = _one_step(program, state, placed, votes, recorder)
        diagnosis.stepped(step, program, state, placed, step - 1 + offset)
        recorder.step_done(step, metrics, waited)
        if step == last_of_call:
            recorder.drain()
        if recorder.astray is not None and plan.roll_back is not None:
            diagnosis.forget()
            del state  # the one that comes takes its room
            state = plan.roll_back(program, recorder.astray, step, offset)
            step, offset = int(state.step), int(state.data_step) - int(state.step)
            continue
        check_replicas(program, step, state)
        if step == plan.steps:
            break
        if recorder.asked & STOP or (alone and stop.requested):
            break
        if plan.eval_every and step % plan.eval_every == 0:
            cut_off = not evaluated(step, state)
        saving.step_done(step, state)
        if step < last_of_call and not cut_off:
            before = program
            program, state = balancer.step_done(step, program, state, placed)
            if program is not before:
                diagnosis.forget()
                saving.laid_out_anew(step, state)
    balancer.close()
    recorder.drain()
    if recorder.astray is not None and plan.roll_back is not None:
        state = plan.roll_back(program, recorder.astray, step, offset)
        step = int(state.step)
    saving.last(step, state)
    if step == plan.steps and not cut_off and plan.eval_every and step > start:
        cut_off = not evaluated(step, state)
    if step < plan.steps or cut_off:
        voted = cut_off or recorder.asked & STOP
        reason = stop.signal or ("another process was asked to stop" if voted else "stop_after")
        recorder.event("preempted", step, reason=reason)
        raise Preempted(
            f"stopped at step {step} of {plan.steps} ({reason}), saved; run the same again to go on"
        )
    return state


def _with_faults(faults: Faults, step: int, state: State) -> State:
    """The state with a bit of its first parameter turned, if that is asked for."""
    device = faults.bit_to_flip(step)
    if device is None:
        return state
    leaves, tree = jax.tree.flatten(state.params)
    return replace(state, params=jax.tree.unflatten(tree, [flipped(leaves[0], device), *leaves[1:]]))


def _replica_check(every: int, recorder: Recorder) -> Callable[[Program, int, State], None]:
    """What looks after every so many steps whether replicas are the same.

    It raises InternalError where they are not.
    """
    if not every:
        return lambda program, step, state: None
    of: Program | None = None  # balancing lays states out anew, in another program
    replicas: Replicas | None = None

    def check(program: Program, step: int, state: State) -> None:
        nonlocal of, replicas
        if step % every:
            return
        if replicas is None or of is not program:
            of, replicas = program, Replicas(program.mesh, program.abstract_state)
        differing = replicas.differing(state)
        recorder.start_clock()
        if not differing:
            return
        devices = sorted({device for odd in differing.values() for device in odd})
        names = list(differing)
        recorder.event("replicas_differ", step, devices=devices, arrays=names)
        raise InternalError(
            f"step {step}: replicas differ, which no program does: device {', '.join(map(str, devices))} holds other "
            f"numbers than its replicas in {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}; take it out, and "
            f"go on from a checkpoint from before step {step - every}"
        )

    return check


def _next_batch(batches: Iterator[Any], step: int, steps: int) -> Any:
    try:
        return next(batches)
    except StopIteration:
        raise InputError(
            f"the data ended before step {step} of {steps}; give a loader that repeats, or fewer steps"
        ) from None


def _one_step(
    program: Program, state: State, batch: Any, votes: jax.Array, recorder: Recorder
) -> tuple[State, dict[str, jax.Array]]:
    first = not program.has_step(batch)
    if first:
        recorder.beat(recorder.step + 1, "compiling")
        with recorder.progress.busy("compiling the step"):
            compiled = program.step(batch)
        recorder.start_clock()
    else:
        compiled = program.step(batch)
    try:
        return compiled(state, batch, votes)
    except Exception as error:
        if isinstance(error, OutOfDeviceMemory) or not is_out_of_memory(error):
            raise
        limit = device_bytes(list(program.mesh.devices.flat)) or 0
        raise program.does_not_fit(batch, compiled_bytes(compiled) or 0, limit) from error


class _CutOff(Exception):
    """An evaluation that a signal ended."""


def _evaluate(
    plan: Plan, recorder: Recorder, saving: Saving, stop: StopRequest, step: int, state: State
) -> bool:
    """Evaluates, if there is anything to evaluate on; False: a signal to any process cut it off, on all of them.

    Such an evaluation is made up for when the run goes on.
    """
    if plan.evaluate is None:
        return True
    recorder.drain()

    def on_batch(what: str) -> None:
        recorder.beat(step, what)
        if not everywhere(not stop.requested):
            raise _CutOff

    recorder.beat(step, "evaluating")
    try:
        with recorder.progress.busy("evaluating"):
            results = plan.evaluate(state, on_batch)
    except _CutOff:
        return False
    recorder.evaluated(step, results)
    saving.evaluated(step, results)
    if plan.on_eval is not None:
        plan.on_eval(step, results)
    recorder.start_clock()
    return True


def evaluate(
    program: Program,
    state: State,
    batches: Any,
    steps: int = -1,
    on_batch: Callable[[str], None] = lambda what: None,
) -> dict[str, float]:
    """Weighted loss over a finite set of batches: sums over all of it, divided once.

    Args:
      batches: an iterable of this process's rows; all of it counts, a last partial batch too.
      steps: at most this many batches; -1: all.
      on_batch: called with what is being done, before each batch.

    Returns:
      loss, tokens (the weight), perplexity, and the loss function's extras.

    Raises:
      InputError: the set has no weight at all.
    """
    totals: dict[str, float] = {}

    def add(sums: Mapping[str, jax.Array]) -> None:
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + float(value)

    # Read one batch late, so that the next one is prepared while the device works.
    before: Mapping[str, jax.Array] = {}
    for batch in itertools.islice(batches, None if steps < 0 else steps):
        placed = program.place_eval(batch)
        on_batch("evaluating" if program.has_evaluation(placed) else "compiling")
        now = program.evaluation(placed)(state.params, state.model_state, placed)
        add(before)
        before = now
    add(before)
    if not totals.get("weight"):
        raise InputError("evaluation: no example of the set has weight; look at its files and masks")
    loss = totals["loss"] / totals["weight"]
    result = {"loss": loss, "tokens": totals["weight"], "perplexity": _exp(loss)}
    for name in totals:
        if name.endswith("/sum"):
            key = name.removesuffix("/sum")
            result[key.removeprefix("extra/")] = totals[name] / max(totals[f"{key}/weight"], 1e-30)
    return result


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


@contextmanager
def closing_iterator(batches: Iterator[Any]) -> Iterator[Iterator[Any]]:
    """Ends the threads behind an iterator that has any, however the loop ends."""
    try:
        yield batches
    finally:
        getattr(batches, "close", lambda: None)()

"""The loop: batch, step, record; save and evaluate when due; stop when asked."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from dsjax.errors import FaultyDevice, InputError, OutOfDeviceMemory, Preempted
from dsjax.faults import Faults
from dsjax.processes import everywhere
from dsjax.stability.replicas import flipped
from dsjax.stability.watch import Astray
from dsjax.train.balance import Balancer
from dsjax.train.checks import recompute_check, replica_check
from dsjax.train.diagnosis import Diagnosis
from dsjax.train.memory import compiled_bytes, device_bytes, is_out_of_memory
from dsjax.train.program import Program
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


class Loop:
    """A run from its state on.

    Attributes:
      step: the last one taken.
      ahead: number of the next step's batch (from 0) less that of steps taken; rollbacks leave batches out.
      last: step at which this call ends at the latest.
      cut_off: a signal ended an evaluation.
    """

    def __init__(
        self,
        program: Program,
        state: State,
        batches: Iterator[Any],
        plan: Plan,
        recorder: Recorder,
        saving: Saving,
        stop: StopRequest,
    ):
        self.program, self.state, self.batches, self.plan = program, state, batches, plan
        self.recorder, self.saving, self.stop = recorder, saving, stop
        self.step = self.start = int(state.step)
        self.ahead = int(state.data_step) - self.start
        self.last = plan.steps if plan.stop_after is None else min(plan.steps, self.start + plan.stop_after)
        self.cut_off = False
        self._check_replicas = replica_check(plan.check_replicas_every, recorder)
        self._check_recompute = recompute_check(plan.check_recompute_every, recorder, plan.faults)
        self._balancer = Balancer(program, recorder, plan.on_program, self.last)
        self._diagnosis = Diagnosis(recorder, plan.locate_nonfinite)

    def run(self) -> State:
        """All steps, then what is owed at the end; returns the last state.

        Raises:
          Preempted: stopped by a signal or `stop_after`, after saving.
          InputError: the data ended early.
        """
        self.saving.started_at(self.start)
        if self.plan.evaluate_first:
            self._evaluate()
        self.recorder.start_clock()
        while self.step < self.last and not self.cut_off:
            placed = self._one_more()
            if self._gone_back():
                continue
            with self._only_trusted():
                self._check_replicas(self.program, self.step, self.state)
            if self.step == self.plan.steps or self._asked_to_stop():
                break
            if self.plan.eval_every and self.step % self.plan.eval_every == 0:
                self._evaluate()
            self.saving.step_done(self.step, self.state)
            if self.step < self.last and not self.cut_off:
                self._balance(placed)
        self._balancer.close()
        self.recorder.drain()
        self._gone_back()
        # By what it finds the best are kept; otherwise what was learned is saved before anything else.
        if self.saving.config.disk.keep_best:
            self._evaluate_at_the_end()
        self.saving.last(self.step, self.state)
        if not self.saving.config.disk.keep_best:
            self._evaluate_at_the_end()
        self._finish()
        return self.state

    def _one_more(self) -> Any:
        """One step, from its batch to its line; returns the batch as it lay on the devices."""
        plan, recorder, program = self.plan, self.recorder, self.program
        self.step += 1
        step, number = self.step, self.step - 1 + self.ahead
        plan.trace(step)
        plan.faults.before_step(step)
        self.state = _with_faults(plan.faults, step, self.state)
        recorder.beat(step, "waiting for data")
        waited = time.monotonic()
        placed = program.place(_next_batch(self.batches, step, plan.steps), step)
        if plan.log_examples is not None:
            plan.log_examples(step, number)
        waited = time.monotonic() - waited
        with self._only_trusted():
            self._check_recompute(program, step, self.state, placed)
        recorder.beat(step, "step")
        asked = (STOP if self.stop.requested else 0) | self.saving.votes()
        votes = self._balancer.votes(program.votes(asked))
        self.state, metrics = _one_step(program, step, self.state, placed, votes, recorder)
        self._diagnosis.stepped(step, program, self.state, placed, number)
        recorder.step_done(step, metrics, waited)
        if step == self.last:
            recorder.drain()
        return placed

    @contextmanager
    def _only_trusted(self) -> Iterator[None]:
        """Puts states aside that a faulty device may have spoilt, so that nothing goes on from them."""
        try:
            yield
        except FaultyDevice as error:
            self.saving.gone_back(error.trusted)
            raise

    def _gone_back(self) -> bool:
        """Goes back to a good state if the run has gone astray; whether it did."""
        if self.recorder.astray is None or self.plan.roll_back is None:
            return False
        self._diagnosis.forget()
        del self.state  # the one that comes takes its room
        self.state = self.plan.roll_back(self.program, self.recorder.astray, self.step, self.ahead)
        self.step = int(self.state.step)
        self.ahead = int(self.state.data_step) - self.step
        return True

    def _asked_to_stop(self) -> bool:
        alone = jax.process_count() == 1
        return bool(self.recorder.asked & STOP) or (alone and self.stop.requested)

    def _balance(self, placed: Any) -> None:
        """Times and moves layers of a pipeline when that is due."""
        before = self.program
        self.program, self.state = self._balancer.step_done(self.step, before, self.state, placed)
        if self.program is not before:
            self._diagnosis.forget()
            self.saving.laid_out_anew(self.step, self.state)

    def _evaluate(self) -> None:
        """Evaluates, if there is anything to evaluate on; a signal to any process cuts it off, on all of them.

        Such an evaluation is made up for when the run goes on.
        """
        plan, recorder, step = self.plan, self.recorder, self.step
        if plan.evaluate is None:
            return
        recorder.drain()

        def on_batch(what: str) -> None:
            recorder.beat(step, what)
            if not everywhere(not self.stop.requested):
                raise _CutOff

        recorder.beat(step, "evaluating")
        try:
            with recorder.progress.busy("evaluating"):
                results = plan.evaluate(self.state, on_batch)
        except _CutOff:
            self.cut_off = True
            return
        recorder.evaluated(step, results)
        self.saving.evaluated(step, results)
        if plan.on_eval is not None:
            plan.on_eval(step, results)
        recorder.start_clock()

    def _evaluate_at_the_end(self) -> None:
        step = self.step
        if step == self.plan.steps and not self.cut_off and self.plan.eval_every and step > self.start:
            self._evaluate()

    def _finish(self) -> None:
        """The reason why the run is not at its end, if it is not.

        Raises:
          Preempted: always then.
        """
        step, steps = self.step, self.plan.steps
        if step == steps and not self.cut_off:
            return
        voted = self.cut_off or self.recorder.asked & STOP
        reason = self.stop.signal or ("another process was asked to stop" if voted else "stop_after")
        self.recorder.event("preempted", step, reason=reason)
        raise Preempted(f"stopped at step {step} of {steps} ({reason}), saved; run the same again to go on")


class _CutOff(Exception):
    """An evaluation that a signal ended."""


def _with_faults(faults: Faults, step: int, state: State) -> State:
    """The state with a bit of its first parameter turned, if that is asked for."""
    device = faults.bit_to_flip(step)
    if device is None:
        return state
    leaves, tree = jax.tree.flatten(state.params)
    return replace(state, params=jax.tree.unflatten(tree, [flipped(leaves[0], device), *leaves[1:]]))


def _next_batch(batches: Iterator[Any], step: int, steps: int) -> Any:
    try:
        return next(batches)
    except StopIteration:
        raise InputError(
            f"the data ended before step {step} of {steps}; give a loader that repeats, or fewer steps"
        ) from None


def _one_step(
    program: Program, step: int, state: State, batch: Any, votes: jax.Array, recorder: Recorder
) -> tuple[State, dict[str, jax.Array]]:
    first = not program.has_step(batch, step)
    if first:
        recorder.beat(step, "compiling")
        with recorder.progress.busy("compiling the step"):
            compiled = program.step(batch, step)
        recorder.start_clock()
    else:
        compiled = program.step(batch, step)
    try:
        return compiled(state, batch, votes)
    except Exception as error:
        if isinstance(error, OutOfDeviceMemory) or not is_out_of_memory(error):
            raise
        limit = device_bytes(list(program.mesh.devices.flat)) or 0
        raise program.does_not_fit(batch, compiled_bytes(compiled) or 0, limit) from error


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

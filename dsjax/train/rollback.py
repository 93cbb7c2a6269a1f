"""Going back: to the newest good state from before a run went astray, and on past the batches that led there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dsjax.config.precision import StabilityConfig
from dsjax.errors import Damaged, Diverged
from dsjax.processes import gather, together
from dsjax.stability.watch import Astray
from dsjax.train.program import Program
from dsjax.train.recorder import Recorder
from dsjax.train.resume import candidates, restored
from dsjax.train.saving import Saving, last_good
from dsjax.train.state import Cooling, State

_MOST_IDS = 200  # of examples that an event names


@dataclass
class Rollback:
    """What takes a run back.

    Attributes:
      fresh: makes the first state, where nothing better is left; None: it was given and is gone.
      ids: the number of a batch -> ids of this process's examples in it.
    """

    config: StabilityConfig
    saving: Saving
    recorder: Recorder
    fresh: Callable[[], State] | None
    ids: Callable[[int], Sequence[str]]
    _reached: int = -1
    _fruitless: int = 0

    def __call__(self, program: Program, astray: Astray, step: int, offset: int) -> State:
        """The state to go on from.

        Args:
          step: the last step that was begun; its batch and those before it are left out.
          offset: number of a step's batch minus that of the step before it, from 0.

        Raises:
          Diverged: the run went back too often without getting further, or there is nothing to go back to.
        """
        self.recorder.beat(step, "restoring")
        self._fruitless = 1 if astray.first > self._reached else self._fruitless + 1
        self._reached = max(self._reached, astray.last)
        batches = range(astray.first - 1 + offset, astray.last + offset)
        named = gather(together(lambda: [list(map(str, self.ids(batch))) for batch in batches]))
        examples = [one for of_process in named for batch in of_process for one in batch]
        if self._fruitless > self.config.max_rollbacks:
            raise Diverged(self._gave_up(astray, examples))
        state, tier = self._good(program, astray)
        went_back = int(state.step)
        self._leave(went_back)
        left_out = int(state.data_step), step + offset - 1
        state = self._past(program, state, step + offset)
        self.saving.keep_anew(went_back, state)
        # Told when a start, too, would find it so.
        self.recorder.event(
            "rolled_back",
            went_back,
            reason=astray.reason,
            tier=tier,
            bad_steps=[astray.first, astray.last],
            skipped_batches=left_out,
            examples=examples[:_MOST_IDS],
            more_examples=max(0, len(examples) - _MOST_IDS),
        )
        self.recorder.progress.message(
            f"step {astray.last}: {astray.reason}; back to step {went_back} ({tier}); batches {left_out[0]} to "
            f"{left_out[1]} are left out"
        )
        self.recorder.start_clock()
        return state

    def _good(self, program: Program, astray: Astray) -> tuple[State, str]:
        """The newest state from before the first bad step, and the tier that holds it."""
        tiers = self.saving.tiers
        self.saving.settle_before_going_back(astray.last)
        for one in candidates(tiers):
            if one.step >= astray.first:
                continue
            try:
                store = one.open()
                facts = together(partial(store.facts, one.step))
                return restored(program, store, one.step, facts)[0], one.tier
            except Damaged as error:
                self.recorder.event("checkpoint_skipped", one.step, tier=one.tier, reason=error.faults[0])
        if self.fresh is None:
            raise Diverged(
                f"training went astray at step {astray.first} ({astray.reason}) and there is no state to go back "
                "to; set checkpoint.memory.every or checkpoint.disk.every"
            )
        return self.fresh(), "the start"

    def _leave(self, step: int) -> None:
        """What came after a step is no longer the run's."""
        self.saving.gone_back(step)
        self.recorder.gone_back(step)

    def _past(self, program: Program, state: State, batch: int) -> State:
        """The state, with the next batch to be read, and the learning rate lowered for a while."""
        place = partial(jax.device_put, device=program.replicated)
        state = replace(state, data_step=place(jnp.int32(batch)), skipped=place(jnp.int32(0)))
        if "cooling" in state.guards:
            until = int(state.updates) + self.config.rollback_steps
            state = replace(state, guards={**state.guards, "cooling": Cooling(place(jnp.int32(until)))})
        return state

    def _gave_up(self, astray: Astray, examples: list[str]) -> list[str]:
        disk: Any = self.saving.tiers.disk
        shown = ", ".join(examples[:20]) + (", ..." if len(examples) > 20 else "")
        return [
            f"training gave up at step {astray.last}: it went astray there {self._fruitless} times ({astray.reason}); "
            f"{last_good(disk)}. Lower optimizer.learning_rate, look at the data, or raise stability.max_rollbacks",
            *([f"examples of the last bad steps: {shown}"] if shown else []),
        ]

"""Decides for a job: when its workers start, when they are ended, and with which code it ends.

The supervisor of node 0 leads.  From one start of all workers to the next is a generation: nodes gather,
their workers run, and are ended together, for all of them wait for each other in collectives.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Sequence

from dsjax.errors import EXIT_DONE, EXIT_INTERNAL, EXIT_PREEMPTED
from dsjax.launch.budget import Budget, cause, how, is_final
from dsjax.launch.hangs import stuck
from dsjax.launch.member import Member
from dsjax.launch.nodes import Hub
from dsjax.launch.options import Options
from dsjax.launch.output import Output
from dsjax.launch.signals import Signals
from dsjax.launch.workers import Look

_TURN_SECONDS = 0.05
# A worker that waits in a collective for one that is gone cannot end by itself.
_RESTART_GRACE_SECONDS = 1.0
# Workers save together: when one has stopped after saving, the others are about to.
_SAVED_GRACE_SECONDS = 60.0
_STACKS_SECONDS = 1.0


class Supervisor:
    """The leader.

    Args:
      options: how the job is supervised.
      hub: this node and the others.
      output: for its words.
    """

    def __init__(self, options: Options, hub: Hub, output: Output):
        self._options, self._hub, self._output = options, hub, output
        self._budget = Budget(options.max_restarts, options.give_up_after)
        self._attempt, self._reached = -1, -1
        self._code: int | None = None
        self._phase = self._gather
        self._parts: list[Member] = []  # who takes part in the generation, by rank
        self._ends: dict[int, tuple[float, int]] = {}  # rank -> when it ended, code
        self._signals: Counter[int] = Counter()  # node -> signals that came to its supervisor
        self._stopped = 0  # how often the job was asked to stop
        self._regrouping = ""  # why the workers were told to save and stop
        self._failed_at: float | None = None
        self._kill_at: float | None = None
        self._then: int | None = None  # the code to end with once all have ended; None: start again
        self._expected = set(range(options.max_nodes))
        now = time.monotonic()
        most_wanted = options.min_nodes == options.max_nodes
        self._fewest_until = now + options.gather_seconds
        self._most_until = now + (options.gather_seconds if most_wanted else options.rejoin_seconds)
        self._saved = False  # whether the last generation stopped after saving
        self._told = False  # whether the workers were told that one of them has stopped

    def run(self, signals: Signals) -> int:
        """Leads the job to its end; returns its exit code."""
        while self._code is None:
            self._hub.turn(_TURN_SECONDS)
            own = [(self._options.node_rank, number) for number in signals.take()]
            for rank, number in [*own, *self._hub.take_stops()]:
                self._stop(rank, number)
            self._phase()
        return self._code

    # ---- nodes gather --------------------------------------------------------------------------

    def _gather(self) -> None:
        now = time.monotonic()
        if self._stopped:
            self._finish(EXIT_PREEMPTED)
            return
        self._hub.dismiss_drained()
        here = [m for m in self._hub.members() if not m.drained and not m.silent]
        here = here[: self._options.max_nodes]
        self._expected -= self._hub.dismissed
        complete = self._expected <= {m.rank for m in here} or now >= self._most_until
        if complete and len(here) >= self._options.min_nodes:
            self._start(here)
        elif now >= self._fewest_until or self._options.max_nodes == 1:
            self._too_few(here)

    def _too_few(self, here: list[Member]) -> None:
        missing = sorted(set(range(self._options.max_nodes)) - {m.rank for m in here})
        self._output.say(
            f"{len(here)} of at least {self._options.min_nodes} nodes are here (not: "
            f"{', '.join(map(str, missing))}); ending"
        )
        self._finish(EXIT_PREEMPTED if self._saved or self._hub.dismissed else EXIT_INTERNAL)

    def _start(self, parts: list[Member]) -> None:
        self._attempt += 1
        self._parts, self._expected = parts, {m.rank for m in parts}
        self._ends.clear()
        self._regrouping, self._kill_at, self._saved, self._told = "", None, False, False
        processes = sum(m.workers for m in parts)
        first = 0
        nodes = f"{len(parts)} nodes, " if self._options.max_nodes > 1 else ""
        attempt = f"attempt {self._attempt}: " if self._attempt else ""
        self._output.say(f"{attempt}{nodes}{processes} processes; their logs are in {self._output.logs}/")
        for member in parts:
            member.start(
                self._attempt,
                first,
                coordinator=parts[0].coordinator,
                processes=processes,
                nodes=len(parts),
                wanted=self._options.max_nodes,
            )
            first += member.workers
        self._phase = self._watch

    # ---- workers run ---------------------------------------------------------------------------

    def _watch(self) -> None:
        now = time.monotonic()
        looks = self._looks()
        self._note_progress(looks, now)
        lost = [m for m in self._parts if m.lost]
        failure = cause(self._ends, len(looks), now)
        if lost:
            self._lose(lost)
        elif failure is not None:
            self._fail(*failure)
        elif all(look.code is not None for look in looks):
            self._ended_well()
        elif not self._told and any(code == EXIT_PREEMPTED for _, code in self._ends.values()):
            # One that was stopped before its first step had nobody to tell but us.
            self._told = True
            self._order("signal", number=signal.SIGTERM)
        elif (hung := stuck(looks, self._options.hang_seconds)) is not None:
            self._hang(hung)
        elif self._is_due(now):
            self._order("kill")
        else:
            self._regroup_if_asked()

    def _looks(self) -> list[Look]:
        """All workers, by rank; those whose start was not confirmed yet run."""
        looks = [look for member in self._parts for look in member.looks]
        for look in looks:
            if look.code is not None and look.rank not in self._ends:
                obeyed = self._told and look.code == 128 + signal.SIGTERM
                self._ends[look.rank] = time.monotonic(), EXIT_PREEMPTED if obeyed else look.code
        return looks

    def _note_progress(self, looks: list[Look], now: float) -> None:
        # The slowest counts: what the others did while one of them fails each time is no progress.
        self._reached = max(self._reached, min((look.step for look in looks if look.what), default=-1))
        if self._failed_at is not None and any(look.typical is not None for look in looks):
            self._output.say(f"training again, {now - self._failed_at:.1f} s after the fault")
            self._failed_at = None

    def _fail(self, rank: int, code: int) -> None:
        self._fault(f"rank {rank} {how(code)} ({self._log(rank)})", code)

    def _log(self, rank: int) -> str:
        member = next(m for m in self._parts if any(look.rank == rank for look in m.looks))
        return f"see {self._output.log(rank)}" if member.is_own else f"see its log on node {member.name}"

    def _fault(self, what: str, code: int, *, answers: bool = True) -> None:
        """Ends the generation for a fault, and starts another one unless that is of no use."""
        final = self._stopped or is_final(code)
        if self._regrouping and not final:
            self._output.say(what)
            self._end(None, _RESTART_GRACE_SECONDS, answers)
            return
        refused = "" if final else self._budget.refuses(self._reached)
        if final or refused:
            others = "; ending the others" if len(self._ends) < sum(m.workers for m in self._parts) else ""
            self._output.say(what + others + (f"; not starting again: {refused}" if refused else ""))
            self._end(code, self._options.grace_seconds, answers)
            return
        self._output.say(f"{what}; starting all again ({self._budget})")
        self._failed_at = time.monotonic()
        self._end(None, _RESTART_GRACE_SECONDS, answers)

    def _hang(self, look: Look) -> None:
        state = f" ({look.state})" if look.state else ""
        self._order("stacks")
        self._fault(
            f"rank {look.rank} hangs: at step {max(look.step, 0)}, {look.what}, for {look.idle:.0f} s{state}",
            EXIT_INTERNAL,
            answers=False,
        )

    def _lose(self, lost: list[Member]) -> None:
        self._output.say(f"lost node {_names(lost)}; ending all workers")
        self._failed_at = time.monotonic()
        self._end(EXIT_INTERNAL if self._stopped else None, _RESTART_GRACE_SECONDS)

    def _ended_well(self) -> None:
        self._saved = any(code == EXIT_PREEMPTED for _, code in self._ends.values())
        if not self._saved or not self._regrouping or self._stopped:
            self._finish(EXIT_PREEMPTED if self._saved else EXIT_DONE)
        else:
            self._wait_for_nodes()

    def _is_due(self, now: float) -> bool:
        """Whether those that are still there have had the time that they were given."""
        saved = [when for when, code in self._ends.values() if code == EXIT_PREEMPTED]
        limits = [when + _SAVED_GRACE_SECONDS for when in saved[:1]]
        if self._kill_at is not None:
            limits.append(self._kill_at)
        return any(now >= limit for limit in limits)

    def _regroup_if_asked(self) -> None:
        """Has the workers save and stop when a node is to leave, or one has come."""
        if self._regrouping or self._stopped:
            return
        leaving = [m for m in self._parts if m.drained]
        coming = [m for m in self._hub.members() if m not in self._parts and not m.drained and not m.silent]
        if leaving:
            self._regrouping = "; ".join(f"draining node {m.rank} ({m.name}): {m.drained}" for m in leaving)
        elif coming and len(self._parts) < self._options.max_nodes:
            self._regrouping = f"node {_names(coming)} has come"
            self._expected |= {m.rank for m in coming}
        if self._regrouping:
            self._output.say(f"{self._regrouping}; all workers save and stop")
            self._order("signal", number=signal.SIGTERM)

    # ---- workers end ---------------------------------------------------------------------------

    def _stop(self, rank: int, number: int) -> None:
        """SIGTERM or Ctrl-C is for the workers; the second one gives them little time.

        A scheduler signals all supervisors: one from each is one.
        """
        self._signals[rank] += 1
        if self._signals[rank] <= self._stopped:
            return
        self._stopped += 1
        if self._phase == self._watch:
            if not self._regrouping:  # else they were told
                self._order("signal", number=number)
            if self._stopped == 2:
                self._kill_at = time.monotonic() + self._options.grace_seconds
        elif self._phase == self._wait and self._then is None:
            self._then = EXIT_PREEMPTED

    def _end(self, then: int | None, grace: float, answers: bool = True) -> None:
        """Ends all workers: told first, killed after the grace time.

        Args:
          then: the code to end with; None: start again.
          answers: False: they hang and write their stacks, which are waited for instead.
        """
        self._then = then
        if answers:
            self._order("signal", number=signal.SIGTERM, groups=True)
        self._kill_at = time.monotonic() + (
            min(grace, self._options.grace_seconds) if answers else _STACKS_SECONDS
        )
        self._phase = self._wait

    def _wait(self) -> None:
        now = time.monotonic()
        # The workers of a supervisor that was killed have died with it.
        if any(m.running and not (m.lost or m.hung_up) for m in self._parts):
            if self._kill_at is not None and now >= self._kill_at:
                self._kill_at = None
                self._order("kill")
            return
        if self._then is None:
            self._wait_for_nodes()
        else:
            self._finish(self._then)

    def _wait_for_nodes(self) -> None:
        self._fewest_until = self._most_until = time.monotonic() + self._options.rejoin_seconds
        self._phase = self._gather
        gone = [m for m in self._parts if m.lost or m.hung_up]
        if gone:
            self._output.say(
                f"node {_names(gone)} is gone; waiting {self._options.rejoin_seconds:g} s for it"
            )

    def _order(self, what: str, **more: object) -> None:
        for member in self._parts:
            member.order(what, **more)

    def _finish(self, code: int) -> None:
        self._code = code


def _names(members: Sequence[Member]) -> str:
    return ", ".join(f"{m.rank} ({m.name})" for m in members)

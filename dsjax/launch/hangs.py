"""Which rank stands still, by the heartbeats of all.

Ranks wait for each other in collectives: when one hangs all stand still, a step or two later.  The one
that is behind is the cause.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsjax.launch.workers import Look
from dsjax.observe.heartbeat import PHASES, SLOW_PHASES

# How much longer than a typical step one may take, and how much longer what has no typical time.
_TIMES = 10


def limit(look: Look, hang_seconds: float) -> float:
    """Seconds without a heartbeat after which a worker hangs.

    ``max(hang_seconds, 10 x median step)``; ten times `hang_seconds` where there is no telling: while it
    starts, restores, compiles, saves, or has not done two steps yet. One that the system has stopped does
    none of these.
    """
    if look.state.startswith("stopped"):
        return hang_seconds
    if look.what in SLOW_PHASES or look.typical is None:
        return _TIMES * hang_seconds
    return max(hang_seconds, _TIMES * look.typical)


def _place(look: Look) -> tuple[int, int]:
    """How far a worker has come, to the phase within a step."""
    return look.step, PHASES.index(look.what)


def stuck(looks: Sequence[Look], hang_seconds: float) -> Look | None:
    """The rank that all wait for, if the job hangs.

    Of the ranks that are furthest behind every one has to stand still: one that moves, or takes its
    time in a phase that may, explains why the others wait.
    """
    watched = [look for look in looks if look.code is None and look.what not in ("", "finished")]
    if not watched:
        return None
    least = min(_place(look) for look in watched)
    behind = [look for look in watched if _place(look) == least]
    if any(look.idle <= limit(look, hang_seconds) for look in behind):
        return None
    return max(behind, key=lambda look: (bool(look.state), look.idle))

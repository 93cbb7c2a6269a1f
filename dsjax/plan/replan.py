"""A new layout for a run that is under way, by what was measured."""

from __future__ import annotations

from pathlib import Path

from dsjax.aot import Target
from dsjax.config import Config
from dsjax.plan import measured
from dsjax.plan.planner import target_of
from dsjax.plan.search import Found, search


def replan(
    config: Config,
    on: str | Target,
    known: measured.Measured,
    *,
    tokens: float | None = None,
    chips: str | Path | None = None,
) -> Found:
    """The search, ranked by measured shares; nothing on disk is read or written.

    To be called at a step boundary, after a checkpoint: what the search changes (mesh, microbatches,
    recomputation) is free to change on resume, so `Found.config` goes on from the state that was saved.  The
    ratio of whole steps scales all layouts alike; only shares change their order.

    Raises:
      ConfigError: no layout divides, or a model without formulas.
      OutOfDeviceMemory: no layout fits.
    """
    with measured.using(known):
        return search(config, target_of(on, chips), tokens=tokens)

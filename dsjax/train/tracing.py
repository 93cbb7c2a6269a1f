"""A profiler trace of a window of steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

from dsjax.config.schema import ProfileConfig


def trace_window(profile: ProfileConfig, run_dir: Path) -> Callable[[int], None]:
    """A function to be called before each step, which starts and ends the trace that `profile` asks for.

    The trace lies in ``run_dir/profile``, for TensorBoard's profile plugin or Perfetto.
    """
    first = profile.start
    if first is None:
        return lambda step: None
    end = first + profile.steps

    def before_step(step: int) -> None:
        if step == first:
            jax.profiler.start_trace(str(run_dir / "profile"), create_perfetto_trace=True)
        elif step == end:
            jax.profiler.stop_trace()

    return before_step

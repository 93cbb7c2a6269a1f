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
    # A run that goes back over the window is traced once, from the first time until it is behind it.
    left, tracing = profile.steps, False

    def before_step(step: int) -> None:
        nonlocal left, tracing
        if step == first and not tracing and left:
            jax.profiler.start_trace(str(run_dir / "profile"), create_perfetto_trace=True)
            tracing = True
        elif tracing and not left:
            jax.profiler.stop_trace()
            tracing = False
        left -= tracing

    return before_step

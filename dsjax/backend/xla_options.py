"""XLA options that were measured to be good, by platform, checked before they are used.

They are given to each compile (`compiler_options`), never written into the environment.  A name that
this jaxlib does not know is left out and said so; what the user set in XLA_FLAGS wins.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

# Bytes of collectives that are merged into one.
_COMBINE = 128 << 20

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {
        # Matrix products through the faster library, alone (its other fusions gain nothing here).
        "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT",
    },
    "gpu": {
        # Run collectives beside the computation that does not need them.
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_pipelined_all_gather": True,
        "xla_gpu_enable_pipelined_reduce_scatter": True,
        "xla_gpu_enable_pipelined_all_reduce": True,
        "xla_gpu_enable_while_loop_double_buffering": True,
        "xla_gpu_all_gather_combine_threshold_bytes": _COMBINE,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": _COMBINE,
        "xla_gpu_all_reduce_combine_threshold_bytes": _COMBINE,
    },
    "tpu": {},
}


@dataclass(frozen=True)
class Chosen:
    """Options for `compiler_options`, and notes for the user on what was left out and why."""

    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def choose(platform: str, environ: Mapping[str, str] | None = None) -> Chosen:
    """The preset of a platform, less what this jaxlib does not know and what the user set.

    Args:
      platform: cpu, gpu (also cuda) or tpu.
      environ: where XLA_FLAGS stands; the process's environment by default.
    """
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    users = _users_flags((os.environ if environ is None else environ).get("XLA_FLAGS", ""))
    preset = PRESETS.get(platform, {})
    options = {name: value for name, value in preset.items() if name not in users}
    notes = [
        f"XLA: {name}={users[name]} from XLA_FLAGS, not the preset's {_text(value)}"
        for name, value in preset.items()
        if name in users
    ]
    if options and refused(tuple(options.items())):
        unknown = [name for name, value in options.items() if refused(((name, value),))]
        options = {name: value for name, value in options.items() if name not in unknown}
        notes.append(f"XLA: left out, as this jaxlib does not take it: {', '.join(unknown)}")
    return Chosen(options, notes)


def _users_flags(text: str) -> dict[str, str]:
    flags = {}
    for word in shlex.split(text):
        name, _, value = word.lstrip("-").partition("=")
        flags[name] = value or "true"
    return flags


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@cache
def refused(options: tuple[tuple[str, Any], ...]) -> bool:
    """Whether this jaxlib does not take these options: a nothing is compiled with them.

    An unknown name in XLA_FLAGS ends the process; one in `compiler_options` only raises.
    """
    import jax

    nothing = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), "float32"))
    try:
        nothing.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError:
        return True
    return False

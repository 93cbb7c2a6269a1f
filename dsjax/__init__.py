"""dsjax: train any Flax model, sharded over a mesh of named axes.

The names below are the public API; each is imported when it is first used, so that importing
`dsjax` (and `dsjax --help`) stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsjax.config import load as load_config
    from dsjax.errors import (
        ConfigError,
        Diverged,
        DsjaxError,
        InputError,
        InternalError,
        OutOfDeviceMemory,
        Preempted,
    )
    from dsjax.mesh import constrain
    from dsjax.models.spec import Stages
    from dsjax.models.stack import stacked
    from dsjax.precision.rounding import apply_updates_stochastic_rounding, in_float32
    from dsjax.precision.small_state import small_state
    from dsjax.train.trainer import Trainer

_HOMES = {
    "Trainer": ("dsjax.train.trainer", "Trainer"),
    "Stages": ("dsjax.models.spec", "Stages"),
    "constrain": ("dsjax.mesh", "constrain"),
    "stacked": ("dsjax.models.stack", "stacked"),
    "apply_updates_stochastic_rounding": (
        "dsjax.precision.rounding",
        "apply_updates_stochastic_rounding",
    ),
    "in_float32": ("dsjax.precision.rounding", "in_float32"),
    "small_state": ("dsjax.precision.small_state", "small_state"),
    "load_config": ("dsjax.config", "load"),
    "DsjaxError": ("dsjax.errors", "DsjaxError"),
    "ConfigError": ("dsjax.errors", "ConfigError"),
    "InputError": ("dsjax.errors", "InputError"),
    "Diverged": ("dsjax.errors", "Diverged"),
    "InternalError": ("dsjax.errors", "InternalError"),
    "OutOfDeviceMemory": ("dsjax.errors", "OutOfDeviceMemory"),
    "Preempted": ("dsjax.errors", "Preempted"),
}
# Used by their own names: dsjax.plan.report(...), dsjax.aot.inspect(...).
_PACKAGES = ("aot", "plan")

__all__ = [
    "ConfigError",
    "Diverged",
    "DsjaxError",
    "InputError",
    "InternalError",
    "OutOfDeviceMemory",
    "Preempted",
    "Stages",
    "Trainer",
    "apply_updates_stochastic_rounding",
    "constrain",
    "in_float32",
    "load_config",
    "small_state",
    "stacked",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"dsjax.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'dsjax' has no attribute {name!r}; it has {', '.join(__all__)}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

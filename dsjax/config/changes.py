"""What may differ between a run's own config and the one it is resumed with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsjax.config.schema import Config
from dsjax.config.yaml_core import show

# A key stands for all that it holds. `*` is any item of a list.
FREE_ON_RESUME = (
    "run.name",
    "run.dir",
    "run.resume",
    "runtime",
    "mesh",
    "pipeline",
    "grad_sync.route",
    "grad_sync.topology",
    "grad_sync.overlap",
    "grad_sync.bucket_bytes",
    "train.steps",
    "train.stop_after",
    "train.gradient_accumulation_steps",
    "train.remat",
    "train.fsdp_gather",
    "data.paths",
    "data.mixture.*.paths",
    "data.workers",
    "data.cache_dir",
    "data.log_examples",
    "eval",
    "checkpoint",
    "observe",
    "stability.give_up_after",
    "stability.max_rollbacks",
    "stability.locate_nonfinite",
    "stability.check_replicas_every",
    "stability.check_recompute_every",
)
_NOTHING = object()


def changed(old: Config, new: Config) -> list[str]:
    """One line for each setting of `new` that a run started with `old` may not be resumed with."""
    return [
        f"{key}: the run was started with {_said(before)}, now it is {_said(after)}; put it back, start "
        "another run (run.name), or accept it with --allow-config-change"
        for key, before, after in _differences(old.model_dump(), new.model_dump(), "")
    ]


def differences(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """(key, value in `old`, value in `new`) of every setting that differs, free on resume or not."""
    return _differences(old.model_dump(), new.model_dump(), "", free=lambda key: False)


def _differences(
    old: Any, new: Any, key: str, free: Callable[[str], bool] | None = None
) -> list[tuple[str, Any, Any]]:
    free = free or _is_free
    if free(key):
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        names = [*old, *(name for name in new if name not in old)]
        pairs = [
            (f"{key}.{name}" if key else name, old.get(name, _NOTHING), new.get(name, _NOTHING))
            for name in names
        ]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = [(f"{key}.{i}", *pair) for i, pair in enumerate(zip(old, new, strict=True))]
    else:
        same = old == new and isinstance(old, bool) == isinstance(new, bool)
        return [] if same else [(key, old, new)]
    return [found for pair in pairs for found in _differences(pair[1], pair[2], pair[0], free)]


def _is_free(key: str) -> bool:
    parts = ["*" if part.isdigit() else part for part in key.split(".")]
    return ".".join(parts) in FREE_ON_RESUME


def _said(value: Any) -> str:
    return "not set" if value is _NOTHING else show(value)

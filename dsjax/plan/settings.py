"""What a plan takes from a config, and what follows from a step's seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dsjax.aot import Target
from dsjax.config import Config
from dsjax.plan.result import Forecast

SECONDS_A_DAY = 86400


def settings_of(config: Config) -> dict[str, Any]:
    """What of a config's section train shapes the step."""
    keys = ("global_batch_size", "sequence_length", "gradient_accumulation_steps", "remat", "fsdp_gather")
    return {key: getattr(config.train, key) for key in keys}


def run_tokens(config: Config) -> float:
    """Tokens of a whole run."""
    return float(config.train.steps) * config.train.global_batch_size * config.train.sequence_length


def with_money(
    forecast: Forecast,
    target: Target,
    dtype: str,
    model_flops: float | None,
    tokens_per_step: float | None,
    tokens: float | None,
) -> Forecast:
    """A forecast with what follows from its seconds; `dtype` is that of most products."""
    seconds, chip = forecast.step_seconds, target.chip
    mfu = model_flops / (seconds * target.size * chip.flops(dtype)) if model_flops and seconds else None
    if not tokens_per_step or not seconds:
        return replace(forecast, mfu=mfu)
    rate = tokens_per_step / seconds
    days = tokens / rate / SECONDS_A_DAY if tokens else None
    hours = None if days is None else days * 24 * target.size
    return replace(
        forecast,
        mfu=mfu,
        tokens_per_second=rate,
        tokens=tokens,
        days=days,
        dollars=None if hours is None else hours * chip.price,
        kwh=None if hours is None else hours * chip.watts / 1000,
    )


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """A config with other values of `section.key`.

    Raises:
      ConfigError: what the section does not take.
    """
    changed: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, key = name.split(".")
        changed.setdefault(section, {})[key] = value
    return config.model_copy(
        update={
            section: getattr(config, section).model_copy(update=values) for section, values in changed.items()
        }
    )


def as_typed(settings: Mapping[str, Any]) -> str:
    """Settings as they stand on a command line."""
    return " ".join(f"{name}={value}".replace(", ", ",") for name, value in settings.items())

"""What the verbs `plan` and `init` do."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from dsjax.aot import Target
from dsjax.backend.platform import setup
from dsjax.config import Config
from dsjax.errors import EXIT_DONE, EXIT_OUT_OF_MEMORY, InputError
from dsjax.plan.planner import plan, target_of
from dsjax.plan.show import page, show


def plan_command(
    config: Config,
    on: str,
    *,
    tokens: float | None = None,
    chips: str | None = None,
    json_file: Path | None = None,
    html_file: Path | None = None,
) -> int:
    """Plans a run, prints it and writes what is asked for; the exit code says whether it fits.

    Raises:
      ConfigError: what cannot be planned, a line a fault.
      InputError: a file that cannot be written.
    """
    target = ready(config, on, chips)
    found = plan(config, target, tokens=tokens)
    show(found, Console(soft_wrap=True))
    if json_file is not None:
        write(json_file, json.dumps(found.as_dict(), indent=1) + "\n")
    if html_file is not None:
        write(html_file, page(found))
    return EXIT_DONE if found.fits else EXIT_OUT_OF_MEMORY


def ready(config: Config, on: str, chips: str | None = None) -> Target:
    """The cluster of a name, with jax started on the CPU: a plan touches no device.

    Raises:
      ConfigError: there is no such cluster or chip.
    """
    target = target_of(on, chips)
    simulated = target.size if target.chip.kind == "cpu" else None
    here = {"platform": "cpu", "distributed": "none", "cpu_devices": simulated}
    setup(config.runtime.model_copy(update=here))
    return target


def write(path: Path, text: str) -> None:
    """Writes a file of text."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None

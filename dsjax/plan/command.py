"""What the verbs `plan` and `init` do."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from dsjax.aot import Target
from dsjax.config import Config, dump
from dsjax.errors import EXIT_DONE, EXIT_OUT_OF_MEMORY, ConfigError, InputError
from dsjax.plan.compiled import check_mesh
from dsjax.plan.explanation import Explanation, explain_run
from dsjax.plan.explanation.show import explain_notes, explain_sheets, show_explanation
from dsjax.plan.planner import plan
from dsjax.plan.result import Pipelined, Plan
from dsjax.plan.search import search
from dsjax.plan.show import Sheet, gib, page, schedule_picture, show
from dsjax.plan.template import as_yaml, fits, starting_config
from dsjax.plan.timetable import letters

# Columns of a table where the output is no terminal.
_WIDTH = 110


def plan_command(
    config: Config,
    target: Target,
    *,
    tokens: float | None = None,
    json_file: Path | None = None,
    html_file: Path | None = None,
    explain: bool = False,
    schedule: bool = False,
    svg_file: Path | None = None,
) -> int:
    """Plans a run, prints it and writes what is asked for; the exit code says whether it fits.

    Args:
      explain: print and write as well what the step is made of.
      schedule: draw the schedule of the pipeline, as text and into `svg_file`, by default beside `html_file`.

    Raises:
      ConfigError: what cannot be planned, a line a fault.
      InputError: a file that cannot be written.
    """
    if schedule and check_mesh(config, target)["pipeline"] == 1:
        raise ConfigError(
            "--schedule: draws the schedule of a pipeline and the run has none; set mesh.pipeline"
        )
    found = (
        explain_run(config, target, tokens=tokens) if explain else (plan(config, target, tokens=tokens), None)
    )
    code = _told(*found, json_file=json_file, html_file=html_file)
    if schedule and found[0].pipeline:
        _drawn(found[0].pipeline, svg_file or (html_file and html_file.with_suffix(".svg")))
    return code


def _drawn(told: Pipelined, svg_file: Path | None) -> None:
    """Prints the schedule, and writes its picture."""
    console = _console()
    console.print(f"\n{letters(told, console.width)}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"with the times above: {told.bubble:.1%} of all stages' time idle or waiting; stash "
        f"{gib(told.stash_bytes)} a device",
        highlight=False,
    )
    if svg_file is not None:
        write(svg_file, schedule_picture(told))
        console.print(f"written: {svg_file}", highlight=False)


def search_command(
    config: Config,
    target: Target,
    *,
    tokens: float | None = None,
    json_file: Path | None = None,
    html_file: Path | None = None,
    config_file: Path | None = None,
) -> int:
    """Searches the best layout of a run, prints why and its plan, and writes what is asked for.

    Raises:
      ConfigError: no layout divides, or a model without formulas.
      OutOfDeviceMemory: no layout fits.
      InputError: a file that cannot be written.
    """
    found = search(
        config, target, tokens=tokens, progress=lambda line: print(line, file=sys.stderr, flush=True)
    )
    console = _console()
    console.print(f"{found.counted} layouts, {found.fitting} of them fit by formulas; the best:")
    for line in found.why:
        console.print(f"- {line}", markup=False, highlight=False)
    console.print()
    code = _told(found.best, json_file=json_file, html_file=html_file)
    if config_file is not None:
        write(config_file, f"# The fastest layout found for {target.name}.\n{dump(found.config)}")
        console.print(f"\nwritten: dsjax train {config_file}", highlight=False)
    return code


def init_command(model: str, target: Target, path: Path | None) -> int:
    """Writes a starting config; a file that is there already is left alone.

    Raises:
      ConfigError: an unknown model, or one that divides over no mesh of the target.
      InputError: the file is there already or cannot be written.
    """
    config = starting_config(model, target)
    path = Path(f"{config.run.name}.yaml") if path is None else path
    if path.exists():
        raise InputError(f"{path}: is there already; remove it or name another with --write")
    write(path, as_yaml(config, target, str(path)))
    if not fits(config, target):
        print(
            f"dsjax: no layout was found with which it fits on {target.name}; this one takes the least",
            file=sys.stderr,
        )
    print(f"written: {path}; next: dsjax plan {path} --on {target.name}")
    return EXIT_DONE


def _told(
    found: Plan, explanation: Explanation | None = None, *, json_file: Path | None, html_file: Path | None
) -> int:
    show(found, _console())
    values, further, notes = found.as_dict(), list[Sheet](), list[str]()
    if explanation is not None:
        show_explanation(explanation, _console())
        values |= {"explain": explanation.as_dict()}
        further, notes = explain_sheets(explanation), explain_notes(explanation)
    if json_file is not None:
        write(json_file, json.dumps(values, indent=1) + "\n")
    if html_file is not None:
        write(html_file, page(found, further, notes))
    return EXIT_DONE if found.fits else EXIT_OUT_OF_MEMORY


def _console() -> Console:
    return Console(soft_wrap=True, width=None if sys.stdout.isatty() else _WIDTH)


def require_writable(paths: Iterable[Path | None]) -> None:
    """Refuses files that could not be written, before the work whose result they are for.

    Raises:
      InputError: a line a file.
    """
    faults = []
    for path in paths:
        if path is not None and not path.parent.is_dir():
            faults.append(f"{path}: cannot be written (there is no directory {path.parent})")
        elif path is not None and (
            path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)
        ):
            faults.append(f"{path}: cannot be written")
    if faults:
        raise InputError(faults)


def write(path: Path, text: str) -> None:
    """Writes a file of text."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None

"""report.html: one page about a run, readable without a network, from the files of its directory."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2

from dsjax.observe.charts import Chart, Point, Series, draw, number
from dsjax.observe.logs import EVENTS, METRICS, read_lines

REPORT = "report.html"
_TEMPLATE = "report_template.html"
_COLUMNS = (
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "mfu",
    "tokens_seen",
    "peak_memory_bytes",
)
_EVENTS_SHOWN = 200
_FIRST_EVENTS = 50


def write_report(run_dir: str | Path) -> Path:
    """Writes `report.html` of a run directory, whole or not at all, and returns its path.

    What is not there yet (metrics, events, config, environment) is left out of the page.  A disk that
    cannot take the page is said on stderr and not raised: it can be made again from the logs.
    """
    run_dir = Path(run_dir)
    path = run_dir / REPORT
    try:
        new = path.with_name(REPORT + ".new")
        new.write_text(_page(run_dir), encoding="utf-8")
        os.replace(new, path)
    except OSError as error:
        print(f"dsjax: {path} could not be written ({error.strerror})", file=sys.stderr)
    return path


def _page(run_dir: Path) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    columns, evals = _metrics(run_dir)
    events = list(read_lines(run_dir / EVENTS))
    return environment.get_template(_TEMPLATE).render(
        name=run_dir.absolute().name,
        status=_status(events),
        written=_clock(datetime.now(UTC).timestamp()),
        summary=_summary(columns, evals, events),
        charts=_charts(columns, evals),
        events=[_event_row(event) for event in _some(events)],
        events_left_out=max(0, len(events) - _EVENTS_SHOWN),
        config=_text(run_dir / "config.yaml"),
        environment=list(_flat(_json(run_dir / "environment.json"))),
    )


def _metrics(run_dir: Path) -> tuple[dict[str, list[Point]], dict[str, list[Point]]]:
    """The columns of the training lines, and the loss of each evaluation set, over the steps."""
    columns: dict[str, list[Point]] = {name: [] for name in _COLUMNS}
    evals: dict[str, list[Point]] = {}
    for row in read_lines(run_dir / METRICS):
        step = row.get("step")
        if not isinstance(step, int | float):
            continue
        if isinstance(row.get("eval"), Mapping):
            for name, result in row["eval"].items():
                evals.setdefault(name, []).append((step, _finite(result.get("loss"))))
            continue
        for name, points in columns.items():
            points.append((step, _finite(row.get(name))))
    return columns, evals


def _finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < float("inf") else None


def _charts(columns: Mapping[str, list[Point]], evals: Mapping[str, list[Point]]) -> list[Chart]:
    losses = [Series("training", columns["loss"])]
    losses += [Series(f"eval {name}", points, marks=True) for name, points in evals.items()]
    rate = columns["learning_rate"]
    return [
        draw("Loss", "mean over the step's weight", losses),
        draw(
            "Gradient norm",
            "before clipping",
            [Series("gradient norm", columns["grad_norm"])],
            scale="log",
        ),
        draw("Learning rate", "used at the step", [Series("learning rate", rate)]),
        draw(
            "Throughput",
            "tokens/s, all devices",
            [Series("tokens/s", columns["tokens_per_second"])],
            scale="zero",
        ),
    ]


def _summary(
    columns: Mapping[str, list[Point]],
    evals: Mapping[str, list[Point]],
    events: list[dict[str, Any]],
) -> list[tuple[str, str]]:
    """What a person asks first, as (name, value)."""
    found: list[tuple[str, str]] = []
    steps = [step for points in (*columns.values(), *evals.values()) for step, _ in points[-1:]]
    if steps:
        found.append(("last logged step", f"{max(steps):,.0f}"))
    losses = _values(columns["loss"])
    if losses:
        found.append(("training loss", number(losses[-1])))
    for name, points in evals.items():
        if values := _values(points):
            found.append((f"eval {name}", f"{number(values[-1])} (lowest {number(min(values))})"))
    for title, key, shown in (
        ("tokens seen", "tokens_seen", lambda v: f"{v[-1]:,.0f}"),
        ("tokens/s (median)", "tokens_per_second", lambda v: number(statistics.median(v))),
        ("MFU (median)", "mfu", lambda v: f"{100 * statistics.median(v):.1f}%"),
        ("peak device memory", "peak_memory_bytes", lambda v: f"{max(v) / 2**30:.2f} GiB"),
    ):
        if values := _values(columns[key]):
            found.append((title, shown(values)))
    skipped = sum(event.get("kind") == "skipped" for event in events)
    if skipped:
        found.append(("steps skipped", str(skipped)))
    return found


def _values(points: list[Point]) -> list[float]:
    return [value for _, value in points if value is not None]


def _status(events: list[dict[str, Any]]) -> str:
    kinds = [event.get("kind") for event in events]
    last = kinds[-1] if kinds else None
    if last == "finished":
        return "finished"
    if last == "preempted":
        return "stopped after saving"
    if "started" in kinds or "resumed" in kinds:
        return "not finished"
    return "not started"


def _some(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first and the last events, where there are very many."""
    if len(events) <= _EVENTS_SHOWN:
        return events
    return events[:_FIRST_EVENTS] + events[_FIRST_EVENTS - _EVENTS_SHOWN :]


def _event_row(event: Mapping[str, Any]) -> tuple[str, str, str, str]:
    facts = {key: value for key, value in event.items() if key not in ("time", "step", "kind")}
    return (
        _clock(event.get("time")),
        str(event.get("step", "")),
        str(event.get("kind", "")),
        ", ".join(f"{key} {_short(value)}" for key, value in facts.items()),
    )


def _short(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _clock(seconds: Any) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path) or "{}")
    except ValueError:
        return {}


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested facts as rows, their names joined by a space."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flat(item, f"{prefix} {name}".strip())
    elif value is not None:
        yield prefix, str(value)

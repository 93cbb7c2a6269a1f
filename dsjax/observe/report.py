"""report.html: one page about a run, readable without a network, from the files of its directory."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2

from dsjax.files import write_atomically
from dsjax.observe.charts import Chart, Point, Series, draw, number
from dsjax.observe.logs import EVENTS, METRICS, read_lines, users_metrics

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
        write_atomically(path, _page(run_dir).encode())
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
    environment_facts = _json(run_dir / "environment.json")
    events = list(read_lines(run_dir / EVENTS))
    history = _history(run_dir, _starts(events))
    if isinstance(environment_facts.get("unit"), str):
        history.unit = environment_facts["unit"]
    return environment.get_template(_TEMPLATE).render(
        name=run_dir.absolute().name,
        status=_status(events),
        written=_clock(datetime.now(UTC).timestamp()),
        summary=_summary(history, events),
        charts=_charts(history),
        events=[_event_row(event) for event in _some(events)],
        events_left_out=max(0, len(events) - _EVENTS_SHOWN),
        config=_text(run_dir / "config.yaml"),
        environment=list(_flat(environment_facts)),
    )


@dataclass
class _History:
    """What metrics.jsonl says, over the steps.

    Attributes:
      columns: metric -> its points in the training lines; `users` holds those that the user's loss added.
      evals: evaluation set -> metric -> points.
      first_steps: the first logged step after each start of the run.
      unit: what a step's weight counts.
    """

    columns: dict[str, list[Point]] = field(default_factory=lambda: {name: [] for name in _COLUMNS})
    users: dict[str, list[Point]] = field(default_factory=dict)
    evals: dict[str, dict[str, list[Point]]] = field(default_factory=dict)
    first_steps: set[float] = field(default_factory=set)
    unit: str = "tokens"

    def steady(self, name: str) -> list[Point]:
        """A rate without the first logged steps after starts; all of it where there are no others."""
        points = self.columns[name]
        return [point for point in points if point[0] not in self.first_steps] or points


def _history(run_dir: Path, starts: Sequence[float]) -> _History:
    found = _History()
    left = list(starts)
    for row in read_lines(run_dir / METRICS):
        step = row.get("step")
        if not isinstance(step, int | float):
            continue
        if isinstance(row.get("eval"), Mapping):
            for name, result in row["eval"].items():
                points = found.evals.setdefault(name, {"loss": []})
                for key, value in {"loss": _finite(result.get("loss")), **users_metrics(result)}.items():
                    points.setdefault(key, []).append((step, value))
            continue
        if left and step > left[0]:
            left = [start for start in left if start >= step]
            found.first_steps.add(step)
        for name, column in found.columns.items():
            column.append((step, _finite(row.get(name))))
        for name, value in users_metrics(row).items():
            found.users.setdefault(name, []).append((step, value))
    return found


def _starts(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """The steps after which the run was started, in order; a start from an earlier step undoes later ones."""
    starts: list[float] = []
    for event in events:
        step = event.get("step")
        if event.get("kind") in ("started", "resumed") and isinstance(step, int | float):
            starts = [*(start for start in starts if start < step), step]
    return starts


def _finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < float("inf") else None


def _charts(history: _History) -> list[Chart]:
    columns = history.columns
    charts = [
        draw("Loss", "mean over the step's weight", _with_evals(history, "loss", columns["loss"])),
        draw(
            "Gradient norm",
            "before clipping",
            [Series("gradient norm", columns["grad_norm"])],
            scale="log",
        ),
        draw("Learning rate", "used at the step", [Series("learning rate", columns["learning_rate"])]),
        draw("Throughput", f"{history.unit}/s, all devices", _throughput(history), scale="zero"),
    ]
    names = [*history.users, *(name for keys in history.evals.values() for name in keys if name != "loss")]
    for name in dict.fromkeys(names):
        series = _with_evals(history, name, history.users.get(name, []))
        charts.append(draw(name, "mean over its weight", series))
    return charts


def _with_evals(history: _History, name: str, training: list[Point]) -> list[Series]:
    """A metric's training line and its points of each evaluation set."""
    sets = [(one, keys[name]) for one, keys in history.evals.items() if name in keys]
    return [
        Series("training", training),
        *(Series(f"eval {one}", points, marks=True) for one, points in sets),
    ]


def _throughput(history: _History) -> list[Series]:
    """The rate as a line, and the first logged step after each start as marks of its own.

    Such a step waits for the first batches and stands for fewer steps, so it says little of the pace.
    """
    unit, points = f"{history.unit}/s", history.columns["tokens_per_second"]
    first: list[Point] = []
    for step, value in points:
        if step in history.first_steps:
            first += [(step, value), (step, None)]  # a gap, so that no line joins the marks
    steady = [point for point in points if point[0] not in history.first_steps]
    return [Series(unit, steady), Series("first after a start", first, marks=True)]


def _summary(history: _History, events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What a person asks first, as (name, value)."""
    found: list[tuple[str, str]] = []
    columns, unit = history.columns, history.unit
    sets = {name: keys["loss"] for name, keys in history.evals.items()}
    steps = [step for points in (*columns.values(), *sets.values()) for step, _ in points[-1:]]
    if steps:
        found.append(("last logged step", f"{max(steps):,.0f}"))
    losses = _values(columns["loss"])
    if losses:
        found.append(("training loss", number(losses[-1])))
    for name, points in sets.items():
        if values := _values(points):
            found.append((f"eval {name}", f"{number(values[-1])} (lowest {number(min(values))})"))
    for title, points, shown in (
        (f"{unit} seen", columns["tokens_seen"], lambda v: f"{v[-1]:,.0f}"),
        (f"{unit}/s (median)", history.steady("tokens_per_second"), lambda v: number(statistics.median(v))),
        ("MFU (median)", history.steady("mfu"), lambda v: f"{100 * statistics.median(v):.1f}%"),
        ("peak device memory", columns["peak_memory_bytes"], lambda v: f"{max(v) / 2**30:.2f} GiB"),
    ):
        if values := _values(points):
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
    # A mesh of one device has no axes to tell of.
    facts = {k: value for k, value in event.items() if k not in ("time", "step", "kind") and value != {}}
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


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested facts as rows, their names joined by a space."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flat(item, f"{prefix} {name}".strip())
    elif value is not None:
        yield prefix, str(value)

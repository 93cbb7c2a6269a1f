"""Line charts as numbers: where ticks, lines and marks lie. The report's template draws them as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Scale = Literal["linear", "zero", "log"]
Point = tuple[float, float | None]  # step, value; None where there was no finite value

WIDTH, HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 26
# A chart is about 570 pixels wide: more points than this could not be told apart.
_BUCKETS = 250
# Values that span more than this factor are easier to read on a logarithmic scale.
_LOG_FACTOR = 50.0


@dataclass
class Series:
    """A line, or marks joined by a thin line, through (step, value)."""

    name: str
    points: Sequence[Point]
    marks: bool = False


@dataclass
class Drawn:
    """A series in pixels: an SVG path, marks, and what the pointer shows ([x, y, step, value])."""

    name: str
    path: str
    marks: list[tuple[float, float]]
    hover: list[tuple[float, float, float, float]]


@dataclass
class Chart:
    """A chart in pixels; `series` is empty where there is nothing to show."""

    title: str
    unit: str
    logarithmic: bool = False
    series: list[Drawn] = field(default_factory=list)
    x_ticks: list[tuple[float, str]] = field(default_factory=list)
    y_ticks: list[tuple[float, str]] = field(default_factory=list)
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    top: int = _TOP
    bottom: int = HEIGHT - _BOTTOM


def thin(points: Sequence[Point], buckets: int = _BUCKETS) -> list[Point]:
    """At most about four points a bucket: its first, last, lowest and highest; gaps stay gaps."""
    if len(points) <= 4 * buckets:
        return list(points)
    kept: list[Point] = []
    for bucket in range(buckets):
        begin, end = bucket * len(points) // buckets, (bucket + 1) * len(points) // buckets
        finite = [(value, i) for i, (_, value) in enumerate(points[begin:end], begin) if value is not None]
        chosen = {begin, end - 1}
        if finite:
            chosen |= {min(finite)[1], max(finite)[1]}
        if len(finite) < end - begin:
            chosen.add(next(i for i in range(begin, end) if points[i][1] is None))
        kept += [points[i] for i in sorted(chosen)]
    return kept


def draw(title: str, unit: str, series: Sequence[Series], *, scale: Scale = "linear") -> Chart:
    """Lays a chart out.

    Args:
      unit: of the values, in words.
      scale: "linear"; "zero": linear from 0; "log": logarithmic where all values are positive and span
        enough to need it.
    """
    shown = [Series(s.name, thin(s.points), s.marks) for s in series if s.points]
    values = [value for s in shown for _, value in s.points if value is not None]
    steps = [step for s in shown for step, _ in s.points]
    chart = Chart(title, unit)
    if not values:
        return chart
    low, high = min(values), max(values)
    if scale == "zero":
        low = min(low, 0.0)
    chart.logarithmic = scale == "log" and low > 0 and high / low > _LOG_FACTOR
    y_ticks = _log_ticks(low, high) if chart.logarithmic else _ticks(low, high, 5)
    low, high = min(low, y_ticks[0]), max(high, y_ticks[-1])
    first, last = min(steps), max(steps)

    def x_of(step: float) -> float:
        share = (step - first) / (last - first) if last > first else 0.5
        return round(chart.left + share * (chart.right - chart.left), 1)

    def scaled(value: float) -> float:
        return math.log(value) if chart.logarithmic else value

    def y_of(value: float) -> float:
        share = (scaled(value) - scaled(low)) / (scaled(high) - scaled(low))
        return round(chart.bottom - share * (chart.bottom - chart.top), 1)

    labels = [number(tick) for tick in y_ticks] if chart.logarithmic else _labels(y_ticks)
    chart.y_ticks = [(y_of(tick), label) for tick, label in zip(y_ticks, labels, strict=True)]
    inside = [t for t in _ticks(first, last, 6) if first <= t <= last and t == int(t)] or [first]
    chart.x_ticks = [(x_of(tick), f"{tick:,.0f}") for tick in inside]
    for one in shown:
        hover = [(x_of(s), y_of(v), s, v) for s, v in one.points if v is not None]
        path = _path([(x_of(s), None if v is None else y_of(v)) for s, v in one.points])
        # A point alone between gaps is no line; without a mark it would not be seen.
        marks = [(x, y) for x, y, _, _ in hover] if one.marks or len(hover) < 2 else []
        chart.series.append(Drawn(one.name, path, marks, hover))
    return chart


def _path(points: Sequence[tuple[float, float | None]]) -> str:
    words, pen = [], "M"
    for x, y in points:
        if y is None:
            pen = "M"
            continue
        words.append(f"{pen}{x:g} {y:g}")
        pen = "L"
    return "".join(words)


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers that enclose low..high."""
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / about
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def _labels(ticks: Sequence[float]) -> list[str]:
    """Evenly spaced ticks with as many decimals as all of them need."""
    largest = max(abs(tick) for tick in ticks)
    if 1e-3 <= largest < 1e6:
        for decimals in range(7):
            if all(abs(round(tick, decimals) - tick) < 1e-9 * largest for tick in ticks):
                return [f"{tick:,.{decimals}f}" for tick in ticks]
    return [number(tick) for tick in ticks]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, (last - first) // 5)
    ticks = [10.0**power for power in range(first, last + 1, every)]
    return ticks if ticks[-1] >= high else [*ticks, 10.0**last]


def number(value: float) -> str:
    """A value as an axis or a table shows it."""
    if value != 0 and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.3g}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"

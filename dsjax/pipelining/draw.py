"""Schedules as pictures: a row a stage, time to the right, idle time left empty."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

import numpy as np

from dsjax.pipelining.schedule import Schedule, bubble_formula
from dsjax.pipelining.simulate import Simulated, simulate

KINDS = ("forward", "backward", "weight gradient")
LETTERS = "FBW"
_COLOURS = ((59, 113, 186), (196, 92, 18), (46, 125, 70))  # of chunk 0, by kind; white is read on them
_LIGHTEST = 0.6  # share of white in the last chunk's shade
_WIDTH, _ROW, _LEFT, _RIGHT, _TOP = 1100, 26, 62, 14, 62
_LETTER_PIXELS = 6.5  # of a digit at the size of the numbers in boxes


class _Box(NamedTuple):
    kind: int
    stage: int
    chunk: int
    microbatch: int
    begin: float
    end: float


def as_text(schedule: Schedule, width: int = 100) -> str:
    """The schedule in letters, with forward 1 and backward 2 (zero_bubble: each operation 1) long.

    A box is its letter, the microbatch (and `.chunk`) where there is room, and dashes to its end.

    Args:
      width: of a line, in characters; a long schedule is squeezed into it.
    """
    simulated = simulate(schedule, 1.0, 2.0) if schedule.weight is None else simulate(schedule, 1.0, 1.0, 1.0)
    boxes = list(_boxes(schedule, simulated))
    label = len(f"stage {schedule.stages - 1} ")
    longest = max(len(_name(schedule, box)) for box in boxes)
    room = max(width - label - 2, 1) / simulated.total
    # Whole characters a unit of time make equal operations equally wide.
    scale = min(longest + 1, math.floor(room)) if room >= 1 else room
    rows = [[" "] * round(simulated.total * scale) for _ in range(schedule.stages)]
    for box in boxes:
        begin, end = round(box.begin * scale), round(box.end * scale)
        name = _name(schedule, box)
        space = end - begin
        text = name if space > len(name) else LETTERS[box.kind]
        rows[box.stage][begin:end] = text.ljust(space, "-")[:space]
    lines = [f"{f'stage {s} '.rjust(label)}|{''.join(row)}|" for s, row in enumerate(rows)]
    return "\n".join([*lines, _caption(schedule, simulated)])


def as_svg(schedule: Schedule, simulated: Simulated, title: str) -> str:
    """The schedule as a page of SVG that needs nothing else.

    Args:
      simulated: of this schedule; its times are drawn.
      title: above the picture.
    """
    scale = (_WIDTH - _LEFT - _RIGHT) / simulated.total
    bottom = _TOP + _ROW * schedule.stages
    height = bottom + 62
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="24" font-size="16" font-weight="bold" fill="#222">{escape(title)}</text>',
        *_legend(schedule),
        *_axis(simulated.total, scale, bottom),
    ]
    for stage in range(schedule.stages):
        y = _TOP + _ROW * stage
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y + _ROW / 2 + 4}" font-size="12" text-anchor="end" '
            f'fill="#444">stage {stage}</text>'
        )
    for box in _boxes(schedule, simulated):
        parts += _drawn(schedule, box, scale)
    caption = escape(_caption(schedule, simulated))
    parts.append(f'<text x="{_LEFT}" y="{height - 12}" font-size="13" fill="#222">{caption}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _boxes(schedule: Schedule, simulated: Simulated) -> Iterator[_Box]:
    """Every operation, with its times."""
    tables = (schedule.forward, schedule.backward, schedule.weight)
    for kind, table in enumerate(tables):
        if table is None:
            continue
        for tick, stage in np.argwhere(table >= 0):
            chunk, microbatch = divmod(int(table[tick, stage]), schedule.microbatches)
            times = simulated.begin[kind, tick, stage], simulated.end[kind, tick, stage]
            yield _Box(kind, int(stage), chunk, microbatch, *map(float, times))


def _name(schedule: Schedule, box: _Box) -> str:
    return f"{LETTERS[box.kind]}{box.microbatch}" + (f".{box.chunk}" if schedule.virtual > 1 else "")


def _caption(schedule: Schedule, simulated: Simulated) -> str:
    """What is drawn and how much of it is idle; the formula's share for the mean times of operations."""
    settings = f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} microbatches"
    if schedule.virtual > 1:
        settings += f", {schedule.virtual} chunks a stage"
    if schedule.name == "forward_only":
        return f"{settings}; idle {simulated.bubble:.1%}"
    forward, backward, weight = np.nan_to_num(simulated.end - simulated.begin).sum(axis=(1, 2))
    formula = bubble_formula(
        schedule.name,
        schedule.stages,
        schedule.microbatches,
        schedule.virtual,
        forward,
        backward + weight,
        weight,
    )
    return f"{settings}; idle {simulated.bubble:.1%} simulated, {formula:.1%} by formula"


def _shade(schedule: Schedule, kind: int, chunk: int) -> str:
    """The colour of a kind, lighter with each chunk."""
    white = _LIGHTEST * chunk / max(schedule.virtual - 1, 1)
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in _COLOURS[kind])


def _drawn(schedule: Schedule, box: _Box, scale: float) -> list[str]:
    """A box, and its microbatch inside where there is room."""
    x, width = _LEFT + box.begin * scale, (box.end - box.begin) * scale
    y = _TOP + _ROW * box.stage + 2
    where = f"{KINDS[box.kind]} of microbatch {box.microbatch}, chunk {box.chunk}, stage {box.stage}"
    edge = min(0.5, width / 8)
    parts = [
        f'<rect x="{x + edge:.2f}" y="{y}" width="{width - 2 * edge:.2f}" height="{_ROW - 4}" '
        f'fill="{_shade(schedule, box.kind, box.chunk)}"><title>{where}</title></rect>'
    ]
    text = str(box.microbatch)
    if width >= _LETTER_PIXELS * len(text) + 3:
        dark = schedule.virtual > 1 and 2 * box.chunk >= schedule.virtual - 1
        parts.append(
            f'<text x="{x + width / 2:.2f}" y="{y + 15}" font-size="11" text-anchor="middle" '
            f'fill="{"#222" if dark else "#fff"}" pointer-events="none">{text}</text>'
        )
    return parts


def _legend(schedule: Schedule) -> list[str]:
    """One swatch a kind, split into the shades of its chunks."""
    parts, x = [], float(_LEFT)
    for kind in range(2 if schedule.weight is None else 3):
        each = 14 if schedule.virtual == 1 else max(8.0, 28 / schedule.virtual)
        for chunk in range(schedule.virtual):
            colour = _shade(schedule, kind, chunk)
            parts.append(f'<rect x="{x:.1f}" y="36" width="{each:.1f}" height="14" fill="{colour}"/>')
            x += each
        half = schedule.weight is not None and kind == 1
        name = "backward (input gradient)" if half else KINDS[kind]
        parts.append(f'<text x="{x + 6:.1f}" y="47" font-size="12" fill="#444">{name}</text>')
        x += 28 + 6.5 * len(name)
    if schedule.virtual > 1:
        shades = f"darkest: chunk 0, lightest: chunk {schedule.virtual - 1}"
        parts.append(f'<text x="{x:.1f}" y="47" font-size="12" fill="#777">{shades}</text>')
    return parts


def _axis(total: float, scale: float, bottom: int) -> list[str]:
    """Time below the rows: about ten round numbers."""
    power = 10.0 ** math.floor(math.log10(total / 10))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= total / 10)
    end = _LEFT + total * scale
    parts = [
        f'<path d="M{_LEFT} {bottom + 3.5}H{end:.1f}" stroke="#888"/>',
        f'<text x="{_LEFT - 8}" y="{bottom + 20}" font-size="11" text-anchor="end" fill="#666">time</text>',
    ]
    for i in range(math.floor(total / step + 1e-9) + 1):
        x = _LEFT + i * step * scale
        parts.append(f'<path d="M{x:.1f} {_TOP}V{bottom + 7}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 20}" font-size="11" text-anchor="middle" '
            f'fill="#666">{i * step:.6g}</text>'
        )
    return parts

"""Curves of losses as one SVG that needs nothing beside it; the first of them is the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from dsjax.observe.charts import Chart, Point, Series, draw

POINTS = 24  # of a line: means over as many steps as that takes
_HEADER, _TITLE, _LEGEND = 34, 24, 26
# Dashes where a line is likely to lie on the one before it.
_LOOKS = (
    ("#6b7280", ""), ("#2563eb", ""), ("#059669", ""), ("#a855f7", "5 4"), ("#d97706", ""), ("#dc2626", "5 4"),
    ("#18181b", ""), ("#0891b2", "5 4"),
)  # fmt: skip
_STYLE = """
  svg { font: 11px system-ui, sans-serif; background: #fff; }
  text { fill: #52525b; } .title { font-size: 13px; font-weight: 600; fill: #18181b; }
  .rule { stroke: #e4e4e7; } .line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
"""


@dataclass(frozen=True)
class Line:
    """A run's losses.

    Attributes:
      name: of the form of exchange; lines of one name look alike.
      feedback: with error feedback or without; None: it has none.
      curve: [step, loss] of each step; a loss that was not finite is None.
    """

    name: str
    feedback: bool | None
    curve: Sequence[Sequence[float | None]]


def page(lines: Sequence[Line], caption: str) -> str:
    """The losses, and how far they are above the reference's with error feedback and without, below each other."""
    if not lines:
        return '<svg xmlns="http://www.w3.org/2000/svg"/>\n'
    looks = dict(zip(dict.fromkeys(line.name for line in lines), _LOOKS, strict=False))
    reference, others = lines[0], lines[1:]
    size = max(1, len(reference.curve) // POINTS)
    shown = [line for line in lines if line.feedback is not False]
    panels = [
        draw("Training loss", "nats a token", [Series(one.name, means(one.curve, size)) for one in shown]),
    ]
    for title, kept in (("with error feedback", True), ("without error feedback", False)):
        series = [
            Series(one.name, above(one.curve, reference.curve, size))
            for one in others
            if one.feedback is kept
        ]
        panels.append(draw(f"Training loss above {reference.name} exchange's, {title}", "%", series))
    panels = [panel for panel in panels if panel.series]
    width, step = panels[0].width, panels[0].height + _TITLE
    height = _HEADER + step * len(panels) + _LEGEND
    averaged = f"; a point is the mean of {size} steps" if size > 1 else ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(caption)}</title><style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{panels[0].left}" y="20">{escape(caption + averaged)}</text>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, _HEADER + number * step, looks)
    parts += _legend(looks, panels[0].left, height - 8, panels[0].right)
    return "\n".join([*parts, "</svg>"]) + "\n"


def means(curve: Sequence[Sequence[float | None]], size: int) -> list[Point]:
    """(last step, mean loss) of each `size` steps; None where one of them was not finite."""
    found: list[Point] = []
    for begin in range(0, len(curve) - size + 1, size):
        part = curve[begin : begin + size]
        values = [loss for _, loss in part if loss is not None]
        step = part[-1][0]
        assert step is not None
        found.append((step, sum(values) / size if len(values) == size else None))
    return found


def above(
    curve: Sequence[Sequence[float | None]], reference: Sequence[Sequence[float | None]], size: int
) -> list[Point]:
    """(step, percent by which the mean loss is above the reference's), where both are known."""
    pairs = zip(means(curve, size), means(reference, size), strict=False)
    return [(step, 100 * (a / b - 1) if a is not None and b else None) for (step, a), (_, b) in pairs]


def _panel(panel: Chart, top: int, looks: dict[str, tuple[str, str]]) -> list[str]:
    """One chart under its title."""
    unit = "logarithmic " * panel.logarithmic + panel.unit
    parts = [
        f'<g transform="translate(0 {top})">',
        f'<text class="title" x="{panel.left}" y="14">{escape(panel.title)}, {unit}</text>',
        f'<g transform="translate(0 {_TITLE})">',
    ]
    for y, label in panel.y_ticks:
        parts.append(f'<line class="rule" x1="{panel.left}" x2="{panel.right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{panel.left - 6}" y="{y + 4}" text-anchor="end">{label}</text>')
    for x, label in panel.x_ticks:
        anchor = "end" if x > panel.right - 20 else "middle"
        parts.append(f'<text x="{x}" y="{panel.bottom + 16}" text-anchor="{anchor}">{label}</text>')
    parts.append(f'<text x="{panel.left - 6}" y="{panel.bottom + 16}" text-anchor="end">step</text>')
    parts += [_path(one.path, looks[one.name]) for one in panel.series]
    return [*parts, "</g>", "</g>"]


def _path(path: str, look: tuple[str, str]) -> str:
    colour, dashes = look
    return f'<path class="line" stroke="{colour}" stroke-dasharray="{dashes or "none"}" d="{path}"/>'


def _legend(looks: dict[str, tuple[str, str]], left: int, y: int, right: int) -> list[str]:
    each = (right - left) / len(looks)
    parts = []
    for number, (name, look) in enumerate(looks.items()):
        x = left + number * each
        parts.append(_path(f"M{x:g} {y - 4}h16", look))
        parts.append(f'<text x="{x + 21:g}" y="{y}">{escape(name)}</text>')
    return parts

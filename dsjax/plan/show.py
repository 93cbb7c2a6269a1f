"""A plan as tables of a terminal and as one page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
from markupsafe import Markup
from rich.table import Table

from dsjax.plan.result import FORMULA, PIPELINE_FORMULA, MemoryUse, Pipelined, Plan, Traffic
from dsjax.plan.timetable import layers_words, picture
from dsjax.plan.words import RESOURCES, axes_words, mesh_words

if TYPE_CHECKING:
    from rich.console import Console

GIB, MIB = 1 << 30, 1 << 20
_TEMPLATE = "page.html"
_SHOWN = 12  # groups of collectives; the rest are summed
_PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations, gathered parameters, logits",
    "batch": "batch",
    "exchange": "error feedback, workers' parameters",
    "other": "other arguments and results",
}
_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Sheet:
    """One table: a title, names of columns, rows of text."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def show(plan: Plan, console: Console) -> None:
    """Prints a plan."""
    console.print(headline(plan))
    for sheet in sheets(plan):
        print_sheet(sheet, console)
    console.print()
    for note in [*plan.notes, *closing(plan)]:
        console.print(f"- {note}", markup=False, highlight=False)


def print_sheet(sheet: Sheet, console: Console) -> None:
    """Prints a table, columns of numbers to the right."""
    table = Table(*sheet.columns, title=sheet.title, title_justify="left", box=None, title_style="bold")
    for index in range(1, len(sheet.columns)):
        if all(row[index][:1].isdigit() or row[index][:1] in ("", "-", "<") for row in sheet.rows):
            table.columns[index].justify = "right"
    for row in sheet.rows:
        table.add_row(*row)
    console.print()
    console.print(table)


def page(plan: Plan, further: Sequence[Sheet] = (), notes: Sequence[str] = ()) -> str:
    """A plan as one HTML page that needs nothing else.

    Args:
      further, notes: tables and lines below the plan's own.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    template = environment.get_template(_TEMPLATE)
    return template.render(
        plan=plan,
        headline=headline(plan),
        sheets=[*sheets(plan), *further],
        bar=_bar(plan.memory),
        schedule=Markup(schedule_picture(plan.pipeline)) if plan.pipeline else "",
        notes=[*plan.notes, *closing(plan), *notes],
    )


def schedule_picture(told: Pipelined) -> str:
    """The schedule of a pipeline as SVG."""
    return picture(told, f"One pass of the pipeline, {gib(told.stash_bytes)} stashed a device")


def headline(plan: Plan) -> str:
    """One line: where, how laid out, whether it fits."""
    memory = plan.memory
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    source = "" if plan.compiled else " (NOT COMPILED: estimated by formulas)"
    return (
        f"{plan.target}, {mesh_words(plan.mesh)}: {verdict}, {gib(memory.total)} of {gib(memory.limit)} a device"
        f"{source}; {seconds(plan.forecast.step_seconds)} a step"
    )


def closing(plan: Plan) -> list[str]:
    """What is to be said below the tables: of memory, of the formula, of XLA."""
    memory, lines = plan.memory, []
    if memory.limit < memory.capacity:
        share = memory.limit / memory.capacity
        lines.append(
            f"jax takes {share:.0%} of a GPU's {gib(memory.capacity)} (XLA_PYTHON_CLIENT_MEM_FRACTION sets it)"
        )
    lines.append(f"{FORMULA} {PIPELINE_FORMULA}" if plan.pipeline else FORMULA)
    if plan.options:
        lines.append("XLA options: " + " ".join(f"{name}={value}" for name, value in plan.options.items()))
    return lines


def sheets(plan: Plan) -> list[Sheet]:
    """The tables of a plan."""
    made = [_memory(plan.memory)]
    if plan.changes:
        size = in_one_unit(c.total for c in plan.changes)
        made.append(
            Sheet(
                "what would fit (each compiled)",
                ("settings", "a device", "a step"),
                [(c.settings, size(c.total), seconds(c.step_seconds)) for c in plan.changes],
            )
        )
    if plan.placement:
        made.append(Sheet("how operators are cut", ("operators", "cut"), list(plan.placement.items())))
    if plan.pipeline:
        made.append(_pipeline(plan.pipeline))
    if plan.traffic:
        made.append(_traffic(plan))
    return [*made, _time(plan), _money(plan)]


def _memory(memory: MemoryUse) -> Sheet:
    rows = [
        (words, getattr(memory, name))
        for name, words in _PARTS.items()
        if name != "exchange" or memory.exchange
    ]
    rows += [(name, getattr(memory, name)) for name in ("total", "limit", "headroom")]
    written = in_one_unit([memory.total])
    return Sheet(
        "memory a device",
        ("what", "size"),
        [(name, written(size)) for name, size in rows if size or name == "total"],
    )


def _pipeline(told: Pipelined) -> Sheet:
    passes = f" a pass, {told.passes} passes a step" if told.passes > 1 else ""
    times = {
        "a forward of a microbatch": told.forward_seconds,
        "a backward": told.backward_seconds,
        "a weight gradient": told.weight_seconds,
    }
    rows = [
        ("schedule", told.schedule + (f", {told.virtual} chunks a stage" if told.virtual > 1 else "")),
        ("layers a stage", layers_words(told)),
        ("microbatches", f"{told.microbatches}{passes}"),
        ("ticks a pass", str(told.ticks)),
        *((what, _range(table)) for what, table in times.items() if table is not None),
        ("hand-over, a tick", seconds(told.link_seconds)),
        ("bubble of all stages, simulated with these times", f"{told.bubble:.1%}"),
        ("bubble by formula, stages of their mean times, no links", f"{told.bubble_formula:.1%}"),
        ("stash: what is kept from tick to tick", gib(told.stash_bytes)),
    ]
    return Sheet(
        f"pipeline of {told.stages} stages; collectives and times below are of the busiest",
        ("what", "value"),
        rows,
    )


def _range(table: list[list[float]]) -> str:
    """The shortest and the longest of some seconds."""
    each = [value for row in table for value in row]
    least, most = seconds(min(each)), seconds(max(each))
    return most if least == most else f"{least} to {most}"


def _traffic(plan: Plan) -> Sheet:
    shown, rest = plan.traffic[:_SHOWN], plan.traffic[_SHOWN:]
    written = in_one_unit(one.sent for one in plan.traffic)
    rows = [_traffic_row(plan, one, written) for one in shown]
    if rest:
        sent, time = sum(t.sent for t in rest), sum(t.seconds for t in rest)
        times = sum(t.times for t in rest)
        rows.append((f"{len(rest)} smaller", "", "", "", written(sent), str(times), seconds(time), ""))
    share = "" if plan.hidden_share is None else f"; {plan.hidden_share:.0%} of their time is hidden"
    return Sheet(
        f"collectives of a step, links inside and between nodes, bytes that a device sends{share}",
        ("kind", "axes", "link", "type", "sent", "times", "time", "hidden"),
        rows,
    )


def _traffic_row(plan: Plan, one: Traffic, written: Callable[[float], str]) -> tuple[str, ...]:
    loops = " x ".join("?" if turns is None else str(turns) for turns in one.loop)
    hidden = f"{one.hidden / one.seconds:.0%}" if plan.compiled and one.seconds else ""
    return (
        one.kind,
        "+".join(axes_words(one.axes, plan.mesh)),
        "between" if one.crosses else "inside",
        one.dtype,
        written(one.sent),
        _times(one, loops),
        seconds(one.seconds),
        hidden,
    )


def _times(one: Traffic, loops: str) -> str:
    if one.every > 1:
        return f"{one.times} in {one.every} steps"
    return f"{one.times} (loop of {loops})" if loops else str(one.times)


def _time(plan: Plan) -> Sheet:
    roofline, forecast, flops = plan.roofline, plan.forecast, plan.flops
    rows = [
        *((f"{words}, at peak", seconds(getattr(roofline, name))) for name, words in RESOURCES.items()),
        ("bound by", RESOURCES[roofline.bound]),
        ("predicted step", seconds(forecast.step_seconds)),
        ("  of it exposed communication", seconds(forecast.exposed_seconds)),
        *([("  of it the busiest stage idle", seconds(forecast.idle_seconds))] if plan.pipeline else []),
        ("model FLOPs a step", amount(flops.model)),
        ("hardware FLOPs a step", amount(flops.hardware)),
        ("MFU", "not known" if forecast.mfu is None else f"{forecast.mfu:.1%}"),
        ("compiled in", seconds(plan.compile_seconds) if plan.compiled else "not compiled"),
    ]
    return Sheet("time of a step", ("what", "value"), rows)


def _money(plan: Plan) -> Sheet:
    forecast, rows = plan.forecast, []
    if forecast.tokens_per_second is not None:
        rows.append(("tokens a second", f"{forecast.tokens_per_second:,.0f}"))
        rows.append(("tokens a second and device", f"{forecast.tokens_per_second / plan.devices:,.0f}"))
    if forecast.days is not None and forecast.dollars is not None and forecast.kwh is not None:
        rows.append(("tokens to train on", amount(forecast.tokens)))
        rows.append(("days", f"{forecast.days:,.2f}"))
        rows.append(("US dollars", f"{forecast.dollars:,.0f}"))
        rows.append(("kWh of the chips", f"{forecast.kwh:,.0f}"))
    return Sheet("the whole run", ("what", "value"), rows or [("tokens", "not known")])


def gib(size: float) -> str:
    """Bytes as GiB, or smaller units where they are few."""
    if abs(size) >= GIB / 100:
        return f"{size / GIB:,.2f} GiB"
    return f"{size / MIB:.2f} MiB" if abs(size) >= MIB / 100 else f"{size:.0f} bytes"


def in_one_unit(sizes: Iterable[float]) -> Callable[[float], str]:
    """What writes the sizes (bytes) of a table, all in the unit that suits the largest of these."""
    largest = max((abs(size) for size in sizes), default=0)
    unit, name = next(
        ((unit, name) for unit, name in ((GIB, "GiB"), (MIB, "MiB")) if largest >= unit / 10), (1, "bytes")
    )
    digits = 0 if unit == 1 else 2 if largest >= unit else 3

    def written(size: float) -> str:
        if 0 < size / unit < 10**-digits:
            return f"<{10**-digits:.{digits}f} {name}"
        return f"{size / unit:,.{digits}f} {name}" if size else "0"

    return written


def seconds(value: float) -> str:
    """Seconds in a unit that shows their digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} us" if value else "0"


def amount(value: float | None) -> str:
    """A count with three digits and the letter of its thousands."""
    if value is None:
        return "not known"
    for factor, unit in _UNITS:
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.3g}"


@dataclass(frozen=True)
class _Segment:
    """A part of the memory bar: a colour's name in the page, the words and size beside it, percent of the bar."""

    name: str
    words: str
    size: str
    share: float


@dataclass(frozen=True)
class _Bar:
    """A device's memory: what is held and what is not; the limit is a line across both."""

    parts: list[_Segment]
    limit: _Segment


def _bar(memory: MemoryUse) -> _Bar:
    whole = max(memory.capacity, memory.total)
    sizes = {name: getattr(memory, name) for name in _PARTS if getattr(memory, name)}
    written = in_one_unit([memory.total])

    def segment(name: str, words: str, size: int) -> _Segment:
        return _Segment(name, words, written(size), 100 * size / whole)

    parts = [segment(name, _PARTS[name], size) for name, size in sizes.items()]
    if memory.capacity > memory.total:
        parts.append(
            segment("unused", f"not used of {written(memory.capacity)}", memory.capacity - memory.total)
        )
    return _Bar(parts, segment("limit", "limit, what jax lets a program use", memory.limit))

"""A plan as tables of a terminal and as one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
from rich.table import Table

from dsjax.plan.result import FORMULA, MemoryUse, Plan, Traffic

if TYPE_CHECKING:
    from rich.console import Console

GIB = 1 << 30
_TEMPLATE = "page.html"
_SHOWN = 12  # groups of collectives; the rest are summed
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
        if all(row[index][:1].isdigit() or row[index][:1] in ("", "-") for row in sheet.rows):
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
        bars=_bars(plan.memory),
        notes=[*plan.notes, *closing(plan), *notes],
    )


def headline(plan: Plan) -> str:
    """One line: where, how laid out, whether it fits."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items()) or "one device"
    memory = plan.memory
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    source = "" if plan.compiled else " (NOT COMPILED: estimated by formulas)"
    return (
        f"{plan.target}, {mesh}: {verdict}, {gib(memory.total)} of {gib(memory.limit)} a device{source}; "
        f"{seconds(plan.forecast.step_seconds)} a step"
    )


def closing(plan: Plan) -> list[str]:
    """What is to be said below the tables: of memory, of the formula, of XLA."""
    memory, lines = plan.memory, []
    if memory.limit < memory.capacity:
        share = memory.limit / memory.capacity
        lines.append(
            f"jax takes {share:.0%} of a GPU's {gib(memory.capacity)} (XLA_PYTHON_CLIENT_MEM_FRACTION sets it)"
        )
    lines.append(FORMULA)
    if plan.options:
        lines.append("XLA options: " + " ".join(f"{name}={value}" for name, value in plan.options.items()))
    return lines


def sheets(plan: Plan) -> list[Sheet]:
    """The tables of a plan."""
    made = [_memory(plan.memory)]
    if plan.changes:
        made.append(
            Sheet(
                "what would fit (each compiled)",
                ("settings", "a device", "a step"),
                [(c.settings, gib(c.total), seconds(c.step_seconds)) for c in plan.changes],
            )
        )
    if plan.placement:
        made.append(Sheet("how operators are cut", ("operators", "cut"), list(plan.placement.items())))
    if plan.traffic:
        made.append(_traffic(plan))
    return [*made, _time(plan), _money(plan)]


def _memory(memory: MemoryUse) -> Sheet:
    rows = [
        ("parameters", memory.parameters),
        ("gradients (fp32)", memory.gradients),
        ("optimizer state", memory.optimizer),
        ("activations, gathered parameters, logits", memory.activations),
        ("batch", memory.batch),
        ("other arguments and results", memory.other),
        ("total", memory.total),
        ("limit", memory.limit),
        ("headroom", memory.headroom),
    ]
    return Sheet(
        "memory a device",
        ("what", "size"),
        [(name, gib(size)) for name, size in rows if size or name == "total"],
    )


def _traffic(plan: Plan) -> Sheet:
    shown, rest = plan.traffic[:_SHOWN], plan.traffic[_SHOWN:]
    rows = [_traffic_row(one, plan.compiled) for one in shown]
    if rest:
        sent, time = sum(t.sent for t in rest), sum(t.seconds for t in rest)
        times = sum(t.times for t in rest)
        rows.append((f"{len(rest)} smaller", "", "", "", gib(sent), str(times), seconds(time), ""))
    share = "" if plan.hidden_share is None else f"; {plan.hidden_share:.0%} of their time is hidden"
    return Sheet(
        f"collectives of a step, links inside and between nodes, bytes that a device sends{share}",
        ("kind", "axes", "link", "type", "sent", "times", "time", "hidden"),
        rows,
    )


def _traffic_row(one: Traffic, compiled: bool) -> tuple[str, ...]:
    loops = " x ".join("?" if turns is None else str(turns) for turns in one.loop)
    hidden = f"{one.hidden / one.seconds:.0%}" if compiled and one.seconds else ""
    return (
        one.kind,
        "+".join(one.axes),
        "between" if one.crosses else "inside",
        one.dtype,
        gib(one.sent),
        f"{one.times} (loop of {loops})" if loops else str(one.times),
        seconds(one.seconds),
        hidden,
    )


def _time(plan: Plan) -> Sheet:
    roofline, forecast, flops = plan.roofline, plan.forecast, plan.flops
    rows = [
        ("compute, at peak", seconds(roofline.compute)),
        ("device memory, at peak", seconds(roofline.memory)),
        ("links inside nodes, at peak", seconds(roofline.node)),
        ("links between nodes, at peak", seconds(roofline.network)),
        ("bound by", roofline.bound),
        ("predicted step", seconds(forecast.step_seconds)),
        ("  of it exposed communication", seconds(forecast.exposed_seconds)),
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
    return f"{size / 2**20:.2f} MiB" if abs(size) >= 2**20 / 100 else f"{size:.0f} bytes"


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


def _bars(memory: MemoryUse) -> Sequence[tuple[str, float]]:
    """The parts of the memory in percent of the device's."""
    parts = ("parameters", "gradients", "optimizer", "activations", "batch", "other")
    whole = max(memory.capacity, memory.total)
    return [(name, 100 * getattr(memory, name) / whole) for name in parts if getattr(memory, name)]

"""What a step is made of, as tables: the same rows for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dsjax.plan.explanation.fusion import FORMULA, THRESHOLD
from dsjax.plan.show import Sheet, amount, in_one_unit, print_sheet, seconds
from dsjax.plan.words import RESOURCES

if TYPE_CHECKING:
    from rich.console import Console

    from dsjax.plan.explanation.explain import Explanation
    from dsjax.plan.explanation.judged import Judged
    from dsjax.plan.explanation.tallies import Tally

_LAYERS, _TYPES, _CANDIDATES = 14, 16, 12  # rows; the rest are summed
_EXCESS = 6


def show_explanation(explanation: Explanation, console: Console) -> None:
    """Prints an explanation."""
    for sheet in explain_sheets(explanation):
        print_sheet(sheet, console)
    console.print()
    for line in explain_notes(explanation):
        console.print(f"- {line}", markup=False, highlight=False)


def explain_sheets(explanation: Explanation) -> list[Sheet]:
    """The tables: operations, layers, types, candidates, memory."""
    made = [
        _tallies("operations of a step, on one device", "kind", explanation.kinds, len(explanation.kinds)),
        _tallies("where they are", "layer", explanation.layers, _LAYERS),
        _types(explanation),
    ]
    if explanation.candidates:
        made.append(_candidates(explanation))
        made.append(_decisions(explanation))
    return [*(sheet for sheet in made if sheet.rows), _freed(explanation)]


def _tallies(title: str, column: str, tallies: Sequence[Tally], most: int) -> Sheet:
    written = in_one_unit(tally.bytes for tally in tallies)
    rows = [_tally_row(tally, written(tally.bytes)) for tally in tallies[:most]]
    rest = tallies[most:]
    if rest:
        flops, moved = sum(t.flops for t in rest), sum(t.bytes for t in rest)
        slowest = sum(t.seconds for t in rest)
        rows.append((f"{len(rest)} smaller", str(sum(t.runs for t in rest)), amount(flops), written(moved), "", "",
                     _time(slowest)))  # fmt: skip
    return Sheet(
        title, (column, "runs", "FLOPs", "bytes, each alone", "FLOPs/byte", "bound by", "at peak"), rows
    )


def _tally_row(tally: Tally, moved: str) -> tuple[str, ...]:
    ratio = tally.intensity
    intensity = "" if ratio is None else f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"
    return (
        tally.name, str(tally.runs), amount(tally.flops), moved, intensity, RESOURCES[tally.bound],
        _time(tally.seconds),
    )  # fmt: skip


def _time(value: float) -> str:
    """Seconds; nothing where they are too few to matter."""
    return seconds(value) if value >= 1e-7 else "0"


def _types(explanation: Explanation) -> Sheet:
    rows = [
        (t.path, str(t.runs), ", ".join(t.inputs), ", ".join(t.weights), ", ".join(t.accumulators),
         ", ".join(t.outputs), ", ".join(t.gradients))
        for t in explanation.types[:_TYPES]
    ]  # fmt: skip
    if len(explanation.types) > _TYPES:
        rows.append((f"{len(explanation.types) - _TYPES} more", "", "", "", "", "", ""))
    return Sheet(
        "types of the layers, forward; and of the products of the backward pass",
        ("layer", "runs", "inputs", "weights", "accumulator", "outputs", "backward"),
        rows,
    )


def _candidates(explanation: Explanation) -> Sheet:
    shown, rest = explanation.candidates[:_CANDIDATES], explanation.candidates[_CANDIDATES:]
    rows = [_candidate_row(c) for c in shown]
    if rest:
        runs, gain = sum(c.runs for c in rest), sum(c.gain_seconds for c in rest)
        taken = sum(c.taken for c in rest)
        rows.append((f"{len(rest)} smaller", "", "", str(runs), "", _time(gain), f"{taken} taken"))
    return Sheet(
        f"products and what could run in one kernel with them: over {THRESHOLD:.0%} gain is taken",
        ("product", "pass", "followed by", "runs", "gain", "in a step", "decision"),
        rows,
    )


def _candidate_row(candidate: Judged) -> tuple[str, ...]:
    words = {
        "kernel": "taken: kernel", "xla": "taken: XLA fuses it", "open": "taken: open", "left": "left",
        "unread": "taken: not read", "blocked": "taken: exchanged",
        "gone": "taken: merged",
    }  # fmt: skip
    return (
        candidate.path, candidate.phase, ", ".join(candidate.followed_by), str(candidate.runs),
        f"{candidate.share:.1%}", _time(candidate.gain_seconds), words[candidate.by],
    )  # fmt: skip


def _decisions(explanation: Explanation) -> Sheet:
    rows = [
        (f"{c.path}, {c.phase}", f"{c.product}{_others(c)}, then {', '.join(c.followed_by)}. {c.decision}")
        for c in explanation.candidates
        if c.taken
    ]
    return Sheet("decisions", ("product", "what was found"), rows[:_CANDIDATES])


def _others(candidate: Judged) -> str:
    return f" and {candidate.places - 1} like it" if candidate.places > 1 else ""


def _freed(explanation: Explanation) -> Sheet:
    freed = explanation.freed
    written = in_one_unit(
        [freed.donated, freed.aliased or 0, freed.kept, freed.without_remat, freed.alive, freed.freed]
    )
    aliased = "not compiled" if freed.aliased is None else written(freed.aliased)
    rows = [
        ("arguments given away (donated)", written(freed.donated)),
        ("of it reused for results, by XLA", aliased),
        ("kept for the backward pass", written(freed.kept)),
        ("would be kept without recomputation", written(freed.without_remat)),
        ("computed again and alive at once", written(freed.alive)),
        ("freed by recomputation", written(freed.freed)),
        ("FLOPs of a step to compute it again", amount(freed.recomputed_flops)),
    ]
    return Sheet("memory that is freed, a device and microbatch", ("what", "value"), rows)


def explain_notes(explanation: Explanation) -> list[str]:
    """What is to be said below the tables."""
    lines = list(explanation.notes)
    if explanation.compiled_flops is not None and explanation.compiled_bytes is not None:
        written = in_one_unit([explanation.bytes, explanation.compiled_bytes])
        lines.append(
            f"check: products are {amount(explanation.product_flops)} FLOPs by the jaxpr and "
            f"{amount(explanation.compiled_flops)} by the compiled program; {written(explanation.bytes)} moved one by "
            f"one and {written(explanation.compiled_bytes)} as XLA fused them"
        )
    if explanation.excess:
        shown = ", ".join(f"{e.path} {e.phase} {e.ratio:.2f}x" for e in explanation.excess[:_EXCESS])
        more = sum(e.compiled_flops - e.flops for e in explanation.excess)
        lines.append(
            f"XLA computes {amount(more)} FLOPs more than the step asks for, by computing again on its own account or "
            f"by not cutting over all devices: {shown}{' and others' if len(explanation.excess) > _EXCESS else ''}"
        )
    lines.append(
        "an accumulator is the type that a product asks for, in which parts of it are added; tensor cores add in "
        "fp32 inside whatever it is"
    )
    ridges = ", ".join(f"{value:.0f} in {name}" for name, value in explanation.ridge.items())
    lines.append(f"at peak, memory bounds what has fewer FLOPs a byte than {ridges}")
    open_ = sum(c.gain_seconds for c in explanation.candidates if c.by == "open")
    if explanation.compiled and open_:
        lines.append(f"taken but fused by nobody: {_time(open_)} of a step at most")
    return [*lines, FORMULA]

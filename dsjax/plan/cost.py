"""How long a compiled program takes on a chip: rooflines of its instructions and of its collectives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from dsjax.aot import Collective, Inspection, Target, Work
from dsjax.aot.chips import Chip
from dsjax.aot.walk import Loop, loop_of
from dsjax.aot.work import Works
from dsjax.plan.result import Forecast, Roofline, Traffic

# Every device has its own way out of the node; what goes round a ring uses those of all members there.
_RINGS = ("all-gather", "all-reduce", "reduce-scatter", "collective-broadcast")


@dataclass(frozen=True)
class Reached:
    """The shares of their peaks that large operations reach.

    The defaults are round figures of large bf16 products, of copies and of NCCL's rings on current GPUs;
    `measured.correction` gives those of a kind of device.

    Attributes:
      links: inside a node; network: between nodes.
      by_type: type of `Chip.peak` -> the share of the products that run in it, where it is known.
      step: seconds of whole steps over those that the shares alone predict.
    """

    products: float = 0.75
    memory: float = 0.85
    links: float = 0.85
    network: float = 0.85
    by_type: Mapping[str, float] = field(default_factory=dict)
    step: float = 1.0

    def flops(self, chip: Chip, dtype: str) -> float:
        """FLOP/s that products of a type (see `Chip.unit`) reach on a chip."""
        unit = chip.unit(dtype)
        return chip.flops(unit) * self.by_type.get(unit, self.products)

    def link(self, crosses: bool) -> float:
        """The share of the link inside a node, or of that between nodes."""
        return self.network if crosses else self.links


PEAK = Reached(1.0, 1.0, 1.0, 1.0)


def unit_notes(chip: Chip, dtype: str) -> list[str]:
    """What is to be said of the unit in which a step's products run; `dtype` is the type of most of them."""
    if chip.unit(dtype) != "tf32":
        return []
    return [
        f"products of fp32 run as TF32 (10 bits of fraction), jax's default precision on {chip.name}, and are timed "
        "so; jax_default_matmul_precision=highest makes them exact, and slower"
    ]


def work_seconds(work: Work, target: Target, reached: Reached = PEAK) -> float:
    """The longer of arithmetic and memory traffic."""
    chip = target.chip
    compute = sum(flops / reached.flops(chip, dtype) for dtype, flops in work.flops.items())
    return max(compute, work.bytes / chip.memory.bandwidth / reached.memory)


def link_seconds(
    target: Target, kind: str, wire_bytes: float, members: int, together: int, reached: Reached = PEAK
) -> float:
    """Seconds of one collective alone on its links.

    Args:
      wire_bytes: that a device sends, by the ring's formula.
      members: devices of a group; together: the most of them that one node's link joins.
    """
    if members < 2:
        return 0.0
    chip, crosses = target.chip, together < members
    link = chip.network if crosses else chip.node
    lanes = together if crosses and kind in _RINGS else 1
    bandwidth = min(lanes * link.bandwidth, chip.node.bandwidth) * reached.link(crosses)
    return wire_bytes / bandwidth + math.ceil(math.log2(members)) * link.latency


def wire_seconds(collective: Collective, target: Target, reached: Reached = PEAK) -> float:
    """Seconds that a collective takes each time, alone on its links."""
    return link_seconds(
        target,
        collective.kind,
        collective.wire_bytes,
        collective.group_size,
        _together(collective, target.domain),
        reached,
    )


def _together(collective: Collective, domain: int) -> int:
    """The most members of a group that lie in one node."""
    if not collective.crosses(domain):
        return collective.group_size
    groups = collective.groups
    if isinstance(groups, np.ndarray) and collective.kind != "collective-permute":
        return max(int(np.unique(row // domain, return_counts=True)[1].max()) for row in groups[:1])
    return 1


def traffic(collectives: Iterable[Collective], target: Target) -> tuple[Traffic, ...]:
    """The collectives of a program in groups, those that take longest first."""
    groups: dict[tuple[object, ...], list[Collective]] = {}
    for c in collectives:
        if c.group_size > 1 and c.axes and c.times:
            turns = _turns(c.loops)
            key = (c.kind, c.axes, c.crosses(target.domain), c.dtype, turns, c.every)
            groups.setdefault(key, []).append(c)
    found = [_group(members, target) for members in groups.values()]
    return tuple(sorted(found, key=lambda one: -one.seconds))


def _group(members: list[Collective], target: Target) -> Traffic:
    first, crosses = members[0], members[0].crosses(target.domain)
    return Traffic(
        kind=first.kind,
        axes=first.axes,
        link=(target.chip.network if crosses else target.chip.node).name,
        crosses=crosses,
        dtype=first.dtype,
        sent=sum(c.total_wire_bytes for c in members),
        times=sum(c.times for c in members),
        loop=_turns(first.loops),
        seconds=sum(c.runs * wire_seconds(c, target) for c in members),
        hidden=sum(c.runs * hidden_seconds(c, target) for c in members),
        every=first.every,
    )


def _turns(loops: Iterable[Loop]) -> tuple[int | None, ...]:
    """Turns of loops, outermost first; what is the mean over the turns of an outer loop is told with that."""
    turns: list[Fraction | int | None] = []
    for loop in loops:
        if isinstance(loop.trips, Fraction) and turns and turns[-1] is not None:
            turns[-1] *= loop.trips
        else:
            turns.append(loop.trips)
    return tuple(None if n is None else round(n) for n in turns)


def hidden_seconds(collective: Collective, target: Target, reached: Reached = PEAK) -> float:
    """How much of a collective's time what is issued between its start and its end takes at least."""
    beside = work_seconds(collective.between_work, target, reached) if collective.asynchronous else 0.0
    return min(wire_seconds(collective, target, reached), beside)


def hidden_share(groups: Iterable[Traffic]) -> float | None:
    """Of the time on the wire, the share that computation covers; None where nothing is sent."""
    groups = list(groups)
    seconds = sum(group.seconds for group in groups)
    return sum(group.hidden for group in groups) / seconds if seconds else None


def roofline(work: Work, groups: Iterable[Traffic], target: Target) -> Roofline:
    """What each resource takes at its peak."""
    groups = list(groups)
    return Roofline(
        compute=sum(flops / target.chip.flops(dtype) for dtype, flops in work.flops.items()),
        memory=work.bytes / target.chip.memory.bandwidth,
        node=sum(group.seconds for group in groups if not group.crosses),
        network=sum(group.seconds for group in groups if group.crosses),
    )


def step_forecast(inspection: Inspection, target: Target, reached: Reached | None = None) -> Forecast:
    """The predicted time of one run of a program (`result.FORMULA`)."""
    reached = reached or Reached()
    compute = compute_seconds(inspection, target, reached)
    exposed = sum(exposed_seconds(c, target, reached) for c in inspection.collectives)
    return corrected(max(compute + exposed, *link_times(inspection, target, reached)), compute, reached)


def compute_seconds(inspection: Inspection, target: Target, reached: Reached) -> float:
    """Seconds of one run of a program without its collectives."""
    return _Seconds(inspection, target, reached).of(inspection.module.entry.name)


def exposed_seconds(collective: Collective, target: Target, reached: Reached) -> float:
    """Seconds that a collective is waited for in a step."""
    waited = wire_seconds(collective, target, reached) - hidden_seconds(collective, target, reached)
    return collective.runs * waited


def link_times(inspection: Inspection, target: Target, reached: Reached) -> tuple[float, float]:
    """Seconds of a step in which the links inside a node and between nodes are busy."""
    busy = {False: 0.0, True: 0.0}
    for c in inspection.collectives:
        busy[c.crosses(target.domain)] += c.runs * wire_seconds(c, target, reached)
    return busy[False], busy[True]


def corrected(step: float, compute: float, reached: Reached, idle: float = 0.0) -> Forecast:
    """The forecast of a step from the model's seconds, by what whole steps took.

    Args:
      compute, idle: parts of `step`; the rest of it waits for links.
    """
    return Forecast(
        step_seconds=step * reached.step,
        compute_seconds=compute * reached.step,
        exposed_seconds=max(0.0, step - compute - idle) * reached.step,
        idle_seconds=idle * reached.step,
        ratio=reached.step,
    )


class _Seconds:
    """Compute time of a module's computations, each worked out once."""

    def __init__(self, inspection: Inspection, target: Target, reached: Reached):
        self._module, self._turns = inspection.module, inspection.turns
        self._works = Works(inspection.module, inspection.turns)
        self._target, self._reached, self._rare = target, reached, inspection.rare
        self._known: dict[str, float] = {}

    def of(self, name: str) -> float:
        """One run of a computation: its instructions one after another, the longest branch, all turns of loops."""
        if name not in self._known:
            self._known[name] = sum(
                self._instruction(name, index)
                for index in range(len(self._module.computations[name].instructions))
            )
        return self._known[name]

    def _instruction(self, name: str, index: int) -> float:
        computation = self._module.computations[name]
        instruction = computation.instructions[index]
        if instruction.opcode == "while":
            trips = loop_of(self._module, computation, instruction, self._turns).trips
            return self.of(instruction.called["body"][0]) * float(1 if trips is None else trips)
        if instruction.opcode == "conditional":
            longest = max(self.of(branch) for branch in instruction.branches)
            return longest / self._rare.get(instruction.name, 1)
        if instruction.opcode in ("call", "async-start"):
            called = instruction.called.get("calls") or instruction.called.get("to_apply") or []
            return sum(self.of(inner) for inner in called)
        return work_seconds(self._works.of(computation, instruction), self._target, self._reached)

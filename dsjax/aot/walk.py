"""Visits every instruction of a program where it runs: in which loops, branches and wrappers, how often."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from dsjax.aot.hlo import Computation, Instruction, Module, Shape
from dsjax.mesh.turns import usual_turns

# No loop over layers, microbatches or blocks comes near this many turns.
_MOST_TURNS = 10_000


@dataclass(frozen=True)
class Loop:
    """A `while`.

    Attributes:
      trips: how often its body runs; None where the program does not say; a fraction where that is a mean. Where only
        the data tell, what it is named to be usually (`dsjax.mesh.turns`).
      op_name: the jax operation that it came from.
    """

    name: str
    trips: int | Fraction | None
    op_name: str


# How often a loop's body runs each time the loop is come to, given what the program says of it.
Turns = Callable[[Loop], int | Fraction | None]


def as_it_says(loop: Loop) -> int | Fraction | None:
    """The turns that the program itself tells."""
    return loop.trips


@dataclass(frozen=True)
class Branch:
    """One branch of a `conditional`, by its number."""

    conditional: str
    index: int


@dataclass(frozen=True, eq=False)
class Site:
    """An instruction where it runs; one that is called from two places has two sites.

    Attributes:
      loops, branches: those around it, outermost first.
      wrappers: fusions, calls and asynchronous starts around it, with their computations, outermost first.
    """

    instruction: Instruction
    computation: Computation
    loops: tuple[Loop, ...] = ()
    branches: tuple[Branch, ...] = ()
    wrappers: tuple[Site, ...] = field(default=(), repr=False)

    @property
    def times(self) -> int:
        """How often it runs in one run of the program; a loop of unknown length counts once, a branch as taken."""
        times = Fraction(1)
        for loop in self.loops:
            times *= 1 if loop.trips is None else loop.trips
        return round(times)


def walk(module: Module, turns: Turns = as_it_says) -> Iterator[Site]:
    """All instructions that run, each at every place it runs at.

    What a reduction or a sort applies to its elements is not visited.

    Args:
      turns: of loops, where more is known of them than the program tells.
    """
    yield from _visit(module, Site(module.entry.root, module.entry), turns)


def _visit(module: Module, around: Site, turns: Turns) -> Iterator[Site]:
    """The instructions of `around.computation`, in the loops, branches and wrappers of `around`."""
    computation, outer = around.computation, (around.loops, around.branches, around.wrappers)
    for instruction in computation.instructions:
        site = Site(instruction, computation, *outer)
        yield site
        for inner in _inside(module, site, turns):
            yield from _visit(module, inner, turns)


def _inside(module: Module, site: Site, turns: Turns) -> Iterator[Site]:
    instruction, called = site.instruction, site.instruction.called
    if instruction.opcode == "while":
        loop = loop_of(module, site.computation, instruction, turns)
        for name in (called["condition"][0], called["body"][0]):
            body = module.computations[name]
            yield Site(body.root, body, (*site.loops, loop), site.branches, site.wrappers)
    elif instruction.opcode == "conditional":
        for index, name in enumerate(instruction.branches):
            branch = module.computations[name]
            within = (*site.branches, Branch(instruction.name, index))
            yield Site(branch.root, branch, site.loops, within, site.wrappers)
    elif instruction.opcode in ("call", "fusion", "async-start", "custom-call"):
        names = [n for key in ("calls", "to_apply", "called_computations") for n in called.get(key, [])]
        for name in names:
            if name in module.computations:
                inner = module.computations[name]
                yield Site(inner.root, inner, site.loops, site.branches, (*site.wrappers, site))


# ---- trip counts -----------------------------------------------------------------------------


def loop_of(
    module: Module, computation: Computation, instruction: Instruction, turns: Turns = as_it_says
) -> Loop:
    """A `while` with its turns; what the program says is counted once a module."""
    if instruction.name not in module.trips:
        module.trips[instruction.name] = trip_count(module, computation, instruction)
    loop = Loop(instruction.name, module.trips[instruction.name], instruction.op_name)
    return replace(loop, trips=turns(loop))


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often a loop's body runs: what XLA found, else by counting as the program counts.

    Where that depends on data, or is more than ten thousand: what the loop says of itself (`mesh.turns`), or None.
    """
    counted = _counted(module, computation, loop)
    return usual_turns(loop.op_name) if counted is None else counted


def _counted(module: Module, computation: Computation, loop: Instruction) -> int | None:
    known = loop.backend_config.get("known_trip_count", {}).get("n")
    if known is not None:
        return int(known)
    condition = module.computations[loop.called["condition"][0]]
    body = module.computations[loop.called["body"][0]]
    start = _Scalars(module, computation, {})
    state = {i: start.element(loop.operands[0], i) for i in range(_width(loop))}
    for turn in range(_MOST_TURNS):
        goes_on = _Scalars(module, condition, {0: state}).number(condition.root.name)
        if goes_on is None:
            return None
        if not goes_on:
            return turn
        numbers = _Scalars(module, body, {0: state})
        needed = [i for i, value in state.items() if value is not None]
        state = {i: numbers.element(body.root.name, i) for i in needed}
    return None


def _width(loop: Instruction) -> int:
    return 1 if isinstance(loop.shape, Shape) else len(loop.shape)


class _Scalars:
    """Whole numbers of a computation, as far as they follow from constants and given arguments."""

    def __init__(
        self,
        module: Module,
        computation: Computation,
        arguments: Mapping[int, Mapping[int, int | None] | int | None],
    ):
        self._module, self._computation, self._arguments = module, computation, arguments
        self._found: dict[str, int | None] = {}

    def number(self, name: str) -> int | None:
        """The value of a scalar, None where it is not known."""
        if name not in self._found:
            self._found[name] = self._number(self._computation.by_name[name])
        return self._found[name]

    def element(self, name: str, index: int) -> int | None:
        """An element of a tuple."""
        instruction = self._computation.by_name[name]
        if instruction.opcode == "tuple":
            return self.number(instruction.operands[index])
        if instruction.opcode == "parameter":
            given = self._arguments.get(int(instruction.text))
            return given.get(index) if isinstance(given, Mapping) else None
        if instruction.opcode in ("copy", "optimization-barrier"):
            return self.element(instruction.operands[0], index)
        return None

    def _number(self, instruction: Instruction) -> int | None:
        opcode = instruction.opcode
        if (
            not isinstance(instruction.shape, Shape)
            or instruction.shape.dims
            or instruction.shape.dtype[0] not in "sup"
        ):
            return None
        if opcode == "constant":
            text = instruction.text.strip()
            known = {"true": 1, "false": 0}.get(text)
            return int(text) if known is None and re.fullmatch(r"-?\d+", text) else known
        if opcode == "parameter":
            given = self._arguments.get(int(instruction.text))
            return given if isinstance(given, int) else None
        if opcode == "get-tuple-element":
            return self.element(instruction.operands[0], int(instruction.attributes["index"]))
        if opcode in ("fusion", "call"):
            called = instruction.called.get("calls") or instruction.called["to_apply"]
            inner = self._module.computations[called[0]]
            given = {i: self.number(operand) for i, operand in enumerate(instruction.operands)}
            return _Scalars(self._module, inner, given).number(inner.root.name)
        if opcode in ("add", "subtract", "multiply", "compare", "and", "or", "copy", "convert", "bitcast"):
            values = [self.number(operand) for operand in instruction.operands]
            known_values = [v for v in values if v is not None]
            return _computed(instruction, known_values) if len(known_values) == len(values) else None
        return None


def _computed(instruction: Instruction, values: list[int]) -> int | None:
    opcode, a, b = instruction.opcode, values[0], values[-1]
    if opcode == "compare":
        outcomes = {"LT": a < b, "LE": a <= b, "GT": a > b, "GE": a >= b, "EQ": a == b, "NE": a != b}
        return int(outcomes[instruction.attributes["direction"]])
    return {"add": a + b, "subtract": a - b, "multiply": a * b, "and": a & b, "or": a | b}.get(opcode, a)

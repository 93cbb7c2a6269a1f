"""Reads optimised HLO text into computations, instructions and shapes.

Only what the other modules ask for is understood; layouts, comments and metadata may say anything.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32,
    "u32": 32, "s64": 64, "u64": 64, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
    "token": 0, "opaque": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """An array's element type (as HLO writes it) and dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes of the array; types of less than a byte are packed."""
        return -(-self.size * bits(self.dtype) // 8)


ShapeTree = Shape | tuple[Any, ...]


def bits(dtype: str) -> int:
    """Bits of an element, from its HLO name (`f8e4m3fn`, `f4e2m1fn` included)."""
    if dtype in _BITS:
        return _BITS[dtype]
    narrow = re.match(r"f(\d+)e\d+m\d+", dtype)
    if narrow is None:
        raise ValueError(f"HLO element type {dtype} is not known")
    return int(narrow.group(1))


def flat(shape: ShapeTree) -> list[Shape]:
    """The arrays of a shape, in order."""
    if isinstance(shape, Shape):
        return [shape]
    return [array for part in shape for array in flat(part)]


def bytes_of(shape: ShapeTree) -> int:
    """Bytes of all arrays of a shape."""
    return sum(array.bytes for array in flat(shape))


@dataclass(eq=False)
class Instruction:
    """One line of a computation.

    Attributes:
      operands: names of instructions of the same computation.
      text: what stands between the parentheses (a constant's value, a parameter's number).
      attributes: name -> text, as printed.
      index: its place in the computation, which is the schedule where the module is scheduled.
    """

    name: str
    opcode: str
    shape: ShapeTree
    operands: tuple[str, ...]
    text: str
    attributes: dict[str, str]
    index: int
    computation: str

    @property
    def op_name(self) -> str:
        """The path of the jax operation that it came from; empty where XLA made it."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes.get("metadata", ""))
        return found.group(1) if found else ""

    @cached_property
    def backend_config(self) -> dict[str, Any]:
        """The backend's own settings; empty where there are none in JSON."""
        text = self.attributes.get("backend_config", "")
        try:
            value = json.loads(text) if text else {}
            value = json.loads(value) if isinstance(value, str) and value else value
        except json.JSONDecodeError:
            return {}
        return value if isinstance(value, dict) else {}

    @cached_property
    def called(self) -> dict[str, list[str]]:
        """Computations that it names, by the attribute that names them."""
        found: dict[str, list[str]] = {}
        for key in ("body", "condition", "calls", "to_apply", "true_computation", "false_computation",
                    "branch_computations", "called_computations"):  # fmt: skip
            if key in self.attributes:
                found[key] = re.findall(r"%?([\w.\-]+)", self.attributes[key])
        return found

    @property
    def branches(self) -> list[str]:
        """A conditional's computations, in the order of its operands after the first."""
        called = self.called
        return called.get("branch_computations") or [
            called["true_computation"][0], called["false_computation"][0]
        ]  # fmt: skip


@dataclass(eq=False)
class Computation:
    """A named list of instructions; the last one marked ROOT is its result."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    root_name: str = ""

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instructions by name."""
        return {i.name: i for i in self.instructions}

    @property
    def root(self) -> Instruction:
        """The result."""
        return self.by_name[self.root_name] if self.root_name else self.instructions[-1]

    @cached_property
    def parameters(self) -> list[Instruction]:
        """Parameters in their order."""
        found = [i for i in self.instructions if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(i.text))

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Who reads an instruction."""
        users: dict[str, list[Instruction]] = {i.name: [] for i in self.instructions}
        for instruction in self.instructions:
            for operand in instruction.operands:
                users[operand].append(instruction)
        return users

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that it reads."""
        return [self.by_name[name] for name in instruction.operands]


@dataclass(eq=False)
class Module:
    """A whole program: one device's share of it.

    Attributes:
      scheduled: the order of instructions is the order in which they are issued.
      partitions, replicas: how many devices run it (one of the two is 1 in what jax compiles).
      trips: turns of its loops as far as they were counted, by name.
    """

    computations: dict[str, Computation]
    entry: Computation
    scheduled: bool
    partitions: int
    replicas: int
    trips: dict[str, int | None] = field(default_factory=dict, repr=False)

    @property
    def devices(self) -> int:
        """How many devices run it."""
        return self.partitions * self.replicas

    def __iter__(self) -> Iterator[Computation]:
        return iter(self.computations.values())


_COMMENT = re.compile(r"/\*.*?\*/")
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-$<>]+)[\s({].*\{\s*$")
_START = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-$<>]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\s*([a-z]\w*)\[([^\]]*)\]")
_MARKS = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]')


def parse(text: str) -> Module:
    """Parses a module as `compiled.as_text()` prints it.

    Raises:
      ValueError: the text holds no entry computation.
    """
    header = text[: text.index("\n")] if "\n" in text else text
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        if line.startswith("}"):
            current = None
        elif current is None:
            found = None if line.startswith("HloModule") else _HEADER.match(line)
            if found:
                current = computations[found.group(2)] = Computation(found.group(2))
                entry = current if found.group(1) else entry
        elif started := _START.match(line):
            instruction = _instruction(line, started, current)
            current.instructions.append(instruction)
            if started.group(1):
                current.root_name = instruction.name
    if entry is None:
        raise ValueError("the text holds no ENTRY computation; it is not a module of HLO")
    return Module(
        computations, entry, "is_scheduled=true" in header,
        _header_number(header, "num_partitions"), _header_number(header, "replica_count"),
    )  # fmt: skip


def _header_number(header: str, name: str) -> int:
    found = re.search(rf"\b{name}=(\d+)", header)
    return int(found.group(1)) if found else 1


def _instruction(line: str, started: re.Match[str], computation: Computation) -> Instruction:
    line = _COMMENT.sub("", line)
    shape, place = _shape(line, started.end())
    opcode = _OPCODE.match(line, place)
    if opcode is None:
        raise ValueError(f"HLO line not understood: {line.strip()[:160]}")
    inside, end = _balanced(line, opcode.end())
    attributes: dict[str, str] = {}
    for part in _split(line[end:]):
        key, equals, value = part.partition("=")
        if key.strip() == "device_ids":
            # The order of a mesh's devices goes with the groups over it, the attribute before.
            attributes["replica_groups"] = f"{attributes.get('replica_groups', '')}, {part.strip()}"
        elif equals:
            attributes[key.strip()] = value.strip()
    plain = opcode.group(1) in ("constant", "parameter", "iota", "partition-id", "replica-id")
    operands = () if plain else tuple(_operand(part) for part in _split(inside) if part.strip())
    return Instruction(
        started.group(2), opcode.group(1), shape, operands, inside, attributes,
        len(computation.instructions), computation.name,
    )  # fmt: skip


def _operand(text: str) -> str:
    # Some printers put the type before the name.
    return text.split()[-1].lstrip("%")


def _balanced(text: str, start: int) -> tuple[str, int]:
    """What stands up to the bracket that closes one opened just before `start`, and the place after it."""
    depth = 1
    for mark in _MARKS.finditer(text, start):
        token = mark.group()
        if token in "([{":
            depth += 1
        elif token in ")]}":
            depth -= 1
            if depth == 0:
                return text[start : mark.start()], mark.end()
    raise ValueError(f"HLO line with a bracket that does not close: {text.strip()[:160]}")


def _split(text: str) -> list[str]:
    """Cuts at the commas outside brackets and quotes."""
    parts, depth, last = [], 0, 0
    for mark in _MARKS.finditer(text):
        token = mark.group()
        if token in "([{":
            depth += 1
        elif token in ")]}":
            depth -= 1
        elif token == "," and depth == 0:
            parts.append(text[last : mark.start()])
            last = mark.end()
    return [*parts, text[last:]]


def _shape(text: str, place: int) -> tuple[ShapeTree, int]:
    """The shape that starts at a place, and the place after it and its layout."""
    while text[place] == " ":
        place += 1
    if text[place] == "(":
        inside, end = _balanced(text, place + 1)
        return tuple(_shape(part, 0)[0] for part in _split(inside) if part.strip()), end
    found = _ARRAY.match(text, place)
    if found is None:
        raise ValueError(f"HLO shape not understood: {text[place : place + 80]}")
    dims = tuple(int(d.strip().lstrip("<=")) for d in found.group(2).split(",") if d.strip())
    end = found.end()
    if end < len(text) and text[end] == "{":
        _, end = _balanced(text, end + 1)
    return Shape(found.group(1), dims), end

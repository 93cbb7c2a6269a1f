"""Along which mesh axes a value may differ between devices.

Every instruction of one device's program is run once over descriptions: the axes along which its
value may differ, and for scalars made from the device's own number, that value on every device.
What is said to be the same is the same; what may differ need not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsjax.aot.groups import Coordinates, members_of
from dsjax.aot.hlo import Computation, Instruction, Module, Shape, ShapeTree, bits

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
    "collective-broadcast", "ragged-all-to-all",
)  # fmt: skip
_AGREE = ("all-gather", "all-reduce", "collective-broadcast")


@dataclass(frozen=True, eq=False)
class Value:
    """What is known of a value.

    Attributes:
      axes: mesh axes along which it may differ.
      known: its value on every device, [devices], where it is one number (or many alike).
      table: its elements, where it is a vector that is the same everywhere.
    """

    axes: frozenset[str]
    known: np.ndarray | None = None
    table: np.ndarray | None = None


Tree = Value | tuple[Any, ...]

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum,
    "minimum": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "shift-left": np.left_shift, "shift-right-logical": np.right_shift,
    "divide": lambda a, b: (a - np.fmod(a, np.where(b == 0, 1, b))) // np.where(b == 0, 1, b),
    "remainder": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)),
}  # fmt: skip
_UNARY: dict[str, Callable[[Any], Any]] = {"negate": np.negative, "abs": np.abs, "sign": np.sign}
_COMPARE = {
    "EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater,
    "GE": np.greater_equal,
}  # fmt: skip
# They hand a number on, be it one or many alike.
_SAME = ("bitcast", "copy", "reshape", "broadcast", "convert", "transpose", "slice", "optimization-barrier")


class Uniformity:
    """Runs a module over descriptions and keeps what decides its conditionals and loops.

    Args:
      arguments: the axes along which each of the program's arguments is cut; by default as the text says.

    Attributes:
      decided_over: name of a conditional or loop -> axes along which what decides it may differ.
    """

    def __init__(
        self, module: Module, coordinates: Coordinates, arguments: Sequence[frozenset[str]] | None = None
    ):
        self._module, self._coordinates = module, coordinates
        self._all = frozenset(name for name, size in coordinates.shape.items() if size > 1)
        self.decided_over: dict[str, frozenset[str]] = {}
        parameters = module.entry.parameters
        if arguments is None or len(arguments) != len(parameters):
            arguments = [self._sharded_over(p.attributes.get("sharding", "")) for p in parameters]
        self._run(
            module.entry, [_like(p.shape, Value(a)) for p, a in zip(parameters, arguments, strict=True)]
        )

    def _sharded_over(self, sharding: str) -> frozenset[str]:
        """Axes over which an argument is cut, from `{devices=[4,1,2]<=[8] last_tile_dim_replicate}`."""
        if sharding == "{replicated}" or self._module.devices == 1:
            return frozenset()
        found = re.match(r"\{devices=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?(.*)\}$", sharding)
        if found is None:
            return self._all
        tiles, dims = ([int(n) for n in found.group(i).split(",")] for i in (1, 2))
        order = [int(n) for n in found.group(3).split(",")] if found.group(3) else None
        ids = np.arange(int(np.prod(dims))).reshape(dims)
        ids = (ids.transpose(order) if order else ids).reshape(tiles)
        if ids.size != self._module.devices or "last_tile_dims" in found.group(4):
            return self._all
        replicated = "last_tile_dim_replicate" in found.group(4)
        tile = np.arange(ids.size).reshape(tiles) // (tiles[-1] if replicated else 1)
        values = np.empty(ids.size, int)
        values[ids.reshape(-1)] = tile.reshape(-1)
        return self._coordinates.axes_along(values)

    # ---- running ---------------------------------------------------------------------------------

    def _run(self, computation: Computation, arguments: Sequence[Tree]) -> Tree:
        values: dict[str, Tree] = {}
        for instruction in computation.instructions:
            if instruction.opcode == "parameter":
                values[instruction.name] = arguments[int(instruction.text)]
            else:
                operands = [values[name] for name in instruction.operands]
                values[instruction.name] = self._step(instruction, operands)
        return values[computation.root.name]

    def _step(self, instruction: Instruction, operands: list[Tree]) -> Tree:
        opcode = instruction.opcode
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            whole = operands[0]
            index = int(instruction.attributes["index"])
            return whole[index] if isinstance(whole, tuple) else _like(instruction.shape, whole)
        if opcode == "while":
            return self._loop(instruction, operands[0])
        if opcode == "conditional":
            return self._choice(instruction, operands)
        called = instruction.called
        if opcode in ("call", "fusion", "async-start"):
            name = (called.get("calls") or called.get("to_apply") or [""])[0]
            return self._run(self._module.computations[name], operands)
        if opcode.endswith(("-done", "-update")):
            got = operands[0] if operands else Value(self._all)
            return _like(instruction.shape, got) if isinstance(got, Value) else got
        value = self._plain(instruction, operands)
        # What a start gives is its operands, results and more; the end of it gives the results.
        return value if opcode.endswith("-start") else _like(instruction.shape, value)

    def _loop(self, instruction: Instruction, carried: Tree) -> Tree:
        called = instruction.called
        body = self._module.computations[called["body"][0]]
        condition = self._module.computations[called["condition"][0]]
        while True:
            after = _joined(carried, self._run(body, [carried]))
            if _alike(carried, after):
                break
            carried = after
        decided = _axes(self._run(condition, [carried]))
        self._note(instruction, decided)
        return _widened(carried, decided)

    def _choice(self, instruction: Instruction, operands: list[Tree]) -> Tree:
        decided = _axes(operands[0])
        self._note(instruction, decided)
        results = [
            self._run(self._module.computations[name], [operand])
            for name, operand in zip(instruction.branches, operands[1:], strict=True)
        ]
        joined = results[0]
        for result in results[1:]:
            joined = _joined(joined, result)
        return _widened(joined, decided)

    def _note(self, instruction: Instruction, axes: frozenset[str]) -> None:
        self.decided_over[instruction.name] = self.decided_over.get(instruction.name, frozenset()) | axes

    def _plain(self, instruction: Instruction, operands: list[Tree]) -> Value:
        opcode = instruction.opcode
        kind = opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            return self._collective(instruction, kind, operands)
        if opcode == "partition-id":
            return self._of(np.arange(self._module.devices) % self._module.partitions)
        if opcode == "replica-id":
            return self._of(np.arange(self._module.devices) // self._module.partitions)
        if opcode == "constant":
            return self._constant(instruction)
        if opcode in ("infeed", "recv", "outfeed"):
            return Value(self._all)
        known = self._known(instruction, operands)
        if known is not None and isinstance(instruction.shape, Shape):
            return self._of(_wrapped(known, instruction.shape.dtype))
        return Value(frozenset().union(*(_axes(operand) for operand in operands)))

    def _of(self, known: np.ndarray) -> Value:
        if known.size != self._coordinates.size:
            return Value(self._all)
        return Value(self._coordinates.axes_along(known), known)

    def _constant(self, instruction: Instruction) -> Value:
        words = re.findall(r"-?\d+(?![\w.])|true|false", instruction.text)
        integral = isinstance(instruction.shape, Shape) and instruction.shape.dtype[0] in "sup"
        if not integral or not words or len(words) != instruction.shape.size:  # type: ignore[union-attr]
            return Value(frozenset())
        numbers = np.array([{"true": 1, "false": 0}.get(w) if w[0] in "tf" else int(w) for w in words])
        known = np.full(self._module.devices, numbers[0]) if len(numbers) == 1 else None
        return Value(frozenset(), known, numbers)

    def _collective(self, instruction: Instruction, kind: str, operands: list[Tree]) -> Value:
        axes = frozenset().union(*(_axes(operand) for operand in operands))
        groups = members_of(instruction, kind, self._module)
        try:
            over = frozenset(self._coordinates.axes_of(groups))
        except IndexError:
            return Value(self._all)
        if kind not in _AGREE:
            return Value(axes | over)
        return Value(axes - over if self._coordinates.whole(groups) else axes | over)

    def _known(self, instruction: Instruction, operands: list[Tree]) -> np.ndarray | None:
        """The number on every device, where all that it is made of is known."""
        values = [o for o in operands if isinstance(o, Value)]
        known = [v.known for v in values if v.known is not None]
        opcode = instruction.opcode
        if (
            opcode == "dynamic-slice"
            and values
            and values[0].table is not None
            and len(known) == len(values) - 1
        ):
            table, one = values[0].table, isinstance(instruction.shape, Shape) and instruction.shape.size == 1
            return table[np.clip(known[-1], 0, len(table) - 1)] if one and len(known) == 1 else None
        if not known or len(known) != len(operands):
            return None
        if opcode in _BINARY:
            return _BINARY[opcode](*known)
        if opcode in _UNARY:
            return _UNARY[opcode](known[0])
        if opcode == "compare":
            compare = _COMPARE[instruction.attributes["direction"]]
            return compare(*known).astype(int)
        if opcode == "clamp":
            return np.clip(known[1], known[0], known[2])
        if opcode == "select":
            return np.where(known[0] != 0, known[1], known[2])
        if opcode == "not":
            return 1 - known[0] if _is_pred(instruction.shape) else None
        if opcode == "convert" and _is_pred(instruction.shape):
            return (known[0] != 0).astype(int)
        return known[0] if opcode in _SAME else None


def _wrapped(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """Whole numbers as a type of so many bits holds them."""
    if dtype[0] not in "su":
        return numbers
    width = bits(dtype)
    kept = numbers.astype(np.int64) & ((1 << width) - 1) if width < 64 else numbers.astype(np.int64)
    return (
        np.where(kept >> (width - 1) & 1, kept - (1 << width), kept)
        if dtype[0] == "s" and width < 64
        else kept
    )


def _is_pred(shape: ShapeTree) -> bool:
    return isinstance(shape, Shape) and shape.dtype == "pred"


def _axes(tree: Tree) -> frozenset[str]:
    if isinstance(tree, Value):
        return tree.axes
    return frozenset().union(*(_axes(part) for part in tree))


def _like(shape: ShapeTree, value: Value) -> Tree:
    return value if isinstance(shape, Shape) else tuple(_like(part, value) for part in shape)


def _joined(a: Tree, b: Tree) -> Tree:
    if isinstance(a, Value) and isinstance(b, Value):
        same = a.known is not None and b.known is not None and np.array_equal(a.known, b.known)
        return a if same else Value(a.axes | b.axes)
    if isinstance(a, Value) or isinstance(b, Value):
        return Value(_axes(a) | _axes(b))
    return tuple(_joined(x, y) for x, y in zip(a, b, strict=True))


def _alike(a: Tree, b: Tree) -> bool:
    if isinstance(a, Value) and isinstance(b, Value):
        return a.axes == b.axes and (a.known is None) == (b.known is None)
    if isinstance(a, Value) or isinstance(b, Value):
        return False
    return all(_alike(x, y) for x, y in zip(a, b, strict=True))


def _widened(tree: Tree, axes: frozenset[str]) -> Tree:
    """What a decision that differs along axes has touched."""
    if not axes:
        return tree
    if isinstance(tree, Value):
        return Value(tree.axes | axes)
    return tuple(_widened(part, axes) for part in tree)

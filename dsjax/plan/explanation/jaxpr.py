"""Phase one of the analysis: a walk over the jaxpr of a step, before anything is compiled or run.

Every operation is counted where it runs: through scan (times its length), cond (its longest branch),
remat, custom derivatives, nested jit and shard_map.  FLOPs and bytes are those of one device.  The shapes
of a jaxpr are those of the whole mesh, and inside a shard_map those of one device.  What part of an array a
device holds is known for arguments, after a sharding constraint and inside a shard_map; everything else, and
every product's work, is taken as cut evenly over all devices.

The walk numbers the operations and writes each number into the names of a copy of the jaxpr
(`Step.tagged`); compiled, these names say which of them ended in which kernel (`TAG`).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jax.lax import Precision
from jax.sharding import NamedSharding

from dsjax.mesh.layout import axes_of_entry
from dsjax.plan.explanation.operations import (
    ATTENTION,
    CAST,
    COLLECTIVE,
    ELEMENTWISE,
    FREE,
    INDEXING,
    LAYOUT,
    PRODUCTS,
    REDUCTION,
    Array,
    array_of,
    bytes_of,
    flops_of,
    kind_of,
    short,
)
from dsjax.plan.explanation.places import Frames, Places
from dsjax.plan.explanation.turns import turns, whole

TAG = re.compile(r"\bdsjaxop(\d+)\b")
_LITERAL = Array("token", ())
# Of the primitives with a jaxpr inside, these are one operation.
_WHOLE = ("pallas_call", "custom_partitioning", "scatter", "reduce", "sort", "argm", "cum", "select_and")
_CHECKPOINTS = ("remat", "checkpoint")
# What is still a parameter after it: cast, cut, gathered, turned.
_PASSES_A_LABEL = (FREE, CAST, LAYOUT, COLLECTIVE)


@dataclass(frozen=True)
class Region:
    """A part of the program with values of its own: the whole, a loop's body, a branch, a shard_map.

    Attributes:
      times: how often it runs within the region around it (`parent`, None for the whole).
      phase: of the operation whose body it is.
      copies: over how many devices its shapes are cut already.
    """

    parent: int | None
    times: int
    phase: str
    copies: int


@dataclass
class Value:
    """An array that an operation makes or a region gets.

    Attributes:
      producer: the operation; None for what a region gets or a loop returns.
      source: the value around the region that it is (or is a slice of).
      label: the argument that it is, cast, cut or gathered; empty for what is computed.
      phase: in which it is made; empty for arguments.
      share: of its elements, what a device holds; None where only the compiler will know.
      uses: (number of the operation, its phase); the number is None where it leaves its region.
      again: for what is computed again in the backward pass, the call of `jax.checkpoint` that it is in, and that
        call's region.
    """

    array: Array
    region: int
    producer: int | None = None
    source: int | None = None
    label: str = ""
    stored: str = ""
    phase: str = ""
    share: float | None = None
    uses: list[tuple[int | None, str]] = field(default_factory=list)
    again: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation of the program at one place.

    Attributes:
      kind: as in `operations`; path: of the layer that it is in; phase: forward, recomputed, backward, other.
      times: how often it runs in a step.
      flops, read, written: of one device, each time; bytes as `operations.bytes_of` counts them.
      inputs, outputs: numbers of values; None for a constant.
      weight: the argument that an operand is, and its element type there; empty for neither.
      accumulator: the type in which a product is asked to add (`preferred_element_type`, else its result's).
    """

    number: int
    primitive: str
    kind: str
    path: str
    phase: str
    times: int
    region: int
    flops: float
    read: float
    written: float
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    weight: str = ""
    stored: str = ""
    weight_index: int | None = None
    accumulator: str = ""
    params: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def source_of(self, value: int) -> int | None:
        """Of an operation that renames or turns its operands, the one that a result is; None for a constant."""
        if len(self.inputs) == len(self.outputs):
            return self.inputs[self.outputs.index(value)]
        return self.inputs[0] if self.inputs else None

    @property
    def bytes(self) -> float:
        """Read and written, each time."""
        return self.read + self.written

    @property
    def dtype(self) -> str:
        """Element type of what is multiplied, or of the widest operand."""
        arrays = [a for a in self.operands if a.dtype != "token"] or list(self.results)
        return max(arrays, key=lambda a: a.bytes).dtype if arrays else "f32"

    @property
    def unit(self) -> str:
        """The type that a product asks a chip for (`Chip.unit`): of f32, exact fp32 where it wants that precision."""
        wanted = self.params.get("precision")
        exact = wanted == Precision.HIGHEST or (isinstance(wanted, tuple) and Precision.HIGHEST in wanted)
        return "fp32" if exact and self.dtype == "f32" else self.dtype


@dataclass(eq=False)
class Step:
    """A walked program.

    Attributes:
      operations: in the order of the program, those of every branch that counts.
      values: by number; regions: by number, the whole program first.
      devices: of the mesh.
      unknown_loops: loops whose turns depend on data; each counts as one.
      tagged: the closed jaxpr with the numbers of operations in its names.
    """

    operations: list[Operation]
    values: list[Value]
    regions: list[Region]
    devices: int
    unknown_loops: int
    tagged: Any = field(repr=False)

    @cached_property
    def producers(self) -> dict[int, Operation]:
        """Operations by number."""
        return {o.number: o for o in self.operations}

    @property
    def product_flops(self) -> float:
        """FLOPs of matrix products, convolutions and attention of a step, on one device."""
        return sum(o.flops * o.times for o in self.operations if o.kind in (*PRODUCTS, ATTENTION))

    def bytes_of(self, number: int) -> float:
        """Bytes of a value on one device."""
        value = self.values[number]
        return value.array.bytes * held(value, self.regions, self.devices)


def held(value: Value, regions: Sequence[Region], devices: int) -> float:
    """The part of a value's array that one device holds."""
    return regions[value.region].copies / devices if value.share is None else value.share


def walk(closed: Any, devices: int, names: Sequence[str] = (), shares: Sequence[float | None] = ()) -> Step:
    """Walks a step.

    Args:
      closed: its closed jaxpr.
      devices: of the mesh that it runs on.
      names: of its arguments, in order (`0/params/layers/mlp/kernel`); shares: of each, what a device holds.
    """
    return _Walk(devices).run(closed, names, shares)


class _Walk:
    def __init__(self, devices: int):
        self._devices = devices
        self._values: list[Value] = []
        self._regions: list[Region] = []
        self._operations: list[Operation] = []
        self._places = Places()
        # Of the equation that is walked: where it stands, and the checkpoint around it (see `Value.again`).
        self._frames: Frames = ()
        self._again: tuple[int, int] | None = None
        self._next = 0
        self._unknown = 0
        self._numbers: dict[Any, int] = {}

    def run(self, closed: Any, names: Sequence[str], shares: Sequence[float | None]) -> Step:
        self._regions.append(Region(None, 1, "", 1))
        env: dict[Any, int] = {}
        for index, var in enumerate(closed.jaxpr.invars):
            array = array_of(var.aval)
            label = names[index] if index < len(names) and array.dtype[0] in "bf" else ""
            label = label if _may_be_parameter(label, names) else ""
            share = shares[index] if index < len(shares) else None
            env[var] = self._value(array, 0, label=label, stored=array.dtype, share=share)
        tagged = self._body(closed, env, 0, "", 1)
        for result in closed.jaxpr.outvars:
            self._use(self._read(env, result), None, "other")
        return Step(
            self._places.resolved(self._operations), self._values, self._regions, self._devices, self._unknown,
            tagged,
        )  # fmt: skip

    # ---- values ------------------------------------------------------------------------------

    def _value(self, array: Array, region: int, **known: Any) -> int:
        self._values.append(Value(array, region, again=self._again, **known))
        return len(self._values) - 1

    def _read(self, env: dict[Any, int], atom: Any) -> int | None:
        """The number of a value; None for a constant."""
        return None if hasattr(atom, "val") else env.get(atom)

    def _local_bytes(self, number: int) -> float:
        value = self._values[number]
        return value.array.bytes * held(value, self._regions, self._devices)

    def _inner(self, number: int | None, var: Any, region: int) -> int:
        """A value of the region around it as a body gets it (a slice of it, or one device's part)."""
        array = array_of(var.aval)
        if number is None:
            return self._value(array, region)
        outer = self._values[number]
        local = self._regions[region].copies != self._regions[outer.region].copies
        return self._value(
            array, region, source=number, label=outer.label, stored=outer.stored,
            share=None if local else outer.share,
        )  # fmt: skip

    def _use(self, number: int | None, operation: int | None, phase: str) -> None:
        if number is not None:
            self._values[number].uses.append((operation, phase))

    # ---- equations ---------------------------------------------------------------------------

    def _body(self, closed: Any, env: dict[Any, int], region: int, path: str, times: int) -> Any:
        """Walks a jaxpr (open or closed) whose inputs are known; returns it with numbers in its names."""
        jaxpr = getattr(closed, "jaxpr", closed)
        for var in jaxpr.constvars:
            env[var] = self._value(array_of(var.aval), region)
        eqns = [self._equation(eqn, env, region, path, times) for eqn in jaxpr.eqns]
        tagged = jaxpr.replace(eqns=eqns)
        return closed.replace(jaxpr=tagged) if hasattr(closed, "jaxpr") else tagged

    def _equation(self, eqn: Any, env: dict[Any, int], region: int, path: str, times: int) -> Any:
        name = eqn.primitive.name
        path = f"{path}/{eqn.source_info.name_stack}"
        around, self._frames = self._frames, self._places.frames(eqn, self._frames)
        special = {"scan": self._scan, "while": self._while, "cond": self._cond, "shard_map": self._shard_map}
        inner = None if name.startswith(_WHOLE) else _inner_jaxpr(eqn)
        if name == "optimization_barrier":
            known = [(v, whole(a, self._numbers)) for v, a in zip(eqn.outvars, eqn.invars, strict=True)]
            self._numbers |= {v: number for v, number in known if number is not None}
        if name in special:
            made = special[name](eqn, env, region, path, times)
        elif inner is None:
            made = self._operation(eqn, env, region, path, times)
        else:
            made = self._inline(eqn, *inner, env, region, path, times)
        self._frames = around
        return made

    def _inline(
        self, eqn: Any, key: str, body: Any, env: dict[Any, int], region: int, path: str, times: int
    ) -> Any:
        """A call (of nested jit, remat, custom derivatives): its values are those of the region around it."""
        jaxpr, around = getattr(body, "jaxpr", body), self._again
        if eqn.primitive.name.startswith(_CHECKPOINTS) and around is None and phase_of(path) == "backward":
            self._again = (len(self._values), region)
        scope = {v: self._read(env, a) for v, a in zip(jaxpr.invars, eqn.invars, strict=True)}
        known = {v: n if n is not None else self._value(array_of(v.aval), region) for v, n in scope.items()}
        tagged = self._body(body, known, region, path, times)
        self._again = around
        for outer, result in zip(eqn.outvars, jaxpr.outvars, strict=True):
            number = self._read(known, result)
            env[outer] = self._value(array_of(outer.aval), region) if number is None else number
        return eqn.replace(params={**eqn.params, key: tagged})

    def _operation(self, eqn: Any, env: dict[Any, int], region: int, path: str, times: int) -> Any:
        number, self._next = self._next, self._next + 1
        name, params, phase = eqn.primitive.name, eqn.params, phase_of(path)
        inputs = tuple(self._read(env, atom) for atom in eqn.invars)
        operands = tuple(
            _LITERAL if hasattr(a, "val") and not a.aval.shape else array_of(a.aval) for a in eqn.invars
        )
        results = tuple(array_of(v.aval) for v in eqn.outvars)
        kind, even = kind_of(name, operands, results), self._regions[region].copies / self._devices
        for value in inputs:
            self._use(value, number, phase)
        outputs = tuple(
            self._made(eqn, index, kind, number, inputs, region, phase) for index in range(len(results))
        )
        moved = [
            [self._local_bytes(n) if n is not None else even * a.bytes for n, a in zip(*both, strict=True)]
            for both in ((inputs, operands), (outputs, results))
        ]
        read, written = bytes_of(kind, name, *moved)
        spread = kind in (ELEMENTWISE, REDUCTION) and results[0].bytes
        part = moved[1][0] / results[0].bytes if spread else even
        flops = part * flops_of(kind, name, params, operands, results)
        env.update(zip(eqn.outvars, outputs, strict=True))
        index = self._weight(kind, inputs)
        weight = self._values[inputs[index]] if index is not None else None  # type: ignore[index]
        wanted = params.get("preferred_element_type")
        self._operations.append(Operation(
            number, name, kind, path, phase, times, region, flops, read, written, inputs, outputs, operands, results,
            weight=weight.label if weight else "", stored=weight.stored if weight else "", weight_index=index,
            accumulator="" if kind not in PRODUCTS else short(wanted) if wanted else results[0].dtype,
            params=params,
        ))  # fmt: skip
        self._places.note(number, self._frames)
        stack = eqn.source_info.name_stack.extend(f"dsjaxop{number}")
        return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))

    def _made(
        self,
        eqn: Any,
        index: int,
        kind: str,
        number: int,
        inputs: tuple[int | None, ...],
        region: int,
        phase: str,
    ) -> int:
        """A result, with what follows for it from the operands: label, and the share that a device holds."""
        array = array_of(eqn.outvars[index].aval)
        sources = [self._values[n] for n in inputs if n is not None]
        passes = kind in _PASSES_A_LABEL or eqn.primitive.name in ("slice", "dynamic_slice")
        own = inputs[index if len(inputs) == len(eqn.outvars) else 0] if inputs and passes else None
        label, stored = ("", "") if own is None else (self._values[own].label, self._values[own].stored)
        alike = [v.share for v in sources if v.array.shape == array.shape and v.share is not None]
        share = min(alike, default=None)
        pinned = eqn.params.get("sharding")
        if eqn.primitive.name == "sharding_constraint" and isinstance(pinned, NamedSharding) and array.size:
            share = 1 / math.prod(
                pinned.mesh.shape[axis] for entry in pinned.spec for axis in axes_of_entry(entry)
            )
        return self._value(
            array, region, producer=number, label=label, stored=stored, phase=phase, share=share
        )

    def _weight(self, kind: str, inputs: tuple[int | None, ...]) -> int | None:
        """Which operand is a parameter: one whose path says so, else the last that is an argument."""
        if kind in _PASSES_A_LABEL:
            return None
        found = [
            (i, self._values[n].label)
            for i, n in enumerate(inputs)
            if n is not None and self._values[n].label
        ]
        if kind == INDEXING:
            found = [pair for pair in found if pair[0] == 0]
        named = [i for i, label in found if "params" in label.split("/")]
        return next(iter(named), found[-1][0] if found else None)

    # ---- loops, branches, shard_map ----------------------------------------------------------

    def _enter(self, eqn: Any, env: dict[Any, int], body: Any, region: int, path: str,
               times: int, copies: int, atoms: Sequence[Any]) -> tuple[dict[Any, int], int]:  # fmt: skip
        """A region for a body, and the numbers of its inputs."""
        phase = phase_of(path)
        self._regions.append(Region(region, times, phase, copies))
        inside, scope = len(self._regions) - 1, {}
        for var, atom in zip(getattr(body, "jaxpr", body).invars, atoms, strict=True):
            number = self._read(env, atom)
            self._use(number, None, phase)
            scope[var] = self._inner(number, var, inside)
        return scope, inside

    def _leave(self, eqn: Any, env: dict[Any, int], scope: dict[Any, int], results: Sequence[Any],
               region: int, path: str, local: bool = False) -> None:  # fmt: skip
        """The results of a region become values of the region around it."""
        phase = phase_of(path)
        for outer, result in zip(eqn.outvars, results, strict=True):
            number = self._read(scope, result)
            self._use(number, None, phase)
            share = None if number is None or local else self._values[number].share
            env[outer] = self._value(array_of(outer.aval), region, phase=phase, source=number, share=share)

    def _scan(self, eqn: Any, env: dict[Any, int], region: int, path: str, times: int) -> Any:
        body, length, copies = eqn.params["jaxpr"], eqn.params["length"], self._regions[region].copies
        scope, inside = self._enter(eqn, env, body, region, path, length, copies, eqn.invars)
        tagged = self._body(body, scope, inside, path, times * length)
        self._leave(eqn, env, scope, body.jaxpr.outvars, region, path)
        return eqn.replace(params={**eqn.params, "jaxpr": tagged})

    def _while(self, eqn: Any, env: dict[Any, int], region: int, path: str, times: int) -> Any:
        body, skipped = eqn.params["body_jaxpr"], eqn.params["cond_nconsts"]
        length, copies = turns(eqn, self._numbers), self._regions[region].copies
        self._unknown += length is None
        length = 1 if length is None else length
        scope, inside = self._enter(eqn, env, body, region, path, length, copies, eqn.invars[skipped:])
        tagged = self._body(body, scope, inside, path, times * length)
        self._leave(eqn, env, scope, body.jaxpr.outvars, region, path)
        return eqn.replace(params={**eqn.params, "body_jaxpr": tagged})

    def _cond(self, eqn: Any, env: dict[Any, int], region: int, path: str, times: int) -> Any:
        """Every branch is walked; the operations of the longest stay."""
        before, found, tagged, copies = self._operations, [], [], self._regions[region].copies
        for branch in eqn.params["branches"]:
            self._operations = []
            scope, inside = self._enter(eqn, env, branch, region, path, 1, copies, eqn.invars[1:])
            tagged.append(self._body(branch, scope, inside, path, times))
            found.append((self._operations, scope, branch))
        longest = max(
            found, key=lambda f: (sum(o.flops * o.times for o in f[0]), sum(o.bytes * o.times for o in f[0]))
        )
        self._operations = before + longest[0]
        self._leave(eqn, env, longest[1], longest[2].jaxpr.outvars, region, path)
        return eqn.replace(params={**eqn.params, "branches": tuple(tagged)})

    def _shard_map(self, eqn: Any, env: dict[Any, int], region: int, path: str, times: int) -> Any:
        body, mesh = eqn.params["jaxpr"], eqn.params["mesh"]
        copies = self._regions[region].copies
        for axis in eqn.params.get("newly_manual_axes", mesh.axis_names):
            copies *= mesh.shape[axis]
        scope, inside = self._enter(eqn, env, body, region, path, 1, copies, eqn.invars)
        tagged = self._body(body, scope, inside, path, times)
        self._leave(eqn, env, scope, body.outvars, region, path, local=True)
        return eqn.replace(params={**eqn.params, "jaxpr": tagged})


def _inner_jaxpr(eqn: Any) -> tuple[str, Any] | None:
    """The one jaxpr that an equation calls with its operands."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = eqn.params.get(key)
        inner = getattr(body, "jaxpr", body)
        if hasattr(inner, "eqns") and len(inner.invars) == len(eqn.invars):
            return key, body
    return None


def _may_be_parameter(name: str, names: Sequence[str]) -> bool:
    """Whether an argument is one of the parameters: those called so, else those in trees, else all."""
    if any("params" in other.split("/") for other in names):
        return "params" in name.split("/")
    return "/" in name or not any("/" in other for other in names)


def phase_of(path: str) -> str:
    """Which part of a step a path of names is in: what `jax.grad` and `jax.checkpoint` wrote into it."""
    if "rematted_computation" in path:
        return "recomputed"
    if "transpose(" in path:
        return "backward"
    return "forward" if "jvp(" in path else "other"


def totals(operations: Sequence[Operation], key: Any) -> dict[Any, tuple[int, int, float, float, float]]:
    """(operations, runs, FLOPs, bytes read, bytes written) of a step on one device, by a key of an operation."""
    found: dict[Any, list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0, 0.0])
    for o in operations:
        for index, value in enumerate((1, o.times, o.flops * o.times, o.read * o.times, o.written * o.times)):
            found[key(o)][index] += value
    return {k: (int(v[0]), int(v[1]), v[2], v[3], v[4]) for k, v in found.items()}

"""The collectives of a compiled program: what is sent, between whom, how often, and beside what."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np

from dsjax.aot.groups import Coordinates, members_of
from dsjax.aot.hlo import Computation, Instruction, Module, flat
from dsjax.aot.uniform import COLLECTIVES
from dsjax.aot.walk import Branch, Loop, Site
from dsjax.aot.work import Work, Works


@dataclass(frozen=True)
class Part:
    """One array of a collective; XLA combines several into one call.

    Attributes:
      dtype: element type as HLO writes it (`bf16`, `f32`, `u8`).
      operand_bytes, result_bytes: on one device.
    """

    dtype: str
    operand_bytes: int
    result_bytes: int


@dataclass(frozen=True, eq=False)
class Collective:
    """A collective at one place of the program.

    Attributes:
      name: of the instruction.
      kind: all-gather, all-reduce, reduce-scatter, all-to-all, collective-permute, ...
      axes: mesh axes along which devices of a group differ, outermost first; () sends nothing.
      group_size: devices in a group.
      whole: the groups are all devices along those axes, not some of them.
      groups: [groups, members] numbers of devices on the mesh; pairs (from, to) for a permute.
      parts: the arrays that it carries.
      wire_bytes: bytes that a device sends each time, by the ring's formula (see `ring_bytes`).
      loops, branches: those around it, outermost first.
      times: how often it runs in a step; a loop of unknown length counts once, a branch as taken.
      every: it runs in one of so many runs of the program (`Inspection.seldom`).
      times_known: no loop around it is of unknown length.
      differs_over: axes along which a decision around it (a conditional's, a loop's) may differ between devices.
      asynchronous: it is started and waited for by two instructions, with others between them where `between`
        names some.
      between: instructions issued between start and wait.
      between_work: what those compute and move.
      op_name: the jax operation that it came from; empty where XLA made it.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    group_size: int
    whole: bool
    groups: Any = field(repr=False)
    parts: tuple[Part, ...]
    wire_bytes: float
    loops: tuple[Loop, ...]
    branches: tuple[Branch, ...]
    times: int
    times_known: bool
    differs_over: frozenset[str]
    asynchronous: bool
    between: tuple[str, ...] = field(repr=False)
    between_work: Work = field(repr=False)
    op_name: str
    every: int = 1

    @property
    def operand_bytes(self) -> int:
        """Bytes that a device gives each time."""
        return sum(part.operand_bytes for part in self.parts)

    @property
    def result_bytes(self) -> int:
        """Bytes that a device gets each time."""
        return sum(part.result_bytes for part in self.parts)

    @property
    def dtypes(self) -> frozenset[str]:
        """Element types on the wire."""
        return frozenset(part.dtype for part in self.parts)

    @property
    def dtype(self) -> str:
        """The element type of most of its bytes."""
        total: dict[str, int] = {}
        for part in self.parts:
            total[part.dtype] = total.get(part.dtype, 0) + max(part.operand_bytes, part.result_bytes)
        return max(total, key=lambda name: total[name]) if total else ""

    @property
    def depth(self) -> int:
        """How many loops stand around it."""
        return len(self.loops)

    @property
    def total_wire_bytes(self) -> float:
        """Bytes that a device sends in a step, on average."""
        return self.wire_bytes * self.runs

    @property
    def runs(self) -> float:
        """How often it runs in a step, on average."""
        return self.times / self.every

    def crosses(self, domain: int) -> bool:
        """Whether a group leaves a node of `domain` devices (`Target.domain`)."""
        if isinstance(self.groups, np.ndarray):
            nodes = self.groups // domain
            return bool(nodes.size and (nodes != nodes[:, :1]).any())
        return any(len({d // domain for d in group}) > 1 for group in self.groups)


class Collectives(Sequence[Collective]):
    """Collectives, and the same with only those that a filter keeps; filters chain.

    `inspection.collectives.over("data").of("all-reduce").in_loop()`
    """

    def __init__(self, items: Iterable[Collective]):
        self._items = tuple(items)

    @overload
    def __getitem__(self, index: int) -> Collective: ...
    @overload
    def __getitem__(self, index: slice) -> Collectives: ...
    def __getitem__(self, index: int | slice) -> Collective | Collectives:
        return Collectives(self._items[index]) if isinstance(index, slice) else self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Collective]:
        return iter(self._items)

    def __repr__(self) -> str:
        return "\n".join(["Collectives:", *(f"  {describe(c)}" for c in self._items)])

    def where(self, keep: Callable[[Collective], bool]) -> Collectives:
        """Those for which a function is true."""
        return Collectives(c for c in self._items if keep(c))

    def over(self, *axes: str) -> Collectives:
        """Over exactly these mesh axes."""
        return self.where(lambda c: set(c.axes) == set(axes))

    def touching(self, *axes: str) -> Collectives:
        """Over any of these mesh axes, alone or with others."""
        return self.where(lambda c: bool(set(c.axes) & set(axes)))

    def of(self, *kinds: str) -> Collectives:
        """Of any of these kinds.

        Raises:
          ValueError: there is no such kind.
        """
        unknown = set(kinds) - set(COLLECTIVES)
        if unknown:
            raise ValueError(
                f"no kind of collective is called {', '.join(sorted(unknown))}; {', '.join(COLLECTIVES)}"
            )
        return self.where(lambda c: c.kind in kinds)

    def carrying(self, *dtypes: str) -> Collectives:
        """With an array of one of these element types (`bf16`, `f32`, `u8`)."""
        return self.where(lambda c: bool(c.dtypes & set(dtypes)))

    def in_loop(self, name: str = "") -> Collectives:
        """Inside a loop (whose jax operation's name holds `name`)."""
        return self.where(lambda c: any(name in loop.op_name for loop in c.loops))

    def outside_loops(self) -> Collectives:
        """Run once."""
        return self.where(lambda c: not c.loops)

    def in_conditional(self) -> Collectives:
        """Inside a branch of a conditional."""
        return self.where(lambda c: bool(c.branches))

    def divided(self) -> Collectives:
        """Under a decision that may differ between devices."""
        return self.where(lambda c: bool(c.differs_over))

    def hanging(self) -> Collectives:
        """Permutes that some devices may not come to.

        Every device of the mesh takes part in a permute, whatever its pairs say, so it hangs where a decision
        around it differs between any two; other collectives wait for their own group only.
        """
        return self.of("collective-permute").divided()

    def asynchronous(self) -> Collectives:
        """Started and waited for apart."""
        return self.where(lambda c: c.asynchronous)

    def at_least(self, size: int) -> Collectives:
        """That give or get at least this many bytes each time."""
        return self.where(lambda c: max(c.operand_bytes, c.result_bytes) >= size)

    def crossing(self, domain: int) -> Collectives:
        """That leave a node of `domain` devices."""
        return self.where(lambda c: c.crosses(domain))

    def within(self, domain: int) -> Collectives:
        """That stay in a node of `domain` devices."""
        return self.where(lambda c: not c.crosses(domain))

    def named(self, pattern: str) -> Collectives:
        """Whose jax operation's name a regular expression finds."""
        return self.where(lambda c: re.search(pattern, c.op_name) is not None)

    @property
    def times(self) -> int:
        """How many run in a step."""
        return sum(c.times for c in self._items)

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in a step."""
        return sum(c.total_wire_bytes for c in self._items)


def describe(c: Collective) -> str:
    """One line about a collective."""
    sizes = f"{'+'.join(sorted(c.dtypes))} {c.operand_bytes} -> {c.result_bytes} bytes"
    place = f"x{c.times}{'' if c.times_known else '?'}"
    notes = ["asynchronous"] * c.asynchronous + ["in a branch"] * bool(c.branches)
    if c.differs_over:
        notes.append(f"decided apart over {', '.join(sorted(c.differs_over))}")
    return f"{c.kind} over {', '.join(c.axes) or 'nothing'} {place} {sizes} {' '.join(notes)}".rstrip()


def ring_bytes(kind: str, group_size: int, operand_bytes: int, result_bytes: int) -> float:
    """Bytes that one device sends, with n devices in a ring.

    all-gather: (n-1)/n of the result; reduce-scatter, all-to-all: (n-1)/n of the operand; all-reduce: both,
    2(n-1)/n of the operand; permute and broadcast: the operand.
    """
    if group_size < 2:
        return 0.0
    share = (group_size - 1) / group_size
    return {
        "all-gather": share * result_bytes,
        "all-reduce": 2 * share * operand_bytes,
        "reduce-scatter": share * operand_bytes,
        "all-to-all": share * operand_bytes,
        "ragged-all-to-all": share * operand_bytes,
    }.get(kind, float(operand_bytes))


def kind_of(instruction: Instruction) -> str | None:
    """The kind of collective that an instruction starts or does; None for anything else."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else None


def read_collective(
    site: Site,
    module: Module,
    coordinates: Coordinates,
    works: Works,
    decided_over: Mapping[str, frozenset[str]],
) -> Collective:
    """What stands at a site that `kind_of` knows."""
    instruction, computation = site.instruction, site.computation
    kind = kind_of(instruction)
    assert kind is not None
    groups = members_of(instruction, kind, module)
    permute = kind == "collective-permute"
    size = (2 if len(groups) else 1) if permute else max(len(group) for group in groups)
    parts = _parts(instruction, computation)
    operand, result = (sum(getattr(p, f"{end}_bytes") for p in parts) for end in ("operand", "result"))
    issued = _issued(site)
    asynchronous = issued is not None and not _is_sync(instruction) and not _is_sync(issued[0].instruction)
    between = _between(*issued) if issued is not None and asynchronous else ()
    around = [*(loop.name for loop in site.loops), *(branch.conditional for branch in site.branches)]
    return Collective(
        name=instruction.name,
        kind=kind,
        axes=coordinates.axes_of(groups),
        group_size=size,
        whole=not permute and coordinates.whole(groups),
        groups=groups,
        parts=parts,
        wire_bytes=ring_bytes(kind, size, operand, result),
        loops=site.loops,
        branches=site.branches,
        times=site.times,
        times_known=all(loop.trips is not None for loop in site.loops),
        differs_over=frozenset().union(*(decided_over.get(name, frozenset()) for name in around)),
        asynchronous=asynchronous,
        between=tuple(i.name for i in between),
        between_work=works.of_all(issued[0].computation, between) if issued else Work(),
        op_name=instruction.op_name,
    )


def _parts(instruction: Instruction, computation: Computation) -> tuple[Part, ...]:
    given = [array for operand in computation.operands(instruction) for array in flat(operand.shape)]
    done = _done(computation, instruction)
    if done is not None:
        got = flat(done.shape)
    elif not instruction.opcode.endswith("-start") or instruction.opcode.startswith("all-reduce"):
        got = flat(instruction.shape)
    else:
        # A start's shape is (operands, results, ...) and its end is not here.
        got = flat(instruction.shape[1]) if isinstance(instruction.shape, tuple) else given
    if len(got) != len(given):
        # Arrays joined or cut on the way: one part says what goes in and what comes out.
        return (
            (Part(given[0].dtype, sum(a.bytes for a in given), sum(a.bytes for a in got)),) if given else ()
        )
    return tuple(Part(a.dtype, a.bytes, b.bytes) for a, b in zip(given, got, strict=True))


def _done(computation: Computation, start: Instruction) -> Instruction | None:
    """The instruction that waits for one that was started, in the same computation."""
    if not start.opcode.endswith("-start"):
        return None
    for user in computation.users[start.name]:
        if user.opcode.endswith("-done"):
            return user
        if user.opcode.endswith("-update"):
            for later in computation.users[user.name]:
                if later.opcode.endswith("-done"):
                    return later
    return None


def _issued(site: Site) -> tuple[Site, Instruction | None] | None:
    """Where it is started and what waits for it; None where one instruction does both."""
    if site.instruction.opcode.endswith("-start"):
        return site, _done(site.computation, site.instruction)
    for wrapper in reversed(site.wrappers):
        if wrapper.instruction.opcode == "async-start":
            return wrapper, _done(wrapper.computation, wrapper.instruction)
    return None


def _is_sync(instruction: Instruction) -> bool:
    """Whether the backend runs start and end as one, whatever stands between them."""
    return bool(instruction.backend_config.get("collective_backend_config", {}).get("is_sync", False))


def _between(started: Site, done: Instruction | None) -> tuple[Instruction, ...]:
    if done is None:
        return ()
    inside = started.computation.instructions[started.instruction.index + 1 : done.index]
    return tuple(i for i in inside if i.opcode not in ("bitcast", "get-tuple-element", "tuple", "constant"))

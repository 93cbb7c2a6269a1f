"""Sums over the operations of a step: by kind, by layer, and the element types of each layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dsjax.aot import Chip
from dsjax.plan.explanation.jaxpr import Operation, Step
from dsjax.plan.explanation.operations import ATTENTION, FREE, PRODUCTS
from dsjax.plan.explanation.places import collapsed

# What is computed more often than asked is told from this ratio and this share of all products on.
_MORE, _MATTERS = 1.05, 0.001


@dataclass(frozen=True)
class Tally:
    """Operations of one kind or layer, of a step on one device.

    Attributes:
      operations: places in the program; runs: how often they run.
      flops, bytes: as if each operation stood alone.
      compute_seconds, memory_seconds: at the chip's peaks; products by the type that they multiply,
        everything else by the peak of fp32.
    """

    name: str
    operations: int
    runs: int
    flops: float
    bytes: float
    compute_seconds: float
    memory_seconds: float

    @property
    def intensity(self) -> float | None:
        """FLOPs a byte."""
        return self.flops / self.bytes if self.bytes else None

    @property
    def bound(self) -> str:
        """What takes longer: compute or memory; empty where it does neither."""
        if not self.flops and not self.bytes:
            return ""
        return "compute" if self.compute_seconds >= self.memory_seconds else "memory"

    @property
    def seconds(self) -> float:
        """The longer of the two."""
        return max(self.compute_seconds, self.memory_seconds)


@dataclass(frozen=True)
class LayerTypes:
    """Element types in one layer; repeated layers stand once.

    Attributes:
      operations: products and uses of parameters, of the forward pass; runs: how often they run in a step.
      inputs, weights, accumulators, outputs: types as HLO writes them; a weight that is cast reads
        `f32 as bf16`. An accumulator is what the product asks for: tensor cores add in fp32 inside
        whatever that is, and it is the type in which parts from several devices or blocks are added.
      gradients: of the backward pass's products: accumulator, and the type of their results.
    """

    path: str
    operations: int
    runs: int
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    accumulators: tuple[str, ...]
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]


@dataclass(frozen=True)
class Excess:
    """Products that the compiled program computes more of than the step asks for, of a step on one device.

    Attributes:
      flops: cut evenly over all devices, as the jaxpr has them; compiled_flops: by the compiled program.
    """

    path: str
    phase: str
    flops: float
    compiled_flops: float

    @property
    def ratio(self) -> float:
        """How many times as much."""
        return self.compiled_flops / self.flops


def excess(step: Step, compiled: Mapping[int, float]) -> tuple[Excess, ...]:
    """Where XLA computes products again by itself, or all devices the same ones; the most FLOPs first.

    Args:
      compiled: number of an operation -> FLOPs of the compiled products that carry it.
    """
    asked: dict[tuple[str, str], float] = defaultdict(float)
    done: dict[tuple[str, str], float] = defaultdict(float)
    for o in step.operations:
        place = collapsed(o.path), o.phase
        asked[place] += o.flops * o.times if o.kind in (*PRODUCTS, ATTENTION) else 0.0
        done[place] += compiled.get(o.number, 0.0)
    found = [Excess(*place, flops, done[place]) for place, flops in asked.items() if flops]
    more = sum(e.compiled_flops - e.flops for e in found)
    if more <= _MATTERS * step.product_flops:
        return ()  # equal products that XLA merged stand with one of their places
    over = [
        e for e in found if e.ratio > _MORE and e.compiled_flops - e.flops > _MATTERS * step.product_flops
    ]
    return tuple(sorted(over, key=lambda e: e.flops - e.compiled_flops))


def by_kind(step: Step, chip: Chip) -> tuple[Tally, ...]:
    """The step by kind of operation, those that take longest first; without what moves nothing."""
    return _tallies((o for o in step.operations if o.kind != FREE), chip, lambda o: o.kind)


def by_layer(step: Step, chip: Chip) -> tuple[Tally, ...]:
    """The step by layer, repeated layers together."""
    return _tallies((o for o in step.operations if o.kind != FREE), chip, lambda o: collapsed(o.path))


def _tallies(
    operations: Iterable[Operation], chip: Chip, key: Callable[[Operation], str]
) -> tuple[Tally, ...]:
    groups: dict[str, list[Operation]] = defaultdict(list)
    for o in operations:
        groups[key(o)].append(o)
    found = [_tally(name, members, chip) for name, members in groups.items()]
    return tuple(sorted(found, key=lambda tally: -tally.seconds))


def _tally(name: str, members: Sequence[Operation], chip: Chip) -> Tally:
    moved = sum(o.bytes * o.times for o in members)
    return Tally(
        name=name,
        operations=len(members),
        runs=sum(o.times for o in members),
        flops=sum(o.flops * o.times for o in members),
        bytes=moved,
        compute_seconds=sum(o.flops * o.times / chip.flops(_unit(o)) for o in members),
        memory_seconds=moved / chip.memory.bandwidth,
    )


def _unit(operation: Operation) -> str:
    return operation.unit if operation.kind in (*PRODUCTS, ATTENTION) else "fp32"


def layer_types(step: Step) -> tuple[LayerTypes, ...]:
    """The types of every layer that multiplies or holds parameters, in the order of the program."""
    differentiated = any(o.phase == "forward" for o in step.operations)
    forward: dict[str, list[Operation]] = defaultdict(list)
    backward: dict[str, list[Operation]] = defaultdict(list)
    for o in step.operations:
        product = o.kind in PRODUCTS
        if o.phase == ("forward" if differentiated else "other") and (product or o.weight):
            forward[collapsed(o.path)].append(o)
        elif o.phase == "backward" and product:
            backward[collapsed(o.path)].append(o)
    return tuple(_types(path, members, backward[path]) for path, members in forward.items())


def _types(path: str, members: Sequence[Operation], gradients: Sequence[Operation]) -> LayerTypes:
    inputs, weights, accumulators, outputs = [], [], [], []
    for o in members:
        for index, operand in enumerate(o.operands):
            if operand.dtype in ("token", "pred"):
                continue
            if index == o.weight_index:
                used = operand.dtype
                weights.append(used if o.stored in ("", used) else f"{o.stored} as {used}")
            else:
                inputs.append(operand.dtype)
        accumulators += [o.accumulator] if o.accumulator else []
        outputs += [result.dtype for result in o.results[:1]]
    made = [f"{o.accumulator} to {o.results[0].dtype}" for o in gradients]
    return LayerTypes(
        path, len(members), sum(o.times for o in members), _once(inputs), _once(weights), _once(accumulators),
        _once(outputs), _once(made),
    )  # fmt: skip


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))

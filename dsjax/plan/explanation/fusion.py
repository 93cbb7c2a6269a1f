"""Which chains of operations could be one kernel with the product before them, and what that would gain.

A candidate is a matrix product or convolution and the elementwise operations, casts and reductions that
follow from its result and need nothing that is made later by something else.  What others need of it is
written; the rest never reaches memory.  The gain is a difference of rooflines (`FORMULA`).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsjax.aot import Chip
from dsjax.plan.cost import Reached
from dsjax.plan.explanation.jaxpr import Operation, Step
from dsjax.plan.explanation.operations import CAST, ELEMENTWISE, FREE, PRODUCTS, REDUCTION

THRESHOLD = 0.15
# Between two kernels of one stream: the last blocks of the one drain, those of the other start. Round figures.
LAUNCH = {"gpu": 3e-6, "tpu": 1e-6, "cpu": 5e-6}
FORMULA = (
    "gain = product + chain - fused. product = max(FLOPs / peak, (operands + result) / bandwidth) + launch; "
    "chain = max(FLOPs / fp32 peak, (result + further operands + what is written) / bandwidth) + launch, as one "
    "kernel; fused = max(the product's FLOPs / peak + recomputed FLOPs / fp32 peak, (operands + further operands + "
    "what is written, the result only where others need it) / bandwidth) + launch. Peaks and bandwidth at the shares "
    "that the plan's times use (75% and 85% unless measured), a launch 3 us on GPUs. The share is the gain over "
    "product + chain: an upper bound, with the epilogue hidden under the product's arithmetic."
)
_MOST = 400  # operations looked at behind one product
_ACTIVATIONS = ("logistic", "tanh", "erf", "erfc", "erf_inv", "exp", "log1p", "softplus", "relu")
_ROUNDINGS = ("round", "floor", "clamp")
_NARROW = ("s8", "u8", "s4", "u4", "f8", "f4")


@dataclass(frozen=True, eq=False)
class Candidate:
    """A product and a chain that could follow it in one kernel.

    Attributes:
      chain: in the order of the program, without what moves nothing.
      followed_by: what the chain is: bias, add, scale, gating, activation, mask, cast, quantisation, norm, ...
      renames: numbers of the operations among them that move nothing.
      saved_bytes: of one device, each time: what is neither written nor read again.
      recomputed_flops: of one device, each time: of what the kernel makes anew instead of reading it.
      apart_seconds, fused_seconds: each time.
      pinned: a sharding is pinned in the chain, where devices may have to exchange.
    """

    product: Operation
    chain: tuple[Operation, ...]
    followed_by: tuple[str, ...]
    renames: tuple[int, ...]
    saved_bytes: float
    recomputed_flops: float
    apart_seconds: float
    fused_seconds: float
    pinned: bool

    @property
    def gain_seconds(self) -> float:
        """Each time."""
        return self.apart_seconds - self.fused_seconds

    @property
    def share(self) -> float:
        """The gain over the time apart."""
        return self.gain_seconds / self.apart_seconds


def candidates(step: Step, chip: Chip, reached: Reached | None = None) -> list[Candidate]:
    """The candidates of a step; an operation that several products could take goes to the first of them."""
    graph, taken, found = _Graph(step), set[int](), []
    for operation in step.operations:
        if operation.kind in PRODUCTS and operation.outputs:
            chain = graph.chain(operation, taken)
            if any(o.kind != FREE for o in chain):
                taken.update(o.number for o in chain)
                found.append(graph.candidate(operation, chain, chip, reached or Reached()))
    return found


class _Graph:
    """Who makes and who reads the values of a step."""

    def __init__(self, step: Step):
        self._step = step
        self._operations = step.producers

    # ---- which operations --------------------------------------------------------------------

    def chain(self, product: Operation, taken: set[int]) -> list[Operation]:
        """What follows from a product's result and could be computed as it leaves the product."""
        made, spoiled, chain, looked = set(product.outputs), set[int](), list[Operation](), set[int]()
        queue = self._readers(product.outputs)
        heapq.heapify(queue)
        while queue and len(looked) < _MOST:
            number = heapq.heappop(queue)
            if number in looked:
                continue
            looked.add(number)
            operation = self._operations[number]
            if number not in taken and self._fits(operation, product, made, spoiled):
                chain.append(operation)
                # What follows from a reduction needs the whole row: it is another pass.
                (spoiled if operation.kind == REDUCTION else made).update(operation.outputs)
            else:
                spoiled.update(operation.outputs)
            for reader in self._readers(operation.outputs):
                heapq.heappush(queue, reader)
        return self._trimmed(chain)

    def _trimmed(self, chain: list[Operation]) -> list[Operation]:
        """Without what ends it and is not worth a kernel: other shapes and names, casts that a reader makes itself."""
        while True:
            inside = {o.number for o in chain}
            loose = [
                o for o in chain
                if (o.kind == FREE or o.primitive == "transpose" or self._is_recast(o))
                and not any(use in inside for use, _ in self._step.values[o.outputs[0]].uses)
            ]  # fmt: skip
            if not loose:
                return chain
            chain = [o for o in chain if o not in loose]

    def _is_recast(self, operation: Operation) -> bool:
        """Whether it widens a type for operations of its own region, which read the narrow one as well."""
        wider = operation.kind == CAST and operation.results[0].bytes > operation.operands[0].bytes
        return wider and all(use is not None for use, _ in self._step.values[operation.outputs[0]].uses)

    def _readers(self, values: Sequence[int]) -> list[int]:
        uses = (use for value in values for use, _ in self._step.values[value].uses)
        return [number for number in uses if number is not None and number in self._operations]

    def _fits(self, operation: Operation, product: Operation, made: set[int], spoiled: set[int]) -> bool:
        size, same = product.results[0].size, (product.region, product.phase)
        if (operation.region, operation.phase) != same or len(operation.outputs) != 1:
            return False
        further = [n for n in operation.inputs if n is not None and n not in made]
        if any(n in spoiled or self._comes_late(n, product) for n in further):
            return False
        if operation.kind == REDUCTION:
            return operation.operands[0].size == size and not operation.primitive.startswith("cum")
        absorbed = operation.kind in (ELEMENTWISE, CAST, FREE) or operation.primitive == "transpose"
        return absorbed and operation.results[0].size == size

    def _comes_late(self, number: int, product: Operation) -> bool:
        """Whether a loop or a shard_map after the product made it: it may depend on the product."""
        value = self._step.values[number]
        returned = value.producer is None and value.source is not None and value.region == product.region
        return returned and number > product.outputs[0]

    # ---- bytes and seconds -------------------------------------------------------------------

    def candidate(
        self, product: Operation, chain: list[Operation], chip: Chip, reached: Reached
    ) -> Candidate:
        """The prediction for a product and its chain."""
        renames = [o for o in chain if o.kind == FREE or o.primitive == "transpose"]
        made, result_needed = self._written(product, chain)
        read, recomputed = self._further(product, chain)
        result, operands = product.written, product.read
        rate = reached.flops(chip, product.unit)
        memory = chip.memory.bandwidth * reached.memory
        vector, launch = chip.flops("fp32") * reached.products, LAUNCH[chip.kind]
        own = sum(o.flops for o in chain)
        alone = max(product.flops / rate, (operands + result) / memory) + launch
        after = max(own / vector, (result + read + made) / memory) + launch
        moved = operands + read + made + (result if result_needed else 0.0)
        fused = max(product.flops / rate + recomputed / vector, moved / memory) + launch
        return Candidate(
            product=product,
            chain=tuple(o for o in chain if o not in renames),
            renames=tuple(o.number for o in renames),
            followed_by=_names(self._step, self._operations, product, chain),
            saved_bytes=result if result_needed else 2 * result,
            recomputed_flops=recomputed,
            apart_seconds=alone + after,
            fused_seconds=fused,
            pinned=any(o.primitive == "sharding_constraint" for o in chain),
        )

    def _written(self, product: Operation, chain: list[Operation]) -> tuple[float, bool]:
        """Bytes of the chain's values that others read, and whether they read the product's result itself."""
        inside = {o.number for o in chain}
        first = product.outputs[0]
        needed = set()
        for operation in (product, *chain):
            for value in operation.outputs:
                if any(use not in inside for use, _ in self._step.values[value].uses):
                    needed.add(self._root(value))
        return sum(self._step.bytes_of(v) for v in needed if v != first), first in needed

    def _root(self, number: int) -> int:
        """The value that a reshaped, renamed or widened one is read from."""
        producer = self._producer(number)
        source = None if producer is None else producer.source_of(number)
        if producer is None or source is None:
            return number
        if producer.kind != FREE and producer.primitive != "transpose" and not self._is_recast(producer):
            return number
        alike = self._step.values[source].array.size == self._step.values[number].array.size
        return self._root(source) if alike else number

    def _producer(self, number: int) -> Operation | None:
        made_by = self._step.values[number].producer
        return None if made_by is None else self._operations.get(made_by)

    def _further(self, product: Operation, chain: list[Operation]) -> tuple[float, float]:
        """Bytes that the chain reads beside the product's result, and FLOPs of what it makes anew."""
        made = set(product.outputs) | {n for o in chain for n in o.outputs}
        sources: set[int] = set()
        again: dict[int, float] = {}
        for operation in chain:
            for number in operation.inputs:
                if number is not None and number not in made:
                    self._sources(number, made, sources, again, 6)
        return sum(self._step.bytes_of(n) for n in sources), sum(again.values())

    def _sources(
        self, number: int, made: set[int], sources: set[int], again: dict[int, float], depth: int
    ) -> None:
        """What is read for an operand: itself, or the less that it is cheaply made of."""
        number = self._root(number)
        producer = self._producer(number)
        cheap = producer is not None and depth > 0 and producer.kind in (ELEMENTWISE, CAST, FREE)
        inputs = [n for n in producer.inputs if n is not None] if cheap and producer else []
        less = sum(self._step.bytes_of(n) for n in inputs) < self._step.bytes_of(number)
        if not cheap or producer is None or not less or any(n in made for n in inputs):
            sources.add(number)
            return
        if producer.kind != FREE:
            again[producer.number] = producer.flops
        for n in inputs:
            self._sources(n, made, sources, again, depth - 1)


# ---- names -----------------------------------------------------------------------------------


def _names(
    step: Step, operations: Mapping[int, Operation], product: Operation, chain: Sequence[Operation]
) -> tuple[str, ...]:
    """What a chain is, in the words of the trade, in its order, each once."""
    made = set(product.outputs) | {n for o in chain for n in o.outputs}
    rounds = any(o.primitive in _ROUNDINGS for o in chain)
    names = []
    for operation in chain:
        if rounds and operation.primitive in (*_ROUNDINGS, "max", "min"):
            names.append("rounding")
        elif operation.kind == CAST:
            narrow = operation.results[0].dtype.startswith(_NARROW)
            names.append("quantisation" if narrow else "cast")
        elif operation.kind == REDUCTION:
            names.append(_reduction(step, operations, operation))
        elif operation.kind == ELEMENTWISE:
            others = [n for n in operation.inputs if n is not None and n not in made]
            sources = [_source(step, operations, n) for n in others]
            names.append(_elementwise(operation, sources, product.results[0].size))
    return tuple(dict.fromkeys(name for name in names if name)) or ("elementwise",)


def _elementwise(operation: Operation, sources: Sequence[tuple[int, bool]], size: int) -> str:
    """The name of one operation, from its operands from outside (`_source`); empty where it is a part of others."""
    name, (largest, columns) = operation.primitive, max(sources, default=(0, False))
    if name in _ACTIVATIONS or (name == "max" and largest <= 1):
        return "activation"
    if name == "select_n":
        return "mask"
    if name in ("add", "sub", "add_any"):
        return "add" if largest >= size else "bias" if columns else "shift" if largest > 1 else ""
    if name in ("mul", "div"):
        return "gating" if largest >= size else "scale" if largest > 1 else ""
    return ""


def _source(step: Step, operations: Mapping[int, Operation], number: int) -> tuple[int, bool]:
    """Elements of what a value repeats, where it is a broadcast, and whether they differ along its last dimension."""
    array = step.values[number].array
    made_by = step.values[number].producer
    producer = None if made_by is None else operations.get(made_by)
    if producer is None or producer.kind != FREE or not producer.inputs:
        return array.size, array.size > 1 and array.shape[-1] > 1
    source = producer.source_of(number)
    if source is None:
        return 1, False
    size, columns = _source(step, operations, source)
    kept = producer.params.get("broadcast_dimensions")
    return size, columns and (kept is None or len(array.shape) - 1 in kept)


def _reduction(step: Step, operations: Mapping[int, Operation], operation: Operation) -> str:
    """A sum whose root is taken is a norm's; a maximum is a softmax's."""
    if operation.primitive == "reduce_max":
        return "softmax"
    front = list(operation.outputs)
    for _ in range(6):
        readers = [
            operations[u] for v in front for u, _ in step.values[v].uses if u is not None and u in operations
        ]
        if any(o.primitive in ("rsqrt", "sqrt") for o in readers):
            return "norm"
        size = operation.results[0].size
        front = [n for o in readers if o.results and o.results[0].size == size for n in o.outputs]
    return "sum"

"""What the backward pass keeps of the forward pass, and what it would keep if nothing were computed again.

Both are read from one jaxpr.  Kept is what operations of the forward pass make and those of the backward
pass (or of what it computes again) read.  Without recomputation it would also keep every value that is
computed again and then read by the backward pass: these are what `jax.grad` saves where nothing says
otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from dsjax.plan.explanation.jaxpr import Step
from dsjax.plan.explanation.operations import FREE

_LATER = ("backward", "recomputed")


@dataclass(frozen=True)
class Kept:
    """Bytes of one device, for one microbatch.

    Attributes:
      kept: by the program as it is, from the forward pass for the backward pass.
      without: by the same program without recomputation.
      alive: the most that is computed again and waits for the backward pass at once: of one `jax.checkpoint`.
      recomputed_flops: of a step, of all that runs a second time.
    """

    kept: float
    without: float
    alive: float
    recomputed_flops: float

    @property
    def freed(self) -> float:
        """What recomputation saves."""
        return max(0.0, self.without - self.kept - self.alive)


def kept(step: Step) -> Kept:
    """What recomputation frees in a step."""
    slices = defaultdict(list)
    for number, value in enumerate(step.values):
        if value.source is not None and value.producer is None:
            slices[value.source].append(number)
    stays, again = set[int](), set[int]()
    for number, value in enumerate(step.values):
        phases = {phase for _, phase in value.uses}
        if value.phase == "forward" and phases & set(_LATER):
            stays.add(_root(step, number))
        elif value.phase == "recomputed" and "backward" in phases:
            again.add(_root(step, number))
    stays = {n for n in stays if step.values[n].phase == "forward"}
    # What is kept only to compute the rest again would not be needed without that.
    direct = {n for n in stays if _read_backward(step, n, slices)}
    again = {n for n in again if step.values[n].phase == "recomputed"}
    calls: dict[int, float] = defaultdict(float)
    for n in again:
        call, region = step.values[n].again or (0, 0)
        calls[call] += step.bytes_of(n) * _turns(step, n, region)
    return Kept(
        kept=sum(step.bytes_of(n) for n in stays),
        without=sum(step.bytes_of(n) for n in direct)
        + sum(step.bytes_of(n) * _turns(step, n) for n in again),
        alive=max(calls.values(), default=0.0),
        recomputed_flops=sum(o.flops * o.times for o in step.operations if o.phase == "recomputed"),
    )


def _root(step: Step, number: int) -> int:
    """The value whose memory a reshaped or renamed one shares; a pinned sharding moves it elsewhere."""
    value = step.values[number]
    if value.producer is None:
        return number
    producer = step.producers.get(value.producer)
    if producer is None or producer.kind != FREE or producer.primitive == "sharding_constraint":
        return number
    source = producer.source_of(number)
    if source is None or step.values[source].array.size != value.array.size:
        return number
    return _root(step, source)


def _read_backward(step: Step, number: int, slices: dict[int, list[int]]) -> bool:
    """Whether an operation of the backward pass itself reads a value, in whichever loop."""
    if any(phase == "backward" and use is not None for use, phase in step.values[number].uses):
        return True
    inner = [n for n in slices[number] if step.regions[step.values[n].region].phase in _LATER]
    return any(_read_backward(step, n, slices) for n in inner)


def _turns(step: Step, number: int, within: int = 0) -> int:
    """How many of a value a region sees: the turns of the loops between them that go backward."""
    turns, region = 1, step.values[number].region
    while True:
        around = step.regions[region]
        if region == within or around.parent is None or around.phase not in _LATER:
            return turns
        turns, region = turns * around.times, around.parent

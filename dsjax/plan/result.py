"""What a plan says: memory, traffic, arithmetic, time and money of a training step on a cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one device.

    Attributes:
      gradients: as they are summed, in the parameters' places; part of what XLA calls temporary.
      activations: everything else that exists during the step only: activations, gathered parameters, logits.
      exchange: what error feedback owes, and the parameters of workers that train apart.
      other: arguments and results that are none of these (`report` of a function that is not dsjax's).
      total: argument + output + temporary - alias (+ code), by XLA where compiled.
      capacity: of the device; limit: what jax lets a program use of it.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    batch: int
    exchange: int
    other: int
    total: int
    capacity: int
    limit: int

    @property
    def headroom(self) -> int:
        """Bytes left under the limit; negative where it does not fit."""
        return self.limit - self.total

    @property
    def fits(self) -> bool:
        """Whether the step stays within the limit."""
        return self.headroom >= 0


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind, over the same axes and link, of one type, in the same loops.

    Attributes:
      link: its name; crosses: it leaves a node.
      sent: bytes that a device sends in a step, on average.
      times: how many run in a step; every: in one of so many steps.
      loop: turns of the loops around them, outermost first; () for none.
      seconds: on the wire, in a step; hidden: how much of it computation beside them takes at least.
    """

    kind: str
    axes: tuple[str, ...]
    link: str
    crosses: bool
    dtype: str
    sent: float
    times: int
    loop: tuple[int | None, ...]
    seconds: float
    hidden: float
    every: int = 1


@dataclass(frozen=True)
class Flops:
    """FLOPs of a step on all devices.

    Attributes:
      model: what the model's mathematics takes, forward and backward, each once; None where it is not known.
      hardware: what is computed, with what is computed again; None where nothing was compiled.
    """

    model: float | None
    hardware: float | None


@dataclass(frozen=True)
class Roofline:
    """Seconds of a step that each resource of a device takes at its peak, if it did nothing else."""

    compute: float
    memory: float
    node: float
    network: float

    @property
    def bound(self) -> str:
        """The resource that takes the longest."""
        values = dataclasses.asdict(self)
        return max(values, key=lambda name: values[name])


@dataclass(frozen=True)
class Forecast:
    """Time and money.

    Attributes:
      step_seconds: predicted; compute_seconds, exposed_seconds and idle_seconds (of the busiest stage of a
        pipeline) are its parts.
      ratio: the part of these seconds that measured steps added, a factor; 1 where none were measured.
      tokens: of the whole run; days, dollars, kwh: to train on so many.
      mfu: model FLOPs over the peak of the type that the model multiplies in.
    """

    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    idle_seconds: float = 0.0
    ratio: float = 1.0
    mfu: float | None = None
    tokens_per_second: float | None = None
    tokens: float | None = None
    days: float | None = None
    dollars: float | None = None
    kwh: float | None = None


@dataclass(frozen=True)
class Pipelined:
    """The pipeline of a step.

    Attributes:
      microbatches: of a pass; passes: of a step.
      layers: of each virtual stage, in order.
      bubble: share of the time of all stages in which nothing is computed, of a simulated pass; bubble_formula: for
        equal stages and links that take no time.
      stash_bytes: what a device keeps from tick to tick.
      forward_seconds, backward_seconds, weight_seconds: of a microbatch in a chunk, [virtual][stages];
        weight_seconds: None where the backward is whole.
      link_seconds: of a tick beside what is computed in it.
    """

    schedule: str
    stages: int
    microbatches: int
    passes: int
    virtual: int
    layers: tuple[int, ...]
    ticks: int
    bubble: float
    bubble_formula: float
    stash_bytes: int
    forward_seconds: list[list[float]]
    backward_seconds: list[list[float]]
    weight_seconds: list[list[float]] | None
    link_seconds: float


@dataclass(frozen=True)
class Change:
    """Settings that were compiled and make the step fit.

    Attributes:
      settings: as they are typed on the command line.
      total: bytes a device; step_seconds: predicted.
    """

    settings: str
    total: int
    step_seconds: float


@dataclass(frozen=True)
class Plan:
    """A training step on a cluster.

    Attributes:
      compiled: the numbers are of the compiled program; otherwise of formulas.
      mesh: axis -> size, of axes with more than one device.
      settings: of the batch and of memory, as in the config's section train.
      placement: kind of operator -> over which mesh axes it is cut, in words; empty where it is not known.
      traffic: largest first.
      hidden_share: of the time on the wire; None where nothing is sent, or nothing was compiled.
      compile_seconds: tracing, lowering and compiling.
      options: XLA's, as chosen for the chip.
      changes: where it does not fit, settings with which it does.
      pipeline: None where there is none; traffic, roofline and forecast are then of the busiest stage.
    """

    target: str
    devices: int
    compiled: bool
    mesh: Mapping[str, int]
    settings: Mapping[str, Any]
    memory: MemoryUse
    traffic: tuple[Traffic, ...]
    hidden_share: float | None
    flops: Flops
    roofline: Roofline
    forecast: Forecast
    compile_seconds: float
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    placement: Mapping[str, str] = field(default_factory=dict)
    pipeline: Pipelined | None = None

    @property
    def fits(self) -> bool:
        """Whether the step stays within what jax lets a program use of a device."""
        return self.memory.fits

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON's types: bytes, seconds, FLOPs, US dollars."""
        values = dataclasses.asdict(self)
        values["memory"] |= {"headroom": self.memory.headroom}
        values["roofline"] |= {"bound": self.roofline.bound}
        formula = f"{FORMULA} {PIPELINE_FORMULA}" if self.pipeline else FORMULA
        return {**values, "fits": self.fits, "formula": formula}


FORMULA = (
    "step = max(compute + exposed, busiest link). compute: over every instruction, the longer of its FLOPs at "
    "75% of the chip's peak and its bytes at 85% of the memory's; exposed: over every collective, what its time "
    "on the wire (bytes at 85% of the link, and log2(devices) latencies) exceeds the compute time of what is "
    "issued between its start and its end, loops by their turns."
)
PIPELINE_FORMULA = (
    "With a pipeline: passes x the schedule, run tick by tick with each stage's own forward, backward and weight "
    "gradient (compute + exposed) and the hand-over of a tick, plus what stands before and after the ticks."
)

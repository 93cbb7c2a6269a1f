"""A stack of layers as a pipeline stores it: which layer lies in which slot, for states and for their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.config.parallel import PipelineConfig
from dsjax.errors import ConfigError
from dsjax.mesh import map_named, named_leaves
from dsjax.models import Stages
from dsjax.pipelining.executor import Work
from dsjax.pipelining.partition import Partition, even, restacked, sizes_of, told
from dsjax.pipelining.schedule import bubble_formula, make_schedule
from dsjax.pipelining.slots import allot
from dsjax.train.losses import stack_of
from dsjax.train.pipelined import Pipelining
from dsjax.train.stage_costs import Costs

# Microbatches a stage, where the config names none: a bubble below a fifth, and stashes still small.
_MICROBATCHES_A_STAGE = 4


@dataclass(frozen=True)
class Stacking:
    """How the stack of a model's layers is shared out over the stages of a mesh."""

    pipelining: Pipelining
    partition: Partition

    @property
    def path(self) -> str:
        """The stack's path in the model."""
        return self.pipelining.stages.layers

    @property
    def slots(self) -> np.ndarray:
        """The layer in each slot, -1 where there is none."""
        return self.partition.slots

    @property
    def kind(self) -> tuple[str, int, int]:
        """(schedule, stages, chunks a stage)."""
        return self.pipelining.work.schedule.name, self.partition.stages, self.partition.virtual

    @property
    def words(self) -> str:
        """For people: the schedule, how layers are shared out, and the share of time that stages stand idle."""
        schedule = self.pipelining.work.schedule
        idle = bubble_formula(schedule.name, schedule.stages, schedule.microbatches, schedule.virtual)
        return (
            f"pipeline: {schedule.name}, stages of {told(self.partition)} layers, {schedule.microbatches} microbatches "
            f"a pass, bubble {idle:.1%} if stages are equal"
        )


@dataclass(frozen=True)
class Stack:
    """Which leaves of a state (parameters, moments of them, random streams) are of the stack of layers.

    Attributes:
      path: the stack's, in the model.
      paths: those of all of the model's variables.
    """

    path: str
    paths: frozenset[str]

    def holds(self, name: str, shape: Sequence[int], slots: int) -> bool:
        """Whether a leaf of so many slots is one; its name ends with that of its variable."""
        if not shape or shape[0] != slots or name.startswith("residuals/"):
            return False
        parts = name.split("/")
        ends = ("/".join(parts[i:]) for i in range(len(parts)))
        owner = next((end for end in ends if end in self.paths), "")
        return owner.startswith(f"{self.path}/")

    def moved(self, tree: Any, held: np.ndarray, wanted: np.ndarray) -> Any:
        """A tree whose stacks lie in the slots `held` with them in the slots `wanted`."""
        if np.array_equal(held, wanted):
            return tree

        def one(name: str, leaf: Any) -> Any:
            return restacked(leaf, held, wanted) if self.holds(name, leaf.shape, len(held)) else leaf

        return map_named(one, tree)


@dataclass(frozen=True)
class Held:
    """How a checkpoint holds a stack of layers; what is written beside it."""

    path: str
    slots: tuple[int, ...]

    @staticmethod
    def of(stacking: Stacking | None, facts: Mapping[str, Any]) -> Held | None:
        """That of a checkpoint by its facts; one without a word of it holds its layers in order."""
        told = facts.get("layers")
        if told:
            return Held(told["path"], tuple(told["slots"]))
        return None if stacking is None else Held(stacking.path, tuple(range(stacking.partition.layers)))

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return {"path": self.path, "slots": list(self.slots)}

    def like(self, abstract: Any, wanted: np.ndarray, stack: Stack) -> Any:
        """An abstract tree whose stacks have the slots `wanted`, with this one's."""

        def one(name: str, leaf: Any) -> Any:
            if not stack.holds(name, leaf.shape, len(wanted)):
                return leaf
            mesh, spec = leaf.sharding.mesh, leaf.sharding.spec
            if len(self.slots) % mesh.shape["pipeline"]:
                spec = P(None, *spec[1:])
            return jax.ShapeDtypeStruct(
                (len(self.slots), *leaf.shape[1:]), leaf.dtype, sharding=NamedSharding(mesh, spec)
            )

        return map_named(one, abstract)


@dataclass(frozen=True)
class Found:
    """What balancing found for a pipeline whose config leaves it open; a run that goes on begins with it.

    Attributes:
      layers: of each virtual stage; None: as they are by default.
      microbatches: of a pass; None: as many as by default.
      tried: other numbers of microbatches that were timed, whatever came of it.
    """

    layers: tuple[int, ...] | None = None
    microbatches: int | None = None
    tried: tuple[int, ...] = ()

    def facts(self, stacking: Stacking | None, under: Sequence[Any]) -> dict[str, Any] | None:
        """As JSON, with what was timed (see `of`); None where nothing was."""
        if self == Found() or stacking is None:
            return None
        return {
            "layers": self.layers and list(self.layers),
            "microbatches": self.microbatches,
            "tried": list(self.tried),
            "under": [*stacking.kind, *under],
        }

    @staticmethod
    def of(
        facts: Mapping[str, Any], pipeline: PipelineConfig, stacking: Stacking | None, under: Sequence[Any]
    ) -> Found:
        """What a checkpoint's facts tell, as far as it holds here: under another number of stages nothing does.

        Args:
          pipeline: what it sets is not open.
          under: all else that numbers of microbatches were compared under; in another case they tell nothing.
        """
        told = facts.get("balanced")
        if told is None or stacking is None:
            return Found()
        layers, microbatches, tried = told["layers"], told["microbatches"], tuple(told["tried"])
        if pipeline.layers is not None or (layers and len(layers) != len(stacking.partition.counts)):
            layers = None
        if pipeline.microbatches is not None or told["under"] != [*stacking.kind, *under]:
            microbatches, tried = None, ()
        return Found(layers and tuple(layers), microbatches, tried)


def stacking_of(
    stages: Stages | None,
    model: nnx.Module,
    mesh: Mesh,
    pipeline: PipelineConfig,
    microbatches: int,
    costs: Costs | None = None,
    found: tuple[int, ...] | None = None,
) -> Stacking | None:
    """The stacking of a model over a mesh; None where the mesh has one stage.

    Args:
      model: abstract.
      microbatches: a pass of the pipeline.
      costs: of the model's parts, by which layers are shared out; evenly without.
      found: layers of each virtual stage, where balancing found them; else as set, or by the costs.

    Raises:
      ConfigError: a model that cannot be cut, or settings that do not go together; with what would work.
    """
    count = mesh.shape["pipeline"]
    if count == 1:
        return None
    if stages is None:
        raise ConfigError(
            f"mesh.pipeline: {count} stages need a model that says where it can be cut: give `stages` (a dsjax.Stages "
            "of embed, layer and head) beside init (a module:function returns both), or set mesh.pipeline=1"
        )
    _check_model(stages, model)
    layers = sizes_of(_stack_leaves(stages, model))
    virtual = pipeline.virtual_stages or (2 if pipeline.schedule == "interleaved" else 1)
    schedule = make_schedule(pipeline.schedule, count, microbatches, virtual)
    recompute = pipeline.schedule != "zero_bubble" if pipeline.recompute is None else pipeline.recompute
    if not recompute and pipeline.schedule == "zero_bubble" and stages.remat != "none":
        raise ConfigError(
            f"train.remat: {stages.remat} computes a layer again in the backward pass, of which zero_bubble would "
            "gain nothing; set train.remat=none, or pipeline.schedule=1f1b"
        )
    if found is not None and len(found) == count * virtual and sum(found) == layers:
        partition = Partition(count, virtual, found)
    elif pipeline.layers is not None:
        partition = _given(pipeline, layers, count, virtual)
    elif costs is not None:
        partition = costs.partition(layers, count, virtual, recompute)
    else:
        partition = even(layers, count, virtual)
    slots = allot(schedule, "inputs" if recompute else "residuals")
    work = Work(schedule, slots, partition.depth, partition.counts)
    return Stacking(Pipelining(stages, work), partition)


def refuse_empty_slots(optimizer: str, stacking: Stacking | None) -> None:
    """Refuses stages of unequal length with an optimizer that unused slots would mislead.

    Raises:
      ConfigError: naming layers that work, or another optimizer.
    """
    if optimizer != "adafactor" or stacking is None or len(set(stacking.partition.counts)) == 1:
        return
    partition, parts = stacking.partition, len(stacking.partition.counts)
    works = f"set pipeline.layers={[partition.layers // parts] * parts}, or another optimizer"
    if partition.layers % parts:
        works = f"{partition.layers} layers do not divide into {parts} stages, so take another optimizer"
    raise ConfigError(
        f"optimizer.kind: adafactor measures whole arrays, and stages of {told(partition)} layers leave slots of "
        f"theirs empty; {works}"
    )


def _stack_leaves(stages: Stages, model: nnx.Module) -> dict[str, Any]:
    leaves = named_leaves(nnx.state(model, nnx.Param))
    return {name: leaf for name, leaf in leaves.items() if f"{name}/".startswith(f"{stages.layers}/")}


def _check_model(stages: Stages, model: nnx.Module) -> None:
    stack_of(model, stages)
    if jax.tree.leaves(nnx.state(model, nnx.BatchStat)):
        raise ConfigError(
            "mesh.pipeline: the model has BatchNorm statistics, which would be of one stage's microbatch; use a norm "
            "without running statistics (LayerNorm, RMSNorm, GroupNorm), or mesh.pipeline=1"
        )
    if stages.remat.startswith("every_"):
        raise ConfigError(
            f"train.remat: {stages.remat} groups the layers of one stack; a stage of a pipeline keeps its input alone "
            "(pipeline.recompute) or takes train.remat none, full or dots"
        )


def _given(pipeline: PipelineConfig, layers: int, stages: int, virtual: int) -> Partition:
    counts = tuple(pipeline.layers or ())
    fault = None
    if len(counts) != stages * virtual:
        fault = f"names {len(counts)} stages, there are {stages * virtual} (mesh.pipeline x virtual_stages)"
    elif sum(counts) != layers:
        fault = f"adds up to {sum(counts)} layers, the model has {layers}"
    if fault:
        works = list(even(layers, stages, virtual).counts)
        raise ConfigError(f"pipeline.layers: {list(counts)} {fault}; {works} works")
    return Partition(stages, virtual, counts)


def microbatches_of(pipeline: PipelineConfig, stages: int, rows: int | None, found: int | None = None) -> int:
    """Microbatches of a pass: as set, as found, or the most up to four a stage that divide a device's rows.

    Args:
      rows: rows of a device in a pass; None where only the batches will tell.
      found: what balancing found.
    """
    if stages == 1:
        return 1
    known = pipeline.microbatches or found
    if known is not None:
        return known
    most = _MICROBATCHES_A_STAGE * stages
    if rows is None:
        return most
    return next(n for n in range(min(most, rows), 0, -1) if rows % n == 0)

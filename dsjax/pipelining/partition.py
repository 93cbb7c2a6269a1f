"""Which layers lie on which stage, and how a stack of layers is stored for it.

Virtual stage ``chunk * stages + stage`` holds the next layers in order.  A stack is stored in slots [stages *
virtual * depth], stage by stage and in a stage chunk by chunk, so that the leading dimension is cut over
`pipeline`; a chunk of fewer layers than `depth` leaves its last slots unused (zeros).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsjax.errors import ConfigError


@dataclass(frozen=True)
class Partition:
    """Layers of each virtual stage.

    Attributes:
      counts: layers of virtual stage 0, 1, ...; stages * virtual of them.
    """

    stages: int
    virtual: int
    counts: tuple[int, ...]

    @property
    def layers(self) -> int:
        """All layers."""
        return sum(self.counts)

    @property
    def depth(self) -> int:
        """Slots of a chunk."""
        return max(self.counts)

    @cached_property
    def slots(self) -> np.ndarray:
        """The layer in each slot, -1 where there is none: int32 [stages * virtual * depth]."""
        starts = np.concatenate([[0], np.cumsum(self.counts)])
        table = np.full((self.stages, self.virtual, self.depth), -1, np.int32)
        for k, count in enumerate(self.counts):
            chunk, stage = divmod(k, self.stages)
            table[stage, chunk, :count] = np.arange(starts[k], starts[k] + count)
        return table.reshape(-1)

    @property
    def in_order(self) -> bool:
        """Whether slot i holds layer i."""
        return np.array_equal(self.slots, np.arange(self.layers))

    def of_stage(self, stage: int) -> int:
        """Layers of a stage, all chunks together."""
        return sum(self.counts[stage :: self.stages])


def even(layers: int, stages: int, virtual: int = 1) -> Partition:
    """Layers shared out as evenly as they go, one fewer at the ends first: embedding and head lie there.

    Raises:
      ConfigError: fewer layers than virtual stages.
    """
    parts = stages * virtual
    if layers < parts:
        chunks, works = layers // stages, []
        if virtual > 1 and chunks:
            works.append(f"pipeline.virtual_stages={chunks}" if chunks > 1 else "pipeline.schedule=1f1b")
        if layers >= 2 * virtual:
            works.append(f"a mesh.pipeline of at most {layers // virtual}")
        raise ConfigError(
            f"mesh.pipeline: {stages} stages x {virtual} chunks need {parts} layers, the model has {layers}; use "
            f"{' or '.join(works) or 'mesh.pipeline=1'}"
        )
    counts = [layers // parts] * parts
    # The last stage also has the head, the first the embedding: both are spared as long as possible.
    order = sorted(range(parts), key=lambda k: (k == parts - 1, k == 0, k))
    for k in order[: layers % parts]:
        counts[k] += 1
    return Partition(stages, virtual, tuple(counts))


def balanced(
    layers: Sequence[float],
    stages: int,
    virtual: int = 1,
    *,
    first: float = 0.0,
    last: float = 0.0,
    pace: Sequence[float] | None = None,
    last_share: float = 1.0,
    most: int | None = None,
) -> Partition:
    """The partition whose slowest virtual stage is fastest: dynamic programming over cuts.

    best(k, j) = min over i < j of max(best(k - 1, i), time of layers i..j-1 on virtual stage k).

    Args:
      layers: cost of each layer.
      first, last: cost of the embedding and of the head, on the first and the last virtual stage.
      pace: seconds per cost of each stage, relative; equal by default.
      most: layers of a virtual stage at most.
      last_share: what a layer costs on the last virtual stage, as a share of its cost.

    Raises:
      ConfigError: fewer layers than virtual stages.
    """
    total, parts = len(layers), stages * virtual
    even(total, stages, virtual)
    paces = [1.0] * stages if pace is None else list(pace)
    sums = np.concatenate([[0.0], np.cumsum(layers)])
    best = np.full((parts + 1, total + 1), np.inf)
    # Of partitions with the same slowest stage the one with the smallest sum of squares: evenly spread.
    spread = np.full_like(best, np.inf)
    cut = np.zeros((parts + 1, total + 1), np.int64)
    best[0, 0], spread[0, 0] = 0.0, 0.0
    for k in range(1, parts + 1):
        extra = (first if k == 1 else 0.0) + (last if k == parts else 0.0)
        share = last_share if k == parts else 1.0
        for j in range(k, total - (parts - k) + 1):
            for i in range(max(k - 1, j - (most or total)), j):
                time = paces[(k - 1) % stages] * (share * (sums[j] - sums[i]) + extra)
                worst, square = max(best[k - 1, i], time), spread[k - 1, i] + time * time
                if (worst, square) < (best[k, j], spread[k, j]):
                    best[k, j], spread[k, j], cut[k, j] = worst, square, i
    ends = [total]
    for k in range(parts, 0, -1):
        ends.append(int(cut[k, ends[-1]]))
    counts = tuple(end - start for start, end in zip(ends[:0:-1], ends[-2::-1], strict=True))
    return Partition(stages, virtual, counts)


def restacked(leaf: Any, held: np.ndarray, wanted: np.ndarray) -> Any:
    """A stack stored in the slots `held` as the slots `wanted` want it; slots without a layer are zeros.

    Args:
      leaf: [len(held), ...].
      held, wanted: int [slots], the layer in each slot, -1 for none; both hold the same layers.
    """
    at = {int(layer): slot for slot, layer in enumerate(held) if layer >= 0}
    index = np.array([at[int(layer)] if layer >= 0 else 0 for layer in wanted])
    if np.array_equal(index, np.arange(leaf.shape[0])) and -1 not in wanted:
        return leaf
    taken = jnp.take(leaf, jnp.asarray(index), axis=0)
    used = jnp.asarray(wanted >= 0).reshape(-1, *(1,) * (leaf.ndim - 1))
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return taken
    return jnp.where(used, taken, jnp.zeros((), leaf.dtype))


def told(partition: Partition) -> str:
    """Layers a stage, for people: 4+4+4+3; chunks of a stage in brackets."""
    if partition.virtual == 1:
        return "+".join(map(str, partition.counts))
    chunks = [partition.counts[s :: partition.stages] for s in range(partition.stages)]
    return " | ".join("+".join(map(str, counts)) for counts in chunks)


def sizes_of(stack: Mapping[str, Any]) -> int:
    """Layers of a stack by its parameters' leading dimension.

    Raises:
      ConfigError: they differ, or there are none.
    """
    depths = {name: (leaf.shape or (0,))[0] for name, leaf in stack.items()}
    if not depths:
        raise ConfigError(
            "mesh.pipeline: the model's layers have no parameters, so there is nothing to share out"
        )
    if len(set(depths.values())) > 1:
        shown = ", ".join(f"{name} {depth}" for name, depth in list(depths.items())[:4])
        raise ConfigError(
            f"mesh.pipeline: the stacked layers differ in their leading dimension ({shown}); make them with "
            "dsjax.stacked, all of one size"
        )
    return next(iter(depths.values()))

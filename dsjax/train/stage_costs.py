"""What the parts of a model cost beside one another, counted from their jaxprs: FLOPs of matrix products."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from dsjax.models import Stages
from dsjax.pipelining.partition import Partition, balanced
from dsjax.train.losses import layer_result, stack_of


@dataclass(frozen=True)
class Costs:
    """Forward costs of a layer, of the embedding and of the head, in one unit."""

    layer: float
    first: float
    last: float

    def of_stages(self, partition: Partition, recompute: bool) -> list[list[float]]:
        """Cost of a forward and a backward of each [chunk][stage], in forwards of a layer.

        A backward costs two forwards, and one more where it computes the forward again; the last virtual
        stage's own forward is then left out.
        """
        first, last = self.first / self.layer, self.last / self.layer
        turn = 4.0 if recompute else 3.0
        table = []
        for chunk in range(partition.virtual):
            row = []
            for stage in range(partition.stages):
                k = chunk * partition.stages + stage
                end = k == len(partition.counts) - 1
                own = partition.counts[k] * (3.0 if end else turn)
                row.append(own + (3.0 * first if k == 0 else 0.0) + (3.0 * last if end else 0.0))
            table.append(row)
        return table

    def partition(
        self, layers: int, stages: int, virtual: int, recompute: bool, pace: Sequence[float] | None = None
    ) -> Partition:
        """The partition whose slowest virtual stage is fastest.

        Without a measured pace no stage gets more than one layer above the even share, and that only where the
        share is eight or more: every stage has slots for as many layers as the longest.

        Args:
          pace: seconds per cost of each stage, relative; equal by default.
        """
        paces = [1.0] * stages if pace is None else list(pace)
        turn, share = 4.0 if recompute else 3.0, -(-layers // (stages * virtual))
        most = None if pace is not None else share + (share >= 8)
        first, last = 3.0 * self.first / self.layer, 3.0 * self.last / self.layer
        # Of the last virtual stage's layers each costs less where their forward is left out.
        return balanced(
            [turn] * layers,
            stages,
            virtual,
            first=first,
            last=last,
            pace=paces,
            last_share=3.0 / turn,
            most=most,
        )


def costs_of(stages: Stages, init: Callable[[nnx.Rngs], nnx.Module], batch: Any) -> Costs | None:
    """The costs of a model's parts for an abstract microbatch; None where a layer has no matrix product."""

    def parts(key: jax.Array, batch: Any) -> Any:
        model = init(nnx.Rngs(key))
        model.eval()
        prepared = stages.prepare(batch)
        x = stages.embed(model, prepared)
        graph, variables = nnx.split(stack_of(model, stages))
        one = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], variables), copy=True)
        return model, prepared, x, one

    def embed(key: jax.Array, batch: Any) -> Any:
        return parts(key, batch)[2]

    def layer(key: jax.Array, batch: Any) -> Any:
        _, prepared, x, one = parts(key, batch)
        return layer_result(stages.layer(one, x, prepared))[:2]

    def head(key: jax.Array, batch: Any) -> Any:
        model, prepared, x, _ = parts(key, batch)
        return stages.head(model, x, prepared)[:2]

    key = jax.eval_shape(lambda: jax.random.key(0))
    first, both, end = (products(jax.make_jaxpr(f)(key, batch).jaxpr) for f in (embed, layer, head))
    return Costs(both - first, first, end - first) if both > first else None


def products(jaxpr: Any) -> float:
    """FLOPs of the matrix products of a jaxpr and of all that it calls; a loop's as often as it turns."""
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            total += 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[d] for d in contracted)
        inner = [sub for value in eqn.params.values() for sub in _jaxprs(value)]
        counts = [products(sub) for sub in inner]
        if eqn.primitive.name == "cond":
            total += max(counts, default=0.0)
        else:
            total += sum(counts) * eqn.params.get("length", 1)
    return total


def _jaxprs(value: Any) -> list[Any]:
    if hasattr(value, "jaxpr"):
        return [value.jaxpr]
    if hasattr(value, "eqns"):
        return [value]
    return [sub for item in value for sub in _jaxprs(item)] if isinstance(value, tuple | list) else []

"""Sums over examples and their gradients: of one microbatch, and added up over several.

Everything here is traced once and compiled once; sums and weights are added in fp32 (gradients as
`precision.gradients` says) and divided once, elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from dsjax.config.exchange import DilocoConfig
from dsjax.grad_sync import Exchange
from dsjax.mesh import Layout, map_named
from dsjax.mesh.inside import left_spec
from dsjax.mesh.remat import PRODUCTS
from dsjax.models import Stages
from dsjax.models.calls import LOSS, passing
from dsjax.precision.delayed import observed, probes, with_probes
from dsjax.train.formats import held_gradients, summed
from dsjax.train.injected import Injected, injecting
from dsjax.train.losses import Extras, normalised
from dsjax.train.pipelined import Pipelining
from dsjax.train.randomness import ExampleContext, at_step, examples
from dsjax.train.state import UNSCALED, Numbers

Batch = Mapping[str, Any]
Loss = Callable[[nnx.Module, Any], Any]


@dataclass(frozen=True)
class StepParts:
    """What a step is made of.

    Attributes:
      graph: the model's structure, from `nnx.split`.
      loss: ``loss(model, batch) -> (sum, weight[, extras])``.
      optimizer: an optax transformation over the trainable parameters.
      schedule: number of updates -> learning rate, for the record; None where it is not known.
      layout: mesh and rules.
      max_grad_norm: global gradient norm above which gradients are scaled down; None: never.
      remat: "none", or "full" or "dots" around a loss whose model does not do it by layer.
      stages: the model cut before, between and after its layers; None: it cannot be.
      pipelining: the stages and schedule of a mesh with `pipeline`; the loss is then theirs.
      exchange: of gradients between the replicas of `data`; None: there is one.
      apart: how workers train apart and meet; None: they exchange gradients at every step.
      numbers: how they are kept in range.
      injected: faults inside the model; its structure is then an open one (`models.calls`).
      after_step: changes the model's other variables by a step's extras (`ModelSpec`); None: nothing does.
      exact: the same in fp32, by which a step that is not finite is computed again; None: it is not.
    """

    graph: nnx.GraphDef
    loss: Loss
    optimizer: optax.GradientTransformation
    schedule: Callable[[jax.Array], jax.Array] | None
    layout: Layout
    max_grad_norm: float | None = None
    remat: str = "none"
    stages: Stages | None = None
    pipelining: Pipelining | None = None
    exchange: Exchange | None = None
    apart: DilocoConfig | None = None
    numbers: Numbers = UNSCALED
    injected: tuple[Injected, ...] = ()
    after_step: Callable[[Any, Mapping[str, Any]], Any] | None = None
    exact: StepParts | None = None

    def warming(self) -> StepParts:
        """The same with gradients exchanged as they are."""
        exact = self.exact and self.exact.warming()
        return replace(self, exchange=self.exchange and replace(self.exchange, warming=True), exact=exact)


@dataclass
class Sums:
    """Sums over examples: loss, weight, extras, and the gradient of the loss's sum."""

    loss: jax.Array
    weight: jax.Array
    extras: Extras
    grads: Any


jax.tree_util.register_dataclass(Sums, ["loss", "weight", "extras", "grads"], [])


@dataclass(frozen=True)
class Microbatches:
    """What gradients are summed over.

    Attributes:
      batch: arrays [A, B, ...]: A microbatches.
      positions: int32 [A, B], each example's place in the global batch.
      step: int32 [], the step's number.
      number: index of a microbatch -> its number, for random draws that are not by example.
      seed: float32 [], what the gradient of a loss starts from: gradients are larger by it; None: 1.
      data_step: int32 [], the batch's number.
    """

    batch: Batch
    positions: jax.Array
    step: jax.Array
    number: Callable[[Any], Any] = lambda index: index
    seed: jax.Array | None = None
    data_step: Any = 0

    def unit(self, weight: jax.Array) -> jax.Array:
        """What sums of gradients are divided by, for the mean over examples of a weight."""
        return weight if self.seed is None else weight * self.seed

    def __len__(self) -> int:
        return self.positions.shape[0]

    def at(self, index: Any) -> tuple[Batch, jax.Array, Any]:
        """(a microbatch, places of its examples, its number)."""
        if isinstance(index, int):
            batch, places = jax.tree.map(lambda x: x[index], (self.batch, self.positions))
        else:
            batch, places = jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), (self.batch, self.positions)
            )
        return batch, places, self.number(index)


def positions_of(batch: Batch) -> jax.Array:
    """int32 [A, B]: the place of each example of arrays [A, B, ...]."""
    leading = jax.tree.leaves(batch)[0].shape[:2]
    return jnp.arange(leading[0] * leading[1], dtype=jnp.int32).reshape(leading)


@contextlib.contextmanager
def computing(parts: StepParts, given: Microbatches, positions: jax.Array) -> Iterator[None]:
    """Model code that is traced inside draws by example and has the faults that are asked for.

    Args:
      positions: int32 [B], places of the examples.
    """
    rows = positions.shape[0]
    with examples(ExampleContext(positions)), injecting(parts.injected, parts.layout, given.data_step, rows):
        yield


def total(
    parts: StepParts, params: nnx.State, zeros: Any, model_state: nnx.State, given: Microbatches, index: Any
) -> tuple[jax.Array, Any]:
    """(the loss's sum, (weight, extras, the model's state)) of one microbatch.

    Args:
      zeros: `probes` of the model's state.
    """
    batch, positions, number = given.at(index)
    others = with_probes(model_state, zeros)
    model = nnx.merge(parts.graph, params, at_step(others, given.step, number), copy=True)
    model.train()
    with computing(parts, given, positions):
        loss, weight, extras = normalised(parts.loss(model, batch))
        loss = passing(LOSS, loss)
    return loss, (weight, extras, _kept_state(model, model_state))


def recomputed(parts: StepParts, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, computed again in its backward pass if the step's loss is."""
    if parts.remat == "full":
        return jax.checkpoint(function)
    if parts.remat == "dots":
        return jax.checkpoint(function, policy=PRODUCTS)
    return function


def of_microbatch(
    parts: StepParts, params: nnx.State, model_state: nnx.State, given: Microbatches, index: Any
) -> tuple[Sums, nnx.State]:
    """Sums and gradient of one microbatch, and the model's state after it."""
    loss_of = recomputed(parts, lambda params, zeros: total(parts, params, zeros, model_state, given, index))
    loss, pull, (weight, extras, new_state) = jax.vjp(loss_of, params, probes(model_state), has_aux=True)
    grads, magnitudes = pull(started(loss, given.seed))
    grads = held_gradients(parts.layout, parts.numbers, grads)
    return Sums(loss, weight, extras, grads), observed(new_state, magnitudes)


def started(loss: jax.Array, seed: jax.Array | None) -> jax.Array:
    """What the gradient of a loss starts from, in its type."""
    return jnp.ones_like(loss) if seed is None else seed.astype(loss.dtype)


def _kept_state(model: nnx.Module, before: nnx.State) -> nnx.State:
    """The model's non-trainable variables after the loss; random streams go back to their start.

    A stream's position is a function of the step (`randomness.at_step`), not something to carry. Frozen parameters
    stay what they were.
    """
    after = dict(nnx.state(model).flat_state())

    def kept(path: tuple[Any, ...], variable: Any) -> Any:
        if isinstance(variable, nnx.RngState | nnx.Param):
            return variable
        return variable.replace(jax.lax.stop_gradient(after[path][...]).astype(variable[...].dtype))

    return nnx.State.from_flat_path({path: kept(path, v) for path, v in before.flat_state()})


def accumulated(
    parts: StepParts, params: nnx.State, model_state: nnx.State, given: Microbatches, count: int
) -> tuple[Sums, nnx.State]:
    """Sums and gradients over the first `count` microbatches, and the model's state after them."""
    if count == 1:
        return of_microbatch(parts, params, model_state, given, 0)

    def one(index: Any, carry: tuple[Sums, nnx.State]) -> tuple[Sums, nnx.State]:
        so_far, (more, model_state) = carry[0], of_microbatch(parts, params, carry[1], given, index)
        grads = summed(parts.numbers, so_far.grads, more.grads, given.step, given.number(index))
        rest = jax.tree.map(jnp.add, replace(so_far, grads=()), replace(more, grads=()))
        return replace(rest, grads=grads), model_state

    shapes = jax.eval_shape(lambda p, s: of_microbatch(parts, p, s, given, 0)[0], params, model_state)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    zeros.grads = at_rest(parts.layout, zeros.grads)
    # To XLA the number of turns is unknown: it would write two of them out, or peel one off, and then hold the
    # activations of both.
    first = jax.lax.optimization_barrier(jnp.int32(0))
    return jax.lax.fori_loop(first, count, one, (zeros, model_state))


def at_rest(layout: Layout, tree: Any) -> Any:
    """Pins gradients to the places of their parameters."""
    if layout.alone:
        return tree
    if not layout.local:
        return jax.tree.map(jax.lax.with_sharding_constraint, tree, layout.param_shardings(tree))

    def pinned(path: str, leaf: Any) -> Any:
        return jax.lax.with_sharding_constraint(leaf, layout.place(left_spec(layout, path)))

    return map_named(pinned, tree)

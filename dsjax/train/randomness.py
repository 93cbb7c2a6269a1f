"""Random draws that do not depend on how the work is split.

A dropout mask is a function of (seed, layer, step, example's place in the global batch, position
in the sequence) and of nothing else, so it is the same for any number of devices, microbatches or
context ranks, and after a resume.  `flax.nnx.Dropout` is made to draw so while a training step is
traced; outside of one it behaves as Flax wrote it.

Other draws from a model's `nnx.Rngs` differ from step to step and microbatch to microbatch, but
are equal only for a fixed split.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

# A stream's count holds the number of draws in the low bits and the microbatch above them.
_DRAW_BITS = 20
_DRAW_MASK = (1 << _DRAW_BITS) - 1


@dataclass(frozen=True)
class ExampleContext:
    """Which examples are being computed.

    Attributes:
      examples: int32 [B], each example's place in the step's global batch.
      positions: int32 [S], each slot's position in the sequence; None where there is no sequence.
    """

    examples: jax.Array
    positions: Any = None


_context: contextvars.ContextVar[ExampleContext | None] = contextvars.ContextVar("examples", default=None)


@contextlib.contextmanager
def examples(context: ExampleContext) -> Iterator[None]:
    """Draws dropout masks by example while the code inside is traced."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def current_examples() -> jax.Array | None:
    """int32 [B], places in the global batch of the examples that are being computed; None outside of a step."""
    now = _context.get()
    return None if now is None else now.examples


@contextlib.contextmanager
def sequence_positions(positions: Any) -> Iterator[None]:
    """Tells the position in the sequence of each slot, for masks of [B, S, ...] activations."""
    now = _context.get()
    if now is None:
        yield
        return
    with examples(ExampleContext(now.examples, positions)):
        yield


def at_step(model_state: nnx.State, step: jax.Array, microbatch: jax.Array | int) -> nnx.State:
    """The model's state with its random streams moved to a step and microbatch."""

    def moved(variable: Any) -> Any:
        if isinstance(variable, nnx.RngKey):
            keys = variable[...]
            fold = jax.random.fold_in
            for _ in range(keys.ndim):
                fold = jax.vmap(fold, in_axes=(0, None))
            return variable.replace(fold(keys, step))
        if isinstance(variable, nnx.RngCount):
            offset = jnp.asarray(microbatch, jnp.uint32) << _DRAW_BITS
            return variable.replace(variable[...] + offset)
        return variable

    return jax.tree.map(moved, model_state, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _mask(stream: Any, keep: float, shape: tuple[int, ...], context: ExampleContext) -> jax.Array:
    key = jax.random.fold_in(stream.key[...], stream.count[...] & _DRAW_MASK)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, context.examples)
    positions = context.positions
    if positions is not None and len(shape) >= 3 and shape[1] == len(positions):
        by_position = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
        keys = jax.vmap(by_position, in_axes=(0, None))(keys, jnp.asarray(positions))
        draw = jax.vmap(jax.vmap(lambda k: jax.random.bernoulli(k, keep, shape[2:])))
    else:
        draw = jax.vmap(lambda k: jax.random.bernoulli(k, keep, shape[1:]))
    return draw(keys)


def _is_flat(inputs: jax.Array, context: ExampleContext) -> bool:
    """Whether these are activations [B * S, ...], as some layers take them on one device."""
    if context.positions is None or inputs.ndim != 2 or len(context.positions) == 1:
        return False
    return inputs.shape[0] == len(context.examples) * len(context.positions)


_flax_dropout = nnx.Dropout.__call__


def _dropout(
    self: nnx.Dropout, inputs: jax.Array, *, deterministic: bool | None = None, rngs: Any = None
) -> jax.Array:
    context = _context.get()
    if context is not None and _is_flat(inputs, context) and not self.broadcast_dims:
        rows = inputs.reshape(len(context.examples), len(context.positions), -1)
        return _dropout(self, rows, deterministic=deterministic, rngs=rngs).reshape(inputs.shape)
    stream = self.rngs if rngs is None else rngs
    if isinstance(stream, nnx.Rngs):
        stream = stream[self.rng_collection]
    off = self.deterministic if deterministic is None else deterministic
    by_example = (
        context is not None
        and isinstance(stream, nnx.RngStream)
        and off is False
        and 0.0 < self.rate < 1.0
        and inputs.ndim > 0
        and inputs.shape[0] == context.examples.shape[0]
        and 0 not in self.broadcast_dims
    )
    if not by_example:
        return _flax_dropout(self, inputs, deterministic=deterministic, rngs=rngs)
    assert context is not None
    keep = 1.0 - self.rate
    dims = {d % inputs.ndim for d in self.broadcast_dims}
    shape = tuple(1 if i in dims else n for i, n in enumerate(inputs.shape))
    mask = jnp.broadcast_to(_mask(stream, keep, shape, context), inputs.shape)
    stream.count[...] += 1
    return jnp.where(mask, inputs / keep, jnp.zeros_like(inputs))


nnx.Dropout.__call__ = _dropout  # type: ignore[method-assign]

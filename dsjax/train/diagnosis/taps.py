"""Taps on what goes into the modules of a model and comes out of them, forward and backward.

A tap hands values on unchanged and reads whether they and the gradient with respect to them are finite.  What it
has read leaves the program as the gradient of a probe, an input of zeros that nothing depends on: so it comes out of
loops over layers, recomputation and whatever else a loss is differentiated through.

Letter of shapes: B rows of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dsjax.models.calls import Call


class Reading(NamedTuple):
    """What a tap has read; float32, so that it can be a gradient. In a stack of layers all have a leading dimension.

    Attributes:
      bad: [B], above 0 where a row has a number that is not finite.
      bad_gradient: [B], the same of the gradient with respect to it.
      largest: [], the largest finite number, without its sign.
      largest_gradient: [], the same of the gradient.
      seen: [], how often the gradient came by; 0: never, and then nothing was read.
    """

    bad: Any
    bad_gradient: Any
    largest: Any
    largest_gradient: Any
    seen: Any


@dataclass(frozen=True)
class Point:
    """Where a tap is.

    Attributes:
      path, parent, stack, depth, number: as of `Call`.
      layer: where a path names it; None: it is in none, or in any of its stack.
      entry: at what goes in; False: at what comes out.
    """

    path: str
    parent: str | None
    stack: str | None
    depth: int | None
    number: int
    layer: int | None
    entry: bool


class Taps:
    """An interceptor of calls that taps them.

    Args:
      rows: of a microbatch.
      probes: where readings leave; without one a point is only noted.

    Attributes:
      points: those that were met, in the order of execution.
    """

    def __init__(self, rows: int, probes: Mapping[Point, Reading]):
        self.points: dict[Point, None] = {}
        self._rows, self._probes = rows, probes

    def __call__(self, call: Call, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        args, kwargs = self._tapped(call, True, (args, kwargs))
        return self._tapped(call, False, run(*args, **kwargs))

    def _tapped(self, call: Call, entry: bool, tree: Any) -> Any:
        # A module among the arguments is not to be taken apart: what it holds would be copied.
        leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: not isinstance(x, list | tuple | dict))
        numbers = [i for i, leaf in enumerate(leaves) if _of_numbers(leaf)]
        if not numbers:
            return tree
        layer = call.layer if call.depth is None else None
        point = Point(call.path, call.parent, call.stack, call.depth, call.number, layer, entry)
        self.points.setdefault(point)
        probe = self._probes.get(point)
        if probe is None:
            return tree
        if call.depth is not None:
            probe = jax.tree.map(lambda leaf: leaf[call.layer], probe)
        for i, value in zip(
            numbers, _tap(self._rows, entry, [leaves[i] for i in numbers], probe), strict=True
        ):
            leaves[i] = value
        return jax.tree.unflatten(structure, leaves)


def _of_numbers(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.size > 0 and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def probes_for(points: Sequence[Point], rows: int) -> list[Reading]:
    """Zeros for the readings of these points."""

    def zeros(point: Point) -> Reading:
        lead = () if point.depth is None else (point.depth,)
        row, one = jnp.zeros((*lead, rows)), jnp.zeros(lead)
        return Reading(row, row, one, one, one)

    return [zeros(point) for point in points]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _tap(rows: int, entry: bool, values: list[jax.Array], probe: Reading) -> list[jax.Array]:
    return values


def _tap_fwd(rows: int, entry: bool, values: list[jax.Array], probe: Reading) -> Any:
    return values, (bad_rows(values, rows, masks=entry), _largest(values))


def _tap_bwd(rows: int, entry: bool, read: Any, gradients: list[jax.Array]) -> Any:
    bad, largest = read
    reading = Reading(bad, bad_rows(gradients, rows), largest, _largest(gradients), jnp.ones(()))
    return gradients, reading


_tap.defvjp(_tap_fwd, _tap_bwd)


def bad_rows(values: list[jax.Array], rows: int, *, masks: bool = False) -> jax.Array:
    """float32 [B], 1 where a row has a number that is not finite; all rows, if one has that has no rows.

    Args:
      masks: -inf counts as finite: what goes into a module may be a mask.
    """

    def one(x: jax.Array) -> jax.Array:
        bad = ~jnp.isfinite(x)
        if masks:
            bad &= x != -jnp.inf
        # [rows, ...], or [rows * places, features]; of other shapes nothing tells where a row lies.
        flat = x.ndim == 2 and x.shape[0] % rows == 0
        if not x.ndim or not (x.shape[0] == rows or flat):
            return jnp.broadcast_to(jnp.any(bad), (rows,))
        if x.shape[0] != rows:
            bad = bad.reshape(rows, -1, *x.shape[1:])
        return jnp.any(bad, tuple(range(1, bad.ndim)))

    return sum((one(x) for x in values), jnp.zeros(rows, bool)).astype(jnp.float32)


def _largest(values: list[jax.Array]) -> jax.Array:
    """float32 [], the largest of all finite numbers, without its sign."""
    each = [jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0)).astype(jnp.float32) for x in values]
    return jnp.max(jnp.stack(each))

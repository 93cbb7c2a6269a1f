"""A layer's forward and backward apart, with what passes from the one to the other as plain arrays.

`jax.vjp` closes over what the backward pass needs: activations, but also the weights, their casts and gathered
copies, and masks.  Of these only what depends on the layer's input is worth keeping; the rest is made again
from the weights, so no stash ever holds a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

Layer = Callable[[Any, Any, Any, Any], Any]


class LayerVjp:
    """The vector-Jacobian product of one layer, cut where the backward pass takes over.

    Args:
      layer: ``layer(own, state, x, microbatch) -> ((y, loss), extras)``: own parameters, other variables, input,
        number of the microbatch; differentiated by `own` and `x`.
      own, state, x, microbatch: shapes, as abstract or concrete arrays.

    Attributes:
      kept: shapes of what the forward leaves for the backward.
    """

    def __init__(self, layer: Layer, own: Any, state: Any, x: Any, microbatch: Any):
        self._layer, self._x = layer, jax.tree.map(_shape, x)
        closed, shapes = jax.make_jaxpr(self._whole, return_shape=True)(own, state, x, microbatch)
        _, _, leaves = shapes
        before = len(jax.tree.leaves((own, state)))
        flat = _inlined(closed)
        inputs = flat.jaxpr.invars[before : before + len(jax.tree.leaves(x))]
        outputs = flat.jaxpr.outvars[len(flat.jaxpr.outvars) - len(leaves) :]
        depends, same = _depending(flat.jaxpr.eqns, inputs), _same(flat.jaxpr.eqns)
        self._places: dict[int, int] = {}
        kept: dict[Any, int] = {}
        for i, var in enumerate(outputs):
            if not isinstance(var, Literal) and var in depends:
                self._places[i] = kept.setdefault(same.get(var, var), len(kept))
        first = {place: i for i, place in reversed(self._places.items())}
        self._indices = [first[place] for place in range(len(kept))]
        self.kept = [leaves[i] for i in self._indices]
        self._split: _Split | None = None

    def _whole(self, own: Any, state: Any, x: Any, microbatch: Any) -> tuple[Any, Any, list[Any]]:
        out, pull, extras = jax.vjp(
            lambda own, x: self._layer(own, state, x, microbatch), own, x, has_aux=True
        )
        leaves, self._tree = jax.tree.flatten(pull)
        return out, extras, leaves

    def forward(self, own: Any, state: Any, x: Any, microbatch: Any) -> tuple[Any, Any, list[Any]]:
        """((y, loss), extras, kept)."""
        out, extras, leaves = self._whole(own, state, x, microbatch)
        return out, extras, [leaves[i] for i in self._indices]

    def _leaves(self, own: Any, state: Any, microbatch: Any, kept: Sequence[Any]) -> list[Any]:
        """All that the backward needs: what does not depend on x with any x (the compiler drops the rest)."""
        anything = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self._x)
        leaves = self._whole(own, state, anything, microbatch)[2]
        for i, place in self._places.items():
            leaves[i] = kept[place]
        return leaves

    def backward(self, own: Any, state: Any, microbatch: Any, kept: Any, gradient: Any) -> tuple[Any, Any]:
        """(gradient of own, gradient of x) for the gradient of (y, loss)."""
        leaves = self._leaves(own, state, microbatch, kept)
        return jax.tree.unflatten(self._tree, leaves)(gradient)

    # ---- in two halves (zero-bubble schedules) -------------------------------------------------

    def split(self, own: Any, state: Any, microbatch: Any, y: Any) -> list[Any]:
        """Cuts the backward pass in two; the shapes of what the first half leaves for the second."""
        leaves = jax.eval_shape(
            lambda own, state, x, m: self._whole(own, state, x, m)[2], own, state, self._x, microbatch
        )

        def pull(leaves: Any, gradient: Any) -> Any:
            return jax.tree.unflatten(self._tree, leaves)(gradient)

        closed, shapes = jax.make_jaxpr(pull, return_shape=True)(leaves, y)
        self._split = _Split(
            _inlined(closed), len(leaves), len(jax.tree.leaves(shapes[0])), jax.tree.structure(shapes[0])
        )
        return self._split.crossing

    def backward_input(
        self, own: Any, state: Any, microbatch: Any, kept: Any, gradient: Any
    ) -> tuple[list[Any], Any]:
        """(what is left for `backward_weight`, gradient of x): the half that the stage before waits for."""
        assert self._split is not None
        crossing, dx = self._split.first(
            self._leaves(own, state, microbatch, kept), jax.tree.leaves(gradient)
        )
        return crossing, jax.tree.unflatten(jax.tree.structure(self._x), dx)

    def backward_weight(
        self, own: Any, state: Any, microbatch: Any, kept: Any, crossing: Sequence[Any]
    ) -> Any:
        """The gradient of own: the half that nobody waits for."""
        assert self._split is not None
        return self._split.second(self._leaves(own, state, microbatch, kept), crossing)


class _Split:
    """A backward pass (leaves, gradient) -> (weights' gradients, input's gradient) as two programs."""

    def __init__(self, closed: Any, leaves: int, weights: int, tree: Any):
        jaxpr = closed.jaxpr
        self._constants = list(zip(jaxpr.constvars, closed.consts, strict=True))
        self._leaves, self._gradient = jaxpr.invars[:leaves], jaxpr.invars[leaves:]
        self._weights, self._inputs = jaxpr.outvars[:weights], jaxpr.outvars[weights:]
        self._tree = tree
        self._first = _needed(jaxpr.eqns, self._inputs)
        rest = [eqn for eqn in jaxpr.eqns if not any(eqn is one for one in self._first)]
        self._second = _needed(rest, self._weights)
        made = {var for eqn in self._first for var in eqn.outvars} | set(self._gradient)
        read = [var for eqn in self._second for var in eqn.invars] + list(self._weights)
        self._crossing = list(dict.fromkeys(v for v in read if not isinstance(v, Literal) and v in made))
        self.crossing = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self._crossing]

    def first(self, leaves: Sequence[Any], gradient: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        known = [
            *self._constants,
            *zip(self._leaves, leaves, strict=True),
            *zip(self._gradient, gradient, strict=True),
        ]
        crossing, inputs = _run(self._first, known, self._crossing, self._inputs)
        return crossing, inputs

    def second(self, leaves: Sequence[Any], crossing: Sequence[Any]) -> Any:
        known = [
            *self._constants,
            *zip(self._leaves, leaves, strict=True),
            *zip(self._crossing, crossing, strict=True),
        ]
        return jax.tree.unflatten(self._tree, _run(self._second, known, self._weights)[0])


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


# Operations that only rename or move values: two of one input are one.
_PLAIN = {
    "convert_element_type",
    "reshape",
    "transpose",
    "squeeze",
    "copy",
    "optimization_barrier",
    "sharding_constraint",
}


def _same(eqns: Iterable[Any]) -> dict[Any, Any]:
    """Variable -> an earlier one of the same value (a layer's input, cast by each of its projections)."""
    same: dict[Any, Any] = {}
    seen: dict[Any, Sequence[Any]] = {}
    for eqn in eqns:
        if eqn.primitive.name not in _PLAIN or any(isinstance(v, Literal) for v in eqn.invars):
            continue
        key = (eqn.primitive.name, tuple(same.get(v, v) for v in eqn.invars), str(eqn.params))
        before = seen.setdefault(key, eqn.outvars)
        same.update((v, same.get(b, b)) for v, b in zip(eqn.outvars, before, strict=True) if v is not b)
    return same


def _depending(eqns: Iterable[Any], inputs: Iterable[Any]) -> set[Any]:
    """The variables that depend on the inputs, by whole equations."""
    found = set(inputs)
    for eqn in eqns:
        if any(not isinstance(v, Literal) and v in found for v in eqn.invars):
            found.update(eqn.outvars)
    return found


def _needed(eqns: Sequence[Any], outputs: Iterable[Any]) -> list[Any]:
    """The equations that the outputs depend on, in order."""
    wanted = {v for v in outputs if not isinstance(v, Literal)}
    needed = []
    for eqn in reversed(eqns):
        if any(v in wanted for v in eqn.outvars):
            needed.append(eqn)
            wanted.update(v for v in eqn.invars if not isinstance(v, Literal))
    return needed[::-1]


def _inlined(closed: Any) -> Any:
    """A closed jaxpr with the equations of jitted functions in place of their calls.

    Taken whole, a call that mixes weights and inputs makes all that comes out of it depend on both.
    """
    inputs = (jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars)
    return jax.make_jaxpr(lambda *inputs: _inside(closed, inputs))(*inputs)


def _inside(closed: Any, inputs: Sequence[Any]) -> list[Any]:
    """The values that a closed jaxpr's equations give."""
    jaxpr = closed.jaxpr
    known = [*zip(jaxpr.constvars, closed.consts, strict=True), *zip(jaxpr.invars, inputs, strict=True)]
    return _run(jaxpr.eqns, known, jaxpr.outvars)[0]


def _run(
    eqns: Iterable[Any], known: Iterable[tuple[Any, Any]], *outputs: Sequence[Any]
) -> tuple[list[Any], ...]:
    """Evaluates equations from known variables; the values of each list of outputs."""
    values = dict(known)

    def read(var: Any) -> Any:
        return var.val if isinstance(var, Literal) else values[var]

    for eqn in eqns:
        if eqn.primitive.name in ("jit", "pjit"):
            results = _inside(eqn.params["jaxpr"], list(map(read, eqn.invars)))
        else:
            params = eqn.primitive.get_bind_params(eqn.params)
            result = eqn.primitive.bind(*map(read, eqn.invars), **params)
            results = result if eqn.primitive.multiple_results else [result]
        values.update(zip(eqn.outvars, results, strict=True))
    return tuple([read(var) for var in group] for group in outputs)

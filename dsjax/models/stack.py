"""A stack of equal layers: their parameters stacked, one loop over them, compiled once.

Each parameter has a leading `layers` dimension.  The loop's body gathers its layer's parameters over
`fsdp`, so that one layer is whole at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.mesh import gathered
from dsjax.mesh.remat import PRODUCTS
from dsjax.models.calls import in_layer
from dsjax.models.variables import Given, LayerNumber


def stacked(make: Callable[[nnx.Rngs], nnx.Module], layers: int, rngs: nnx.Rngs) -> nnx.Module:
    """One module that holds `layers` independently drawn ones along the leading dimension.

    A layer that has a `LayerNumber` is told its number.
    """
    create = nnx.vmap(lambda rngs: make(rngs), in_axes=(0,), out_axes=0)
    stack = nnx.split_rngs(splits=layers)(create)(rngs)
    numbers = nnx.state(stack, LayerNumber)
    if jax.tree.leaves(numbers):
        nnx.update(stack, jax.tree.map(lambda _: jnp.arange(layers, dtype=jnp.int32), numbers))
    return stack


def run_stacked(
    module: nnx.Module,
    x: Any,
    call: Callable[[Any, Any], Any],
    *,
    prefix: str = "layers",
    remat: str = "none",
    unroll: bool = False,
    source: tuple[Any, int] | None = None,
) -> Any:
    """Runs `call(layer, x) -> x` over the layers of a stacked module, in order; x may be any tree of arrays.

    Args:
      module: from `stacked`; variables other than parameters are updated in place.
      prefix: the module's path in the model.
      remat: none; full (each layer is computed again in the backward pass); dots (all of it but
        matrix products); every_N (the input of one layer in N is kept, the rest computed again; a
        group is written out, so compile time grows with N). A depth that N divides saves a copy of the
        parameters.
      unroll: writes the layers out one by one instead of looping (faster on CPU; compile time then
        grows with depth).
      source: (parameters of a deeper stack, number of its first layer that is run): they are what is computed
        with, and the module's own only take their gradients. So a few layers of a stack run without a copy.
    """
    graph, params, others = nnx.split(module, nnx.Param, ...)  # type: ignore[misc]
    depth = _depth(params)
    first, of = (0, depth) if source is None else (source[1], _depth(source[0]))

    def one(x: Any, scanned: tuple[Any, Any, Any]) -> tuple[Any, Any]:
        own, rest, index = scanned
        if source is not None:
            own = jax.tree.map(lambda whole, g: _value_of(whole[first + index], g), source[0], own)
        layer = nnx.merge(graph, gathered(own, prefix), rest, copy=True)
        with in_layer(prefix, index, of, first):
            x = call(layer, x)
        return x, nnx.state(layer, nnx.Not(nnx.Any(nnx.Param, Given)))

    def run(step: Callable[..., Any], x: Any, scanned: Any) -> tuple[Any, Any]:
        return jax.lax.scan(step, x, scanned, unroll=unroll or 1)

    group = re.fullmatch(r"every_(\d+)", remat)
    if group is None:
        x, rest = run(_recomputed(one, remat, source is not None), x, (params, others, jnp.arange(depth)))
        nnx.update(module, rest)
        return x

    size = min(int(group[1]), depth)

    def group_of(x: Any, scanned: tuple[Any, Any, Any]) -> tuple[Any, Any]:
        # Written out: a loop would stack what its layers keep, and XLA makes room for two groups' stacks.
        rests = []
        for i in range(jax.tree.leaves(scanned)[0].shape[0]):
            x, rest = one(x, jax.tree.map(itemgetter(i), scanned))
            rests.append(rest)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *rests)

    # A single group is no loop, so the second computation must be kept from merging with the first.
    several = jax.checkpoint(group_of)
    parts = []
    whole = depth // size * size
    for start, end, length in ((0, whole, size), (whole, depth, depth - whole)):
        if start < end:
            groups = jax.tree.map(
                partial(_groups, start=start, end=end, size=length), (params, others, jnp.arange(depth))
            )
            x, rest = run(several, x, groups)
            parts.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), rest))
    nnx.update(module, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts))
    return x


def _depth(stack: Any) -> int:
    return int(jax.tree.leaves(stack)[0].shape[0])


@jax.custom_vjp
def _value_of(value: jax.Array, takes_gradient: jax.Array) -> jax.Array:
    return value


def _value_of_fwd(value: jax.Array, takes_gradient: jax.Array) -> tuple[jax.Array, None]:
    return value, None


def _value_of_bwd(_: None, g: jax.Array) -> tuple[None, jax.Array]:
    return None, g


_value_of.defvjp(_value_of_fwd, _value_of_bwd)


def _groups(leaf: jax.Array, *, start: int, end: int, size: int) -> jax.Array:
    """Layers [start, end) in groups of `size`: [groups, size, ...]."""
    return leaf[start:end].reshape(-1, size, *leaf.shape[1:])


def _recomputed(step: Callable[..., Any], remat: str, short: bool) -> Callable[..., Any]:
    if remat == "none":
        return step
    policy = PRODUCTS if remat == "dots" else None
    # Inside a scan the compiler cannot merge the second computation with the first, unless it is so short that XLA
    # writes it out.
    return jax.checkpoint(step, policy=policy, prevent_cse=short)

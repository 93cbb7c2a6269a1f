"""Parameters gathered where they are used, and their gradients scattered back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.mesh.axes import SHARD_AXES
from dsjax.mesh.layout import Layout, axes_of_entry, current_layout
from dsjax.mesh.paths import map_named


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _resharded(x: jax.Array, used: NamedSharding, back: tuple[NamedSharding, ...]) -> jax.Array:
    """x as it is used; its gradient is pinned to the places `back`, one after the other."""
    return jax.lax.with_sharding_constraint(x, used)


def _resharded_fwd(x: jax.Array, used: NamedSharding, back: tuple[NamedSharding, ...]) -> tuple[Any, None]:
    return jax.lax.with_sharding_constraint(x, used), None


def _resharded_bwd(used: NamedSharding, back: tuple[NamedSharding, ...], _: None, g: Any) -> tuple[jax.Array]:
    for place in back:
        g = jax.lax.with_sharding_constraint(g, place)
    return (g,)


_resharded.defvjp(_resharded_fwd, _resharded_bwd)


def gathered(tree: Any, prefix: str = "") -> Any:
    """Parameters as they are used: gathered over `shard_axes`, their gradients scattered back over them.

    Called where the parameters are needed (in the body of the layer stack), so that only one layer
    is whole at a time.  The gradient is constrained to the parameter's own place, which makes the
    reduction over those axes a reduce-scatter.

    Args:
      tree: parameters, or the slice of one layer of stacked ones.
      prefix: the tree's path in the model, as in the model's table ("layers").
    """
    layout = current_layout()
    if layout is None or not layout.gather_axes:
        return tree
    return map_named(lambda path, leaf: _gather_one(layout, f"{prefix}/{path}".strip("/"), leaf), tree)


def gather_all(params: Any) -> Any:
    """The whole model's parameters gathered at once (`fsdp_gather: step`)."""
    layout = current_layout()
    if layout is None or not any(layout.mesh.shape[a] > 1 for a in SHARD_AXES):
        return params
    return map_named(lambda path, leaf: _gather_one(layout, path, leaf), params)


def _gather_one(layout: Layout, path: str, leaf: Any) -> Any:
    names = layout.names_of(path)
    if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
        return leaf
    if names is not None and len(names) == leaf.ndim + 1:
        # A slice of stacked layers: the table's names begin with the stacking dimension.
        names = names[1:]
    if names is None or len(names) != leaf.ndim:
        used, back = P(), [layout.spec_here(path, leaf.shape)]
    else:
        used = layout.param_entries(names, without=SHARD_AXES)
        back = [layout.param_entries(names, without) for without in _way_back(layout)]
    if len([n for n in names or () if n != "layers"]) >= 2:
        # Half the bytes on the wire; left to itself the compiler casts some of them after the gather.
        leaf = leaf.astype(layout.gathered_as(path, leaf.dtype))
    if not layout.alone:
        leaf = _resharded(leaf, layout.place(used), tuple(layout.place(spec) for spec in back))
    return gather_local(layout, path, leaf, layout.gathered_over(path), used)


def gather_local(layout: Layout, path: str, leaf: jax.Array, axes: Sequence[str], cut: P) -> jax.Array:
    """A parameter gathered over those of the axes that are left behind; its gradient is summed and scattered.

    Args:
      leaf: this device's part; of a stacked parameter also the slice of one layer.
      cut: how the axes that are left to the compiler cut it.
    """
    spec = layout.places.get(path, P())
    entries = spec[len(spec) - leaf.ndim :] if len(spec) > leaf.ndim else spec
    steps = [(i, axis) for i, entry in enumerate(entries) for axis in axes_of_entry(entry)]
    steps = [(i, axis) for i, axis in steps if axis in axes and axis in layout.local]
    if not steps:
        return leaf

    def whole(x: jax.Array) -> jax.Array:
        for dimension, axis in reversed(steps):
            x = jax.lax.all_gather(x, axis, axis=dimension, tiled=True)
        return x

    def parts(g: jax.Array) -> jax.Array:
        for dimension, axis in steps:
            g = jax.lax.psum_scatter(g, axis, scatter_dimension=dimension, tiled=True)
        return g

    gather, scatter = (on_own_part(layout, f, cut, {i for i, _ in steps}) for f in (whole, parts))
    moved = jax.custom_vjp(gather)
    moved.defvjp(lambda x: (gather(x), None), lambda _, g: (scatter(g),))
    return moved(leaf)


def on_own_part(
    layout: Layout, function: Callable[[jax.Array], jax.Array], cut: P, dimensions: set[int]
) -> Callable[[jax.Array], jax.Array]:
    """A collective over axes that are left behind, on what each device really holds.

    Of an array that the compiler has cut over other axes it would make a whole one first. Along a dimension that it
    has cut itself it has to be asked all the same: there the parts lie in another order.
    """
    if any(axes_of_entry(entry) for i, entry in enumerate(cut) if i in dimensions):
        return function
    return layout.shard_map(function, (cut,), cut)


def _way_back(layout: Layout) -> list[tuple[str, ...]]:
    """Mesh axes left out of the places that a matrix's gradient is pinned to, one place after the other.

    Where tensors are cut over further axes, a gradient that is pinned to its own place at once makes the
    partitioner gather activations there instead of adding up. (Whole first is no better in general: the sum
    over `data` would be of the whole and not of the shards.)
    """
    if layout.axis_size("tensor_rows") > 1:
        return [SHARD_AXES, ()]
    if layout.axis_size("tensor") > 1 and layout.axis_size("context") > 1:
        return [("context",), ()]
    return [()]

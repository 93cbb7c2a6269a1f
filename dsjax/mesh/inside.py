"""The layout as it is seen in the body of a shard_map that is manual over some mesh axes.

Parameters go in and gradients come out as those axes cut them; what the other axes cut is left to the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dsjax.mesh.layout import Layout, axes_of_entry
from dsjax.mesh.paths import map_named, named_leaves


def local_axes(layout: Layout, axes: Sequence[str]) -> tuple[str, ...]:
    """The mesh axes that a shard_map over `axes` is manual over: those and all of one device.

    Where those are all there are, the code inside may call back to the host, which jax does not allow otherwise.
    """
    return tuple(axis for axis, size in layout.mesh.shape.items() if size == 1 or axis in axes)


def inside(layout: Layout, axes: Sequence[str], *trees: Any) -> Layout:
    """The layout in the body of a shard_map over `axes` that gets these trees of variables."""
    places = {}
    for tree in trees:
        for path, leaf in named_leaves(tree).items():
            spec = _place(layout, path, leaf)
            places[path] = P(*spec, *(None,) * (leaf.ndim - len(spec)))
    return replace(layout, local=local_axes(layout, axes), places=places)


def _place(layout: Layout, path: str, leaf: Any) -> P:
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return layout.param_spec(path, leaf.shape)
    return P("pipeline") if layout.in_stack(path) else P()


def manual_specs(layout: Layout, tree: Any) -> Any:
    """How the axes that are left behind cut each of the variables."""
    return map_named(lambda path, leaf: only(layout.places[path], lambda axis: axis in layout.local), tree)


def left_spec(layout: Layout, path: str, without: Sequence[str] = ()) -> P:
    """How the axes that are left to the compiler cut a parameter."""
    return only(layout.places[path], lambda axis: axis not in layout.local and axis not in without)


def only(spec: P, wanted: Callable[[str], bool]) -> P:
    """A spec with those of its axes that are wanted."""
    return P(*(tuple(a for a in axes_of_entry(entry) if wanted(a)) or None for entry in spec))


def shard_map_over(layout: Layout, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    """`function` in the shard_map whose body sees this layout."""
    return jax.shard_map(
        function,
        mesh=layout.mesh,
        axis_names=set(layout.local),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )

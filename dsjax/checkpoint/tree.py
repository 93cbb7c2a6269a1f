"""A state as Orbax stores it: nested dictionaries of plain arrays, by the leaves' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dsjax.errors import InputError
from dsjax.mesh import named_leaves


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> Any:
    """A leaf as stored: random keys as their raw words."""
    if not _is_key(leaf):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raw = jax.eval_shape(jax.random.key_data, leaf)
        return jax.ShapeDtypeStruct(raw.shape, raw.dtype, sharding=leaf.sharding)
    return jax.random.key_data(leaf)


def to_stored(tree: Any) -> dict[str, Any]:
    """Nested dictionaries of the tree's (concrete or abstract) leaves, keyed by their names."""
    stored: dict[str, Any] = {}
    for name, leaf in named_leaves(tree).items():
        *parents, last = name.split("/")
        node = stored
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = _plain(leaf)
    return stored


def from_stored(stored: Mapping[str, Any], like: Any) -> Any:
    """The tree shaped like `like` with the leaves of `stored`."""
    by_name = named_leaves(stored)
    leaves = []
    for name, leaf in named_leaves(like).items():
        value = by_name[name]
        leaves.append(jax.random.wrap_key_data(value) if _is_key(leaf) else value)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def check_matches(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], where: str, instead: str = "run.dir"
) -> None:
    """Refuses a checkpoint whose arrays are not those of the model.

    Args:
      stored: nested metadata (shape, dtype) of what the checkpoint holds.
      wanted: nested abstract arrays of what the run needs.
      instead: what else could be another one.

    Raises:
      InputError: naming the paths that are missing, unexpected or of another shape or type.
    """
    have, want = named_leaves(stored), named_leaves(wanted)
    faults = [f"{name}: missing in the checkpoint" for name in want if name not in have]
    faults += [f"{name}: in the checkpoint but not in this model" for name in have if name not in want]
    for name in want:
        if name not in have:
            continue
        got, needs = tuple(have[name].shape), tuple(want[name].shape)
        if got != needs:
            faults.append(f"{name}: shape {got} in the checkpoint, {needs} in this model")
        elif jnp.dtype(have[name].dtype) != jnp.dtype(want[name].dtype):
            faults.append(
                f"{name}: {have[name].dtype} in the checkpoint, {want[name].dtype} in this model "
                "(precision.params, optimizer.state_dtype)"
            )
    if faults:
        shown = faults[:8] + ([f"... and {len(faults) - 8} more"] if len(faults) > 8 else [])
        of_optimizer = have.keys() ^ want.keys()
        if of_optimizer and all(name.startswith("opt_state/") for name in of_optimizer):
            why = "holds another optimizer's state; put optimizer.kind and optimizer.state_dtype back"
        else:
            why = "does not match this model; use the model it was made with"
        raise InputError([f"{where} {why}, or use another {instead}", *shown])

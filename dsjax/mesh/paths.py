"""Names of the leaves of a tree: `layers/attention/q_proj/kernel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax


def path_name(path: tuple[Any, ...]) -> str:
    """The leaf's name for a key path of `jax.tree_util`.

    A Flax variable adds an attribute key (`.value`) below its own name; it is left out, so that
    a tree of variables and the same tree of plain arrays have the same names.
    """
    parts = []
    for entry in path:
        if isinstance(entry, jax.tree_util.GetAttrKey):
            if entry.name in ("value", "raw_value"):
                continue
            parts.append(entry.name)
        elif isinstance(entry, jax.tree_util.DictKey):
            parts.append(str(entry.key))
        elif isinstance(entry, jax.tree_util.SequenceKey):
            parts.append(str(entry.idx))
        else:
            parts.append(str(getattr(entry, "key", entry)))
    return "/".join(parts)


def map_named(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` whose function also gets the leaf's name: ``function(name, leaf, *others)``."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: function(path_name(path), *leaves), tree, *rest
    )


def named_leaves(tree: Any) -> dict[str, Any]:
    """The tree's leaves by name, in tree order."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {path_name(path): leaf for path, leaf in leaves}


def is_matrix(names: Sequence[str | None] | None, ndim: int) -> bool:
    """Whether a parameter is a matrix (or more), not counting the dimension of stacked layers; heads are one.

    Args:
      names: from `Layout.optimizer_names`, which may know of the first dimension only.
    """
    names = names or ()
    of_heads = "head_dim" in names and ("heads" in names or "kv_heads" in names)
    return ndim - sum(name == "layers" for name in names) - of_heads >= 2

"""Where in the source an operation comes from, and the name of its layer.

A layer's path is, first found: the names of scopes (Linen modules, `jax.named_scope`); the path of the
parameter that it uses; that of another operation from the same place in the source (a derivative is
from the place of what it derives); the function that it stands in, with brackets behind its name.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dsjax.plan.explanation.operations import LAYOUT, PRODUCTS

if TYPE_CHECKING:
    from dsjax.plan.explanation.jaxpr import Operation

_WRAPPED = re.compile(r"\b(?:jvp|transpose|vmap|pmap|jit|shard_map|linearize)\(")
_NOISE = ("rematted_computation", "checkpoint", "closed_call", "while", "body", "cond", "remat")
_LEAVES = ("kernel", "embedding", "scale", "bias", "weight", "w", "b")
_LIBRARIES = ("jax", "jaxlib", "flax")
Frames = tuple[tuple[Any, int], ...]


class Places:
    """The place of every operation, while a program is walked; then the paths of their layers."""

    def __init__(self) -> None:
        roots = (getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES)
        self._roots = tuple(os.path.dirname(root) + os.sep for root in roots if root)
        self._frames: dict[int, Frames] = {}

    def note(self, number: int, frames: Frames) -> None:
        """Keeps where an operation comes from."""
        self._frames[number] = frames

    def frames(self, eqn: Any, around: Frames) -> Frames:
        """The frames of the user's code from which an equation was traced, innermost first.

        Args:
          around: those of the call that it stands in, for where it has none of its own (a library's function).
        """
        traceback = eqn.source_info.traceback
        if traceback is None:
            return around
        codes, places = traceback.raw_frames()
        own = (
            (c, p) for c, p in zip(codes, places, strict=True) if not c.co_filename.startswith(self._roots)
        )
        return tuple(own) or around

    def resolved(self, operations: Sequence[Operation]) -> list[Operation]:
        """The operations with the paths of their layers."""
        labels: dict[Any, str] = {}
        for o in operations:
            if o.weight and o.kind in PRODUCTS:
                labels.setdefault(self._frames.get(o.number), layer_of(o.weight))
        return [replace(o, path=self._path(o, labels)) for o in operations]

    def _path(self, operation: Operation, labels: dict[Any, str]) -> str:
        scopes = _scopes(operation.path)
        if scopes:
            return scopes
        frames = self._frames.get(operation.number)
        if operation.weight and operation.phase != "other":
            return layer_of(operation.weight)
        # A product that is turned goes by the name of what turns it.
        if operation.kind in (*PRODUCTS, LAYOUT) and frames in labels:
            return labels[frames]
        if not frames:
            return layer_of(operation.weight) if operation.weight else "(unnamed)"
        return frames[0][0].co_qualname.replace(".<locals>", "").replace(".<lambda>", "") + "()"


def _scopes(path: str) -> str:
    """The names of modules and scopes in a path of the tracer."""
    bare = _WRAPPED.sub("", path).replace(")", "")
    kept = [p for p in bare.split("/") if p and p not in _NOISE and "->" not in p and "<" not in p]
    return "/".join(kept)


def layer_of(label: str) -> str:
    """The module that an argument's path names: without what stands before `params`, and its own last name."""
    parts = label.split("/")
    if "params" in parts:
        parts = parts[parts.index("params") + 1 :]
    elif len(parts) > 1:
        parts = parts[1:]
    else:
        return f"argument {label}"
    for names in (("value", "raw_value"), _LEAVES):
        if len(parts) > 1 and parts[-1] in names:
            parts.pop()
    return "/".join(parts)


def collapsed(path: str) -> str:
    """A path with the numbers of repeated layers taken out: `layers/3/mlp` and `block_3` become one."""
    return re.sub(r"(?<![^/_])\d+(?=/|$)", "*", path)

"""A jitted step taken apart: its jaxpr, and the same step again from a jaxpr with other names in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core

from dsjax import aot


@dataclass(frozen=True)
class Traced:
    """A traced step.

    Attributes:
      closed: its jaxpr, one input a leaf.
      leaves: the abstract arguments, with shardings; names: their paths in the arguments.
      donated: of each leaf.
      out_shardings: of each result; None where they are the compiler's choice.
    """

    closed: Any
    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    donated: tuple[bool, ...]
    out_shardings: tuple[Any, ...]

    @property
    def shares(self) -> list[float | None]:
        """What of each argument a device holds."""
        return [_share(leaf) for leaf in self.leaves]

    def rejitted(self, closed: Any) -> Any:
        """The step as a jitted function of its leaves, from another jaxpr."""
        return jax.jit(
            jax.extend.core.jaxpr_as_fun(closed),
            donate_argnums=tuple(i for i, given in enumerate(self.donated) if given),
            out_shardings=list(self.out_shardings),
        )


def trace(jitted: Any, args: Sequence[Any], target: aot.Target) -> Traced:
    """Traces a step for a target.

    Args:
      jitted: from `jax.jit`, or a plain function, which is jitted as it is.
      args: trees of `jax.ShapeDtypeStruct`, or arrays, of which only the shapes and shardings count.
    """
    function = jitted if hasattr(jitted, "trace") else jax.jit(jitted)
    with aot.on(target):
        whole = jax.make_jaxpr(function)(*args)
    (call,) = whole.jaxpr.eqns
    flat, _ = jax.tree_util.tree_flatten_with_path(tuple(args))
    inner, known = call.params["jaxpr"], dict(zip(whole.jaxpr.constvars, whole.consts, strict=True))
    given = dict(zip(whole.jaxpr.invars, flat, strict=True))
    pairs = [given.get(v, ((), known.get(v))) for v in call.invars]
    return Traced(
        closed=inner,
        leaves=tuple(leaf for _, leaf in pairs),
        names=tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in pairs),
        donated=tuple(call.params["donated_invars"]),
        out_shardings=tuple(
            s if isinstance(s, jax.sharding.Sharding) else None for s in call.params["out_shardings"]
        ),
    )


def _share(leaf: Any) -> float | None:
    sharding, shape = getattr(leaf, "sharding", None), tuple(getattr(leaf, "shape", ()))
    if sharding is None or not math.prod(shape):
        return None
    return math.prod(sharding.shard_shape(shape)) / math.prod(shape)

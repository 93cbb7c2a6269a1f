"""How often the body of a `while` in a jaxpr runs, where it counts from one known number to another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.extend.core import Literal


def whole(atom: Any, numbers: Mapping[Any, int]) -> int | None:
    """The whole number that an operand stands for; None where it is not known."""
    if not isinstance(atom, Literal):
        return numbers.get(atom)
    aval: Any = atom.aval
    return int(atom.val) if aval.shape == () and aval.dtype.kind in "iu" else None


def turns(eqn: Any, numbers: Mapping[Any, int]) -> int | None:
    """Turns of a loop as `jax.lax.fori_loop` writes it; None for any other.

    Args:
      eqn: of the primitive `while`.
      numbers: variables around it whose values are known.
    """
    condition, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
    given = eqn.invars[eqn.params["cond_nconsts"] + eqn.params["body_nconsts"] :]
    if len(condition.eqns) != 1 or condition.eqns[0].primitive.name != "lt" or eqn.params["cond_nconsts"]:
        return None
    index, limit = condition.eqns[0].invars
    if index not in condition.invars:
        return None
    place = condition.invars.index(index)
    counter = body.invars[eqn.params["body_nconsts"] + place]
    steps = [e for e in body.eqns if e.primitive.name == "add" and body.outvars[place] in e.outvars]
    if len(steps) != 1 or steps[0].invars[0] is not counter or whole(steps[0].invars[1], {}) != 1:
        return None
    start = whole(given[place], numbers)
    end = whole(given[condition.invars.index(limit)] if limit in condition.invars else limit, numbers)
    return None if start is None or end is None else max(0, end - start)

"""Loops whose turns only the data tell say in their name how many there usually are, for who reads the program."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager

import jax

_SAID = re.compile(r"about_(\d+)_turns\)*/while$")


def usually(turns: int) -> AbstractContextManager[None]:
    """Around one loop: how often its body usually runs."""
    return jax.named_scope(f"about_{turns}_turns")


def usual_turns(op_name: str) -> int | None:
    """What a loop's name in a program says of that; None: nothing."""
    found = _SAID.search(op_name)
    return int(found[1]) if found else None

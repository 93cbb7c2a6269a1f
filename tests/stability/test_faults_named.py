"""Faults on demand: what is asked for can strike, or is refused."""

from __future__ import annotations

import pytest

from dsjax.errors import ConfigError
from dsjax.faults import VARIABLE, Faults


def asked(text: str) -> Faults:
    return Faults.of({VARIABLE: text}, 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nan@step=0", "steps and times from 1"),
        ("nan@step=5,steps=0", "steps and times from 1"),
        ("nan@step=5,op=", "each key once, with a value"),
        ("nan@step=5,step=6", "each key once, with a value"),
        ("bitflip@step=5,where=disk", "where is memory or compute, got disk"),
        ("bitflip@step=5,device=x", "takes numbers"),
    ],
)
def test_what_means_nothing_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        asked(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kill@step=13", "the run ends with step 12"),
        ("bitflip@step=5,device=4", "the mesh has no device 4; it has 0, 1"),
        ("bitflip@step=5,device=1,where=compute", "is 4: use a multiple, as step=4"),
    ],
)
def test_what_cannot_strike_in_a_run_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        asked(text).check({0, 1}, 12, 4)


def test_a_gradient_that_is_computed_once_cannot_differ() -> None:
    with pytest.raises(ConfigError, match=r"set stability\.check_recompute_every"):
        asked("bitflip@step=4,where=compute").check({0}, 12, 0)
    asked("bitflip@step=4,where=compute;bitflip@step=3;nan@step=12").check({0}, 12, 4)

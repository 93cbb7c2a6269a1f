"""Which checkpoints stay."""

from __future__ import annotations

import math

import pytest

from dsjax.checkpoint.retention import superfluous

STEPS = dict.fromkeys([10, 20, 30, 40, 50])


@pytest.mark.parametrize(
    ("metrics", "rules", "gone"),
    [
        (STEPS, {"keep": 2}, [10, 20, 30]),
        (STEPS, {"keep": 9}, []),
        (STEPS, {"keep": 1, "keep_every": 20}, [10, 30]),
        (STEPS, {"keep": 1, "keep_best": 2}, [10, 20, 30, 40]),
        ({10: 1.0, 20: 3.0, 30: 1.0, 40: 2.0, 50: 9.0}, {"keep": 1, "keep_best": 1}, [10, 20, 40]),
        ({10: 0.5, 20: math.nan, 30: None, 40: 2.0}, {"keep": 1, "keep_best": 1}, [20, 30]),
        ({}, {"keep": 1}, []),
        ({7: None}, {"keep": 1}, []),
    ],
)
def test_rules_add_up(metrics, rules, gone):
    assert superfluous(metrics, **rules) == gone

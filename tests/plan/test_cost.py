"""Times of collectives and of work, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from dsjax.aot import Work, parse_target
from dsjax.plan.cost import PEAK, Reached, link_seconds, work_seconds
from dsjax.plan.result import FORMULA

H100 = parse_target("2x8xH100")


def test_work_takes_the_longer_of_arithmetic_and_memory():
    arithmetic = Work({"bf16": 989.5e12, "f32": 67e12}, 3352e9)
    assert work_seconds(arithmetic, H100) == pytest.approx(2.0)
    assert work_seconds(Work({"bf16": 1.0}, 2 * 3352e9), H100) == pytest.approx(2.0)
    assert work_seconds(arithmetic, H100, Reached(products=0.5)) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("kind", "members", "together", "seconds"),
    [
        ("all-gather", 8, 8, 1.0 + 3 * 2e-6),  # NVLink: 450 GB/s, log2(8) latencies
        ("all-reduce", 2, 1, 9.0 + 5e-6),  # a device's own network link: 50 GB/s
        ("all-gather", 16, 8, 1.125 + 4 * 5e-6),  # a ring out of the node by all eight: 400 GB/s
        ("all-to-all", 16, 8, 9.0 + 4 * 5e-6),  # each device sends its own by its own link
        ("all-reduce", 1, 1, 0.0),
    ],
)
def test_a_collective_goes_by_the_slowest_link_that_it_uses(kind, members, together, seconds):
    assert link_seconds(H100, kind, 450e9, members, together) == pytest.approx(seconds, rel=1e-9)


def test_the_formula_says_the_shares_that_are_used():
    reached = Reached()
    assert f"{reached.products:.0%} of the chip's peak" in FORMULA
    assert f"bytes at {reached.memory:.0%} of the memory" in FORMULA
    assert f"bytes at {reached.links:.0%} of the link" in FORMULA
    assert (PEAK.products, PEAK.memory, PEAK.links) == (1, 1, 1)

"""Times of collectives and of work, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from dsjax.aot import Work, parse_target
from dsjax.plan.cost import PEAK, Reached, link_seconds, unit_notes, work_seconds
from dsjax.plan.result import FORMULA

H100 = parse_target("2x8xH100")


def test_work_takes_the_longer_of_arithmetic_and_memory():
    arithmetic = Work({"bf16": 989.5e12, "f32": 494.5e12}, 3352e9)  # f32 runs as TF32
    assert work_seconds(arithmetic, H100) == pytest.approx(2.0)
    assert work_seconds(Work({"bf16": 1.0}, 2 * 3352e9), H100) == pytest.approx(2.0)
    assert work_seconds(arithmetic, H100, Reached(products=0.5)) == pytest.approx(4.0)


def test_products_of_fp32_are_said_to_run_as_tf32_where_they_do():
    chips = H100.chip, parse_target("cpu:8").chip
    assert "TF32" in unit_notes(chips[0], "f32")[0] and unit_notes(chips[0], "bf16") == []
    assert unit_notes(chips[0], "fp32") == unit_notes(chips[1], "f32") == []
    reached = Reached(by_type={"tf32": 0.5, "fp32": 0.1})
    assert reached.flops(chips[0], "f32") == 0.5 * 494.5e12 and reached.flops(chips[1], "f32") == 0.1 * 50e9


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

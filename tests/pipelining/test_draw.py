"""Pictures of schedules: every operation is in them, at its time, and they are well formed."""

import xml.etree.ElementTree as ET
from itertools import pairwise

import numpy as np
import pytest

from dsjax.pipelining.draw import as_svg, as_text
from dsjax.pipelining.schedule import forward_only, make_schedule
from dsjax.pipelining.simulate import simulate

CASES = [("gpipe", 4, 6, 1), ("1f1b", 4, 6, 1), ("interleaved", 4, 6, 2), ("zero_bubble", 4, 8, 1)]
SVG = "{http://www.w3.org/2000/svg}"


def test_text_is_the_schedule():
    assert as_text(make_schedule("1f1b", 2, 3), 60).splitlines() == [
        "stage 0 |F0-F1-      F2-B0----B1----   B2----|",
        "stage 1 |   F0-B0----F1-B1----F2-B2----      |",
        "1f1b: 2 stages, 3 microbatches; idle 25.0% simulated, 25.0% by formula",
    ]


@pytest.mark.parametrize("width", [30, 60, 200])
@pytest.mark.parametrize("case", [*CASES, ("interleaved", 8, 13, 4)])
def test_text_keeps_to_its_width(case, width):
    *rows, _ = as_text(make_schedule(*case), width).splitlines()
    assert len(rows) == case[1]
    assert len({len(row) for row in rows}) == 1
    assert len(rows[0]) <= width


@pytest.mark.parametrize("case", CASES)
def test_svg_holds_every_operation(case):
    name, stages, microbatches, virtual = case
    schedule = make_schedule(*case)
    simulated = simulate(schedule, 1.0, 1.0, 1.0)
    root = ET.fromstring(as_svg(schedule, simulated, "a < b & c"))
    named = [title.text for title in root.iter(SVG + "title")]
    assert named[0] == "a < b & c"
    kinds = 3 if name == "zero_bubble" else 2
    assert len(set(named)) == len(named) == 1 + kinds * stages * microbatches * virtual
    words = [text.text for text in root.iter(SVG + "text")]
    assert f"idle {simulated.bubble:.1%} simulated, {simulated.bubble:.1%} by formula" in words[-1]
    assert all(f"stage {stage}" in words for stage in range(stages))


def test_svg_boxes_of_a_stage_do_not_overlap():
    schedule = make_schedule("interleaved", 4, 6, 2)
    forward = np.random.default_rng(0).uniform(1.0, 2.0, (2, 4))
    root = ET.fromstring(as_svg(schedule, simulate(schedule, forward, 2 * forward), "uneven"))
    rows: dict[str, list[tuple[float, float]]] = {}
    for box in root.iter(SVG + "rect"):
        if box.find(SVG + "title") is not None:
            begin = float(box.attrib["x"])
            rows.setdefault(box.attrib["y"], []).append((begin, begin + float(box.attrib["width"])))
    assert len(rows) == 4
    for boxes in rows.values():
        boxes.sort()
        assert all(end <= begin for (_, end), (begin, _) in pairwise(boxes))


def test_evaluation_has_no_formula():
    text = as_text(forward_only(3, 4), 60)
    assert "B" not in text
    assert text.endswith("forward_only: 3 stages, 4 microbatches; idle 33.3%")

"""report.html from real, empty, broken and very long runs."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from dsjax.observe import EventLog, MetricsLog, write_report
from dsjax.observe.charts import Series, draw, thin

VOID = {"meta", "line", "path", "circle", "br"}


class Page(HTMLParser):
    """Checks that tags are balanced; collects text and what would be fetched or run."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [
            value for name, value in attributes if name in ("src", "href") or name.startswith("on")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def a_line(step: int, **more) -> dict:
    line = {
        "step": step, "loss": 5.0 / step, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens_per_second": 1e3,
        "mfu": None, "tokens_seen": 2048.0 * step, "peak_memory_bytes": None, "time": 1e9 + step,
    }  # fmt: skip
    return {**line, **more}


def page_of(run_dir) -> tuple[Page, str]:
    text = write_report(run_dir).read_text()
    return Page(text), text


def test_a_run_with_everything(tmp_path):
    metrics, events = MetricsLog(tmp_path, enabled=True), EventLog(tmp_path, enabled=True)
    events.event("started", 0, mesh={"fsdp": 8})
    for step in range(1, 21):
        metrics.write(a_line(step, mfu=0.4, peak_memory_bytes=2**31))
    metrics.write({"step": 20, "eval": {"heldout": {"loss": 0.75, "tokens": 5.0, "perplexity": 2.1}}})
    events.event("finished", 20)
    (tmp_path / "config.yaml").write_text("run:\n  name: r\n")
    (tmp_path / "environment.json").write_text(json.dumps({"python": "3.11", "versions": {"jax": "0.10.2"}}))
    page, text = page_of(tmp_path)
    for title in ("Loss", "Gradient norm", "Learning rate", "Throughput", "Events", "Environment", "Config"):
        assert title in page.text
    for fact in (
        "finished",
        "0.75",
        "40,960",
        "40.0%",
        "2.00 GiB",
        "name: r",
        "versions jax",
        'mesh {"fsdp": 8}',
    ):
        assert fact in page.text
    assert page.tags.count("svg") == 4 and page.links == []
    for svg in re.findall(r"<svg.*?</svg>", text, re.S):
        ET.fromstring(svg)
    assert not re.search(r"(https?:)?//[a-z]", text.replace("// Shows", ""))


def test_metrics_of_the_users_own_get_a_chart_each(tmp_path):
    metrics = MetricsLog(tmp_path, enabled=True)
    for step in range(1, 5):
        metrics.write(a_line(step, accuracy=step / 4, margin=math.nan, note="text"))
    result = {"loss": 1.0, "tokens": 9.0, "perplexity": 2.7, "accuracy": 0.875, "recall": 0.5}
    metrics.write({"step": 4, "eval": {"held": result}})
    _, text = page_of(tmp_path)
    assert re.findall(r"<h2>([\w ]+?) <small", text)[4:] == ["accuracy", "margin", "recall"]
    card = text.partition("<h2>accuracy")[2].partition("</section>")[0]
    assert "eval held" in card and "0.875" in card and card.count("<circle") == 1


def test_the_unit_is_the_environments(tmp_path):
    MetricsLog(tmp_path, enabled=True).write(a_line(1))
    (tmp_path / "environment.json").write_text('{"unit": "images"}')
    page, _ = page_of(tmp_path)
    assert "images/s, all devices" in page.text and "images seen" in page.text and "tokens" not in page.text


def test_the_first_step_after_a_start_is_no_part_of_the_line(tmp_path):
    metrics, events = MetricsLog(tmp_path, enabled=True), EventLog(tmp_path, enabled=True)
    events.event("started", 0, mesh={}, devices=1)
    events.event("resumed", 15, mesh={})  # undone by the next, which goes back further
    events.event("resumed", 10, mesh={})
    for step in (1, 5, 10, 11, 15, 16, 20):
        metrics.write(a_line(step, tokens_per_second=10.0 if step in (1, 11) else 1000.0))
    page, text = page_of(tmp_path)
    card = text.partition("<h2>Throughput")[2].partition("</section>")[0]
    steady, first = json.loads(re.findall(r'json">(.*?)</script>', card)[0])
    assert [point[2] for point in steady] == [5, 10, 15, 16, 20]
    assert [point[2:] for point in first] == [[1, 10.0], [11, 10.0]]
    assert card.count("<circle") == 2 and "first after a start" in card
    assert ("tokens/s (median)", "1,000") in re.findall(r'soft">([^<]*)</span><b>([^<]*)', text)
    assert "mesh" not in page.text and "devices 1" in page.text


def test_an_empty_directory(tmp_path):
    page, _ = page_of(tmp_path)
    assert page.text.count("nothing logged yet") == 4 and "not started" in page.text


def test_metrics_without_anything_finite(tmp_path):
    log = MetricsLog(tmp_path, enabled=True)
    for step in range(1, 4):
        log.write({"step": step, "loss": math.nan, "grad_norm": math.inf})
    log.write({"step": 3, "eval": {"heldout": {"loss": math.nan}}})
    page, text = page_of(tmp_path)
    assert (
        page.text.count("nothing logged yet") == 4
        and "NaN" not in text
        and "nan" not in text.split("<main>")[1]
    )


def test_torn_and_foreign_lines_are_passed_over(tmp_path):
    good = json.dumps(a_line(1))
    (tmp_path / "metrics.jsonl").write_text(f'{good}\n[1]\n{{"step": "x"}}\n{{"loss": 1}}\n{{"step": 2, "lo')
    (tmp_path / "events.jsonl").write_text('{"time": "never", "kind": 3}\n{"ti')
    (tmp_path / "environment.json").write_text("{")
    page, _ = page_of(tmp_path)
    assert page.tags.count("svg") == 4


def test_nothing_from_the_run_becomes_markup(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    events, metrics = EventLog(tmp_path, enabled=True), MetricsLog(tmp_path, enabled=True)
    events.event(evil, 1, **{evil: evil})
    metrics.write(a_line(1))
    metrics.write({"step": 1, "eval": {evil: {"loss": 1.0}}})
    (tmp_path / "config.yaml").write_text(evil)
    (tmp_path / "environment.json").write_text(json.dumps({evil: evil}))
    plain_scripts = 2 * 4 + 1
    page, text = page_of(tmp_path)
    assert page.tags.count("script") == plain_scripts and "img" not in page.tags and page.links == []
    assert "<img" not in text


def test_a_long_run_makes_a_small_page_that_keeps_the_extremes(tmp_path):
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 100_001):
            spike = 77.25 if step == 54_321 else 2.0 + math.sin(step)
            file.write(json.dumps(a_line(step, loss=spike)) + "\n")
    events = EventLog(tmp_path, enabled=True)
    for step in range(1000):
        events.event("skipped", step, reason="the loss is not finite")
    page, text = page_of(tmp_path)
    assert len(text) < 600_000
    assert "77.25" in text and "800 events in the middle are left out" in page.text


def test_a_page_that_cannot_be_written_is_told_and_does_not_raise(tmp_path, capsys):
    (tmp_path / "report.html").mkdir()
    write_report(tmp_path)
    assert "report.html could not be written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"], "a draft is left"


def test_thinning_keeps_ends_extremes_and_gaps():
    points = [(float(i), float(i % 7)) for i in range(10_000)]
    points[1234], points[4321], points[7777] = (1234.0, 99.0), (4321.0, -99.0), (7777.0, None)
    kept = thin(points, 100)
    assert len(kept) <= 500 and kept == sorted(kept, key=lambda p: p[0])
    assert {points[0], points[-1], points[1234], points[4321], points[7777]} <= set(kept)
    assert thin(points[:300], 100) == points[:300]


def test_a_gap_breaks_the_line():
    chart = draw("t", "u", [Series("s", [(1, 1.0), (2, 2.0), (3, None), (4, 3.0), (5, 1.0)])])
    assert chart.series[0].path.count("M") == 2 and chart.series[0].path.count("L") == 2


@pytest.mark.parametrize(
    ("values", "scale"),
    [([1.0], "linear"), ([0.0, 0.0], "linear"), ([-3.0, 5.0], "log"), ([1e-8, 3.0, 1e9], "log"),
     ([5.0, 6.0], "zero"), ([1e-300, 1e300], "log"), ([0.1, 0.1 + 1e-12], "linear"), ([7.0, 7.0], "log")],
)  # fmt: skip
def test_everything_lies_inside_the_chart_and_ticks_are_in_order(values, scale):
    chart = draw("t", "u", [Series("s", [(step, v) for step, v in enumerate(values)])], scale=scale)
    for x, y, _, _ in chart.series[0].hover:
        assert chart.left <= x <= chart.right and chart.top - 0.1 <= y <= chart.bottom + 0.1
    heights = [y for y, _ in chart.y_ticks]
    assert heights == sorted(heights, reverse=True) and 2 <= len(heights) <= 12
    assert all(chart.left <= x <= chart.right for x, _ in chart.x_ticks) and chart.x_ticks
    if scale == "zero":
        assert chart.y_ticks[0][1] == "0"


@pytest.mark.parametrize(
    ("low", "high", "first", "last"),
    [
        (5.461, 5.58, "5.450", "5.600"),
        (0, 1850, "0", "2,000"),
        (0, 3e-4, "0", "0.0003"),
        (-1, 1.2, "-1.0", "1.5"),
    ],
)
def test_tick_labels_of_a_chart_have_the_same_decimals(low, high, first, last):
    labels = [text for _, text in draw("t", "u", [Series("s", [(0, low), (1, high)])]).y_ticks]
    assert (labels[0], labels[-1]) == (first, last)
    assert high < 1e-3 or len({len(text.partition(".")[2]) for text in labels}) == 1


def test_a_higher_value_lies_higher():
    chart = draw("t", "u", [Series("s", [(0, 1.0), (10, 3.0)])])
    (x0, y0, *_), (x1, y1, *_) = chart.series[0].hover
    assert y1 < y0 and x1 > x0

"""metrics.jsonl and events.jsonl, whole and torn."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dsjax.observe import EventLog, MetricsLog
from dsjax.observe.logs import read_lines

ROOT = Path(__file__).parents[2]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_numbers_keep_their_precision_and_what_is_not_finite_is_null(tmp_path):
    log = MetricsLog(tmp_path, enabled=True)
    value = 0.1 + 0.2
    log.write(
        {"step": 1, "loss": value, "grad_norm": np.float32(0.1), "mfu": float("nan"), "count": np.int64(3)}
    )
    log.write({"step": 2, "eval": {"a": {"loss": float("inf"), "tokens": 2.0**53}}, "list": np.arange(2.0)})
    first, second = lines(tmp_path / "metrics.jsonl")
    assert first == {"step": 1, "loss": value, "grad_norm": float(np.float32(0.1)), "mfu": None, "count": 3}
    assert second == {"step": 2, "eval": {"a": {"loss": None, "tokens": 2.0**53}}, "list": [0.0, 1.0]}


def test_a_line_can_be_read_as_soon_as_it_is_written(tmp_path):
    log = MetricsLog(tmp_path / "new" / "run", enabled=True)
    log.write({"step": 1})
    assert lines(tmp_path / "new" / "run" / "metrics.jsonl") == [{"step": 1}]


def test_only_the_enabled_process_writes(tmp_path):
    for log in (MetricsLog(tmp_path / "run", enabled=False), EventLog(tmp_path / "run", enabled=False)):
        if isinstance(log, MetricsLog):
            log.write({"step": 1})
            log.drop_after(0)
        else:
            log.event("started", 0)
        log.close()
    assert not (tmp_path / "run").exists()


def test_lines_past_the_step_are_dropped_and_writing_goes_on(tmp_path):
    log = MetricsLog(tmp_path, enabled=True)
    for step in range(1, 6):
        log.write({"step": step, "loss": step / 3})
    log.write({"step": 5, "eval": {"a": {"loss": 1.0}}})
    log.drop_after(3)
    log.write({"step": 4, "loss": 9.0})
    log.close()
    assert [(line["step"], line["loss"]) for line in lines(tmp_path / "metrics.jsonl")] == [
        (1, 1 / 3), (2, 2 / 3), (3, 1.0), (4, 9.0),
    ]  # fmt: skip
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_dropping_replaces_the_file_in_one_move(tmp_path):
    log = MetricsLog(tmp_path, enabled=True)
    log.write({"step": 1})
    log.write({"step": 2})
    with (tmp_path / "metrics.jsonl").open() as reader:  # opened before: sees the old file, whole
        log.drop_after(1)
        assert len(reader.read().splitlines()) == 2
    assert len(lines(tmp_path / "metrics.jsonl")) == 1


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', "{", '{"step": 3, "loss": "é'])
def test_a_torn_last_line_of_metrics_is_no_record(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn.encode()[:-1] + b"\xc3")
    log = MetricsLog(tmp_path, enabled=True)
    log.write({"step": 3})
    assert [line["step"] for line in lines(path)] == [1, 2, 3]
    log.drop_after(1)
    assert [line["step"] for line in lines(path)] == [1]


def test_a_last_line_that_lacks_only_its_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    MetricsLog(tmp_path, enabled=True).write({"step": 3})
    assert [line["step"] for line in lines(path)] == [1, 2, 3]


def test_a_very_long_torn_line_is_cut_where_it_begins(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "x": "' + "y" * 200_000)
    MetricsLog(tmp_path, enabled=True).write({"step": 2})
    assert [line["step"] for line in lines(path)] == [1, 2]


def test_a_torn_line_in_the_middle_is_dropped_with_the_rest(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo\n{"step": 2}\n')
    MetricsLog(tmp_path, enabled=True).drop_after(5)
    assert [line["step"] for line in lines(path)] == [1, 2]


def test_events_only_grow_and_a_torn_line_is_ended(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(tmp_path, enabled=True)
    before = time.time()
    log.event("started", 0, mesh={"fsdp": 8})
    log.close()
    first = json.loads(path.read_text())
    assert list(first)[:3] == ["time", "step", "kind"] and before <= first["time"] <= time.time()
    assert (first["step"], first["kind"], first["mesh"]) == (0, "started", {"fsdp": 8})
    torn = path.read_bytes() + b'{"time": 1.0, "ste'
    path.write_bytes(torn)
    EventLog(tmp_path, enabled=True).event("resumed", 5)
    assert path.read_bytes().startswith(torn)
    assert [event["kind"] for event in read_lines(path)] == ["started", "resumed"]


def test_a_fact_cannot_pass_for_the_event_itself(tmp_path):
    EventLog(tmp_path, enabled=True).event("evaluated", 3, kind="other", step=9, loss=1.0)
    (event,) = lines(tmp_path / "events.jsonl")
    assert (event["kind"], event["step"], event["loss"]) == ("evaluated", 3, 1.0)


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"metrics\.jsonl") as caught:
        MetricsLog(tmp_path, enabled=True).write({"step": 1})
    assert caught.value.errno == errno.ENOSPC


def test_a_writer_killed_at_any_moment_leaves_whole_lines(tmp_path):
    code = (
        "import sys\nfrom dsjax.observe.logs import MetricsLog\nlog = MetricsLog(sys.argv[1])\nstep = 0\n"
        "while True:\n  step += 1\n  log.write({'step': step, 'loss': 1 / step})\n"
        "  if step % 500 == 0: log.drop_after(step - 1); log.write({'step': step, 'loss': 1 / step})"
    )
    path = tmp_path / "metrics.jsonl"
    for pause in (0.02, 0.05, 0.11):
        process = subprocess.Popen(
            [sys.executable, "-c", code, tmp_path], env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        deadline = time.monotonic() + 20
        while (not path.exists() or path.stat().st_size < 2000) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(pause)
        process.send_signal(signal.SIGKILL)
        process.wait()
        MetricsLog(tmp_path, enabled=True).close()
        steps = [line["step"] for line in lines(path)]
        assert len(steps) > 10 and steps == list(range(1, len(steps) + 1))
        path.unlink()

"""What the terminal shows."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsjax.observe import Progress
from dsjax.observe.progress import _duration

ROOT = Path(__file__).parents[2]
RECORD = {"loss": 3.25, "grad_norm": 0.5, "tokens_per_second": 12345.6, "mfu": 0.412, "step_seconds": 2.0}

SCRIPT = """
import time
from dsjax.observe import Progress
with Progress({total}, 0, mode="{mode}") as progress:
    with progress.busy("compiling the step"):
        time.sleep({busy})
    for step in range(1, {total} + 1):
        progress.update(step, {record})
        time.sleep({pause})
    progress.message("[bold]eval[/bold] heldout: loss 1.0000")
print("the end", flush=True)
"""


def script(mode: str, total: int = 3, busy: float = 0.0, pause: float = 0.0) -> list[str]:
    text = SCRIPT.format(mode=mode, total=total, busy=busy, pause=pause, record=RECORD)
    return [sys.executable, "-c", text]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "150", **more}


def on_a_terminal(command: list[str], **more: str) -> str:
    """Runs a command on a pseudo-terminal and returns what it drew."""
    parent, child = pty.openpty()
    process = subprocess.Popen(command, stdout=child, stderr=child, env=environment(**more))
    os.close(child)
    drawn = b""
    while True:
        try:
            data = os.read(parent, 65536)
        except OSError:
            break
        if not data:
            break
        drawn += data
    assert process.wait() == 0, drawn.decode()
    os.close(parent)
    return drawn.decode()


def test_a_plain_line_has_what_a_person_asks(capsys):
    with Progress(1000, 0, mode="plain") as progress:
        progress.update(370, RECORD)
    line = capsys.readouterr().out
    for fact in (
        "37.0%",
        "step  370/1000",
        "loss 3.2500",
        "grad norm 0.5",
        "12,346 tokens/s",
        "MFU 41.2%",
        "elapsed",
    ):
        assert fact in line
    assert "left 21:00" in line  # 630 steps of 2 s


def test_the_first_metrics_of_the_users_own_are_shown(capsys):
    own = {"accuracy": 0.98765, "top5": None, "f1": float("nan"), "recall": 0.5, "tokens": 7.0, "note": "x"}
    with Progress(10, mode="plain", unit="images") as progress:
        progress.update(1, {**RECORD, **own})
    line = capsys.readouterr().out
    assert "loss 3.2500  accuracy 0.9877  top5 n/a  f1 n/a  grad norm" in line
    assert "12,346 images/s" in line and "tokens" not in line and "recall" not in line and "note" not in line


@pytest.mark.parametrize(
    ("columns", "own", "shown", "left_out"),
    [
        (40, {}, ["step"], ["left", "tokens/s"]),
        (80, {}, ["loss 3.2500", "12,346 tokens/s", "left 4:52"], ["grad norm"]),
        (80, {"accuracy": 0.5}, ["loss 3.2500", "accuracy 0.5", "left 4:52"], ["tokens/s"]),
        (200, {"accuracy": 0.5}, ["accuracy 0.5", "grad norm 0.5", "MFU 41.2%", "elapsed"], []),
    ],
)
def test_the_live_bar_is_one_line(columns, own, shown, left_out):
    code = (
        "import time\nfrom dsjax.observe import Progress\n"
        "with Progress(10_000, mode='rich') as progress:\n"
        f"    progress.update(1234, {{**{RECORD}, **{own}}})\n    time.sleep(0.3)\n"
    )
    drawn = on_a_terminal([sys.executable, "-c", code], COLUMNS=str(columns))
    assert "\x1b[1A" not in drawn  # it goes up a line where the bar takes two
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn))
    last = [line.rstrip() for line in lines if "step" in line][-1]
    assert len(last) <= columns
    assert all(fact in last for fact in shown) and not any(fact in last for fact in left_out)


def test_an_unknown_mfu_is_not_shown_and_missing_numbers_are_said_to_be(capsys):
    with Progress(10, mode="plain") as progress:
        progress.update(1, {**RECORD, "mfu": None, "loss": None, "grad_norm": float("nan")})
    line = capsys.readouterr().out
    assert "MFU" not in line and "loss n/a" in line and "grad norm nan" in line


def test_time_left_counts_pauses_too(capsys):
    with Progress(100, mode="plain") as progress:
        progress.update(50, {**RECORD, "step_seconds": 1e-6})
        time.sleep(0.5)  # an evaluation, say
        progress.update(51, {**RECORD, "step_seconds": 1e-6})
    last = capsys.readouterr().out.splitlines()[-1]
    found = re.search(r"left (\d+):(\d\d)", last)
    assert found and 24 <= int(found[1]) * 60 + int(found[2]) <= 40


def test_only_the_last_step_is_all_of_it(capsys):
    with Progress(10_000, mode="plain") as progress:
        progress.update(9_999, RECORD)
        progress.update(10_000, RECORD)
    before, after = capsys.readouterr().out.splitlines()
    assert "99.9%" in before and "100.0%" in after and "left 0.0 s" in after


def test_plain_says_what_takes_time_at_once(capsys):
    with Progress(10, mode="plain") as progress:
        with progress.busy("compiling the step"):
            assert capsys.readouterr().out == "compiling the step ...\n"
        assert capsys.readouterr().out == ""
        with progress.busy("evaluating"):
            time.sleep(1.1)
        assert "evaluating took 1.1 s" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [{"mode": "none"}, {"mode": "plain", "enabled": False}])
def test_nothing_is_shown_where_nothing_is_wanted(capsys, arguments):
    with Progress(10, **arguments) as progress, progress.busy("compiling"):
        progress.update(1, RECORD)
        progress.message("text")
    assert capsys.readouterr() == ("", "")


def test_auto_is_plain_without_a_terminal():
    done = subprocess.run(script("auto"), capture_output=True, text=True, env=environment(), check=True)
    assert "\x1b" not in done.stdout and done.stderr == ""
    out = done.stdout.splitlines()
    assert out[0] == "compiling the step ..." and out[-1] == "the end" and len(out) == 6
    assert out[-2] == "[bold]eval[/bold] heldout: loss 1.0000"


def test_auto_draws_a_bar_on_a_terminal():
    drawn = on_a_terminal(script("auto", busy=0.6, pause=0.3))
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn)
    assert "compiling the step" in text and "━" in text
    assert "step 3/3" in text and "12,346 tokens/s" in text and "MFU 41.2%" in text
    assert "[bold]eval[/bold] heldout" in text and "the end" in text


def test_a_dumb_terminal_gets_plain_lines():
    assert "\x1b" not in on_a_terminal(script("auto"), TERM="dumb")


@pytest.mark.parametrize("mode", ["plain", "rich"])
def test_a_reader_that_goes_away_does_not_end_the_run(mode, tmp_path):
    done = tmp_path / "done"
    command = [*script(mode, total=200, pause=0.002)]
    command[-1] += f"\nimport pathlib\npathlib.Path({str(done)!r}).touch()\n"
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read().decode()
    assert process.wait() == 0 and done.exists()
    assert error == ""


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (59.6, "1:00"),
        (187, "3:07"),
        (7387, "2:03:07"),
        (353000, "4 d 2:03:20"),
    ],
)
def test_durations(seconds, shown):
    assert _duration(seconds) == shown

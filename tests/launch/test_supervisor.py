"""`dsjax launch` starts workers again: after a fault, after a hang, so often and no more."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from test_local import START, finish, logs, start, wait_for

from dsjax.launch.budget import Budget, cause
from dsjax.launch.hangs import limit, stuck
from dsjax.launch.workers import Look
from dsjax.observe.heartbeat import PHASES, Heartbeat, Pulse, create

# A worker that beats; it finds where it was in a file of its own, as a run finds its checkpoint.
BEATS = START + (
    "from dsjax.observe.heartbeat import Heartbeat\n"
    "beat, attempt = Heartbeat.from_environment(), int(os.environ['DSJAX_ATTEMPT'])\n"
    "path = f'at-{rank}'\n"
    "step = int(open(path).read()) if os.path.exists(path) else 0\n"
    "def go(n, seconds=0.02):\n"
    "  global step\n"
    "  for _ in range(n):\n"
    "    step += 1\n"
    "    beat.at(step, 'step')\n"
    "    with open(path + '.new', 'w') as file: file.write(str(step))\n"
    "    os.replace(path + '.new', path)\n"
    "    time.sleep(seconds)\n"
)


def job(directory: Path, code: str, *options: str, workers: int = 2, **more):
    words = [sys.executable, "-m", "dsjax", "launch", "--workers", str(workers), *options]
    return start(directory, [*words, "--", sys.executable, "-c", BEATS + code], **more)


def supervise(directory: Path, code: str, **options):
    """A supervisor with options that the command line does not have."""
    words = {"workers": 1, **options}
    command = [sys.executable, "-c", BEATS + code]
    script = (
        "from dsjax.cli_errors import guarded, leave\nfrom dsjax.launch.options import Options\n"
        f"from dsjax.launch.run import launch\nleave(guarded(lambda: launch(Options(**{words!r}), {command!r})))"
    )
    return start(directory, [sys.executable, "-c", script])


def test_a_killed_worker_is_started_again_with_all_others_at_once(tmp_path):
    code = (
        "open('starts', 'a').write(f'{rank} {attempt} {time.time()} {os.environ[\"DSJAX_COORDINATOR\"]}\\n')\n"
        "go(5)\n"
        "if attempt == 0 and rank == 1:\n"
        "  while not os.path.exists('at-0'): time.sleep(0.02)\n"
        "  open('killed', 'w').write(str(time.time()))\n"
        "  os.kill(os.getpid(), signal.SIGKILL)\n"
        "if attempt == 0: time.sleep(60)\n"
        "go(5, 0.2)\n"
    )
    exit_code, out, _ = finish(job(tmp_path, code))
    assert exit_code == 0, out
    assert "rank 1 was ended by SIGKILL" in out and "starting all again (restart 1 of at most 100)" in out
    assert "attempt 1: 2 processes" in out and "training again" in out
    starts = [line.split() for line in (tmp_path / "starts").read_text().splitlines()]
    assert sorted((r, a) for r, a, _, _ in starts) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert len({address for *_, address in starts}) == 2
    again = max(float(when) for _, a, when, _ in starts if a == "1")
    # A second, and what it takes to start Python on a busy machine.
    assert again - float((tmp_path / "killed").read_text()) < 4
    assert logs(tmp_path)["rank-1.log"] == "==== attempt 1 ====\n"


@pytest.mark.parametrize(
    ("ends", "starts"), [("70", 3), ("1", 3), ("2", 1), ("3", 1), ("71", 1), ("75", 1), ("9", 1)]
)
def test_which_codes_start_it_again_and_three_times_without_progress_are_enough(tmp_path, ends, starts):
    code = f"open('starts', 'a').write('x'); sys.exit({ends})"
    exit_code, out, _ = finish(job(tmp_path, code, workers=1))
    assert exit_code == int(ends) and len((tmp_path / "starts").read_text()) == starts
    assert ("3 failures in a row got no further than" in out) == (starts == 3)


def test_which_failure_made_the_others_fail():
    seen = {0: (10.0, 70), 1: (10.2, 70)}
    assert cause(seen, 3, 10.5) is None  # one that was killed may be seen later
    assert cause(seen, 3, 11.1) == cause(seen, 2, 10.3) == (0, 70)
    assert cause({**seen, 2: (10.4, 137)}, 4, 10.5) == (2, 137)
    assert cause({**seen, 2: (10.4, 3)}, 4, 10.5) == (2, 3)
    assert cause({0: (1.0, 0), 1: (1.0, 75)}, 3, 99.0) is None


def test_progress_earns_restarts_until_they_are_used_up(tmp_path):
    exit_code, out, _ = finish(job(tmp_path, "go(1)\nsys.exit(70)", "--max-restarts", "5", workers=1))
    assert (
        exit_code == 70 and "--max-restarts 5 are used up" in out and (tmp_path / "at-0").read_text() == "6"
    )


def test_a_budget():
    budget = Budget(10)
    # The same step again is no progress, and an earlier one neither.
    assert [budget.refuses(reached) == "" for reached in (-1, -1, 3, 3, 5, 2, 5)] == [True] * 6 + [False]
    assert "got no further than step 5" in budget.refuses(5)
    assert "--max-restarts 0" in Budget(0).refuses(4)


@pytest.mark.parametrize(
    ("hangs", "says"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", r"rank 1 hangs: at step 5, step, for \d+ s \(stopped by a signal\)"),
        ("beat.at(step + 1, 'waiting for data')\ntime.sleep(60)", r"rank 1 hangs: at step 6, waiting for data, for"),
    ],
)  # fmt: skip
def test_a_hang_is_told_with_stacks_and_ended(tmp_path, hangs, says):
    code = (
        "def wait_for_the_other():\n  time.sleep(60)\n"
        "go(5)\n"
        f"if attempt == 0 and rank == 1:\n  {hangs.replace(chr(10), chr(10) + '  ')}\n"
        "if attempt == 0:\n  go(1 if rank == 0 else 0)\n  wait_for_the_other()\n"
        "go(2)\n"
    )
    began = time.monotonic()
    exit_code, out, _ = finish(job(tmp_path, code, "--hang-seconds", "1"))
    assert exit_code == 0 and time.monotonic() - began < 20, out
    assert re.search(says, out) and "starting all again" in out
    assert re.search(r"rank 0 is in File .* in wait_for_the_other < File", out)
    assert "wait_for_the_other" in logs(tmp_path)["rank-0.stacks"]
    if "SIGSTOP" in hangs:
        assert "rank 1: no stack, the process does not answer" in out


def test_a_hang_without_restarts_left_ends_with_70(tmp_path):
    exit_code, out, _ = finish(
        job(tmp_path, "go(3)\ntime.sleep(60)", "--hang-seconds", "0.5", "--max-restarts", "0", workers=1)
    )
    assert exit_code == 70 and "rank 0 hangs: at step 3" in out


def test_a_program_that_does_not_beat_and_one_that_is_finished_are_left_alone(tmp_path):
    quiet = start(tmp_path, [
        sys.executable, "-m", "dsjax", "launch", "--workers", "1", "--hang-seconds", "0.2", "--",
        sys.executable, "-c", "import time; time.sleep(3)",
    ])  # fmt: skip
    assert finish(quiet)[0] == 0
    done = job(tmp_path, "go(3)\nbeat.at(3, 'finished')\ntime.sleep(3)", "--hang-seconds", "0.2", workers=1)
    assert finish(done)[0] == 0


def look(rank: int, step: int, what: str, idle: float, typical: float | None = 1.0, **more) -> Look:
    return Look(rank, None, step, what, idle, typical, **more)


def test_who_hangs():
    assert limit(look(0, 1, "step", 0), 60) == 60 and limit(look(0, 1, "step", 0, 20.0), 60) == 200
    assert limit(look(0, 1, "compiling", 0), 60) == limit(look(0, 1, "step", 0, None), 60) == 600
    assert (
        limit(look(0, 1, "saving", 0), 60) == 600
        and limit(look(0, 1, "saving", 0, state="stopped"), 60) == 60
    )
    waits = look(0, 11, "step", 99)
    assert stuck([waits, look(1, 10, "waiting for data", 98)], 60).rank == 1
    assert stuck([look(0, 10, "step", 99), look(1, 10, "waiting for data", 98)], 60).rank == 1
    assert stuck([waits, look(1, 10, "saving", 98)], 60) is None  # the others wait for it, and it may
    assert stuck([waits, look(1, 10, "step", 5)], 60) is None
    # All at one step: the one that the system has stopped, then the one that has stood still longest.
    assert stuck([look(0, 9, "step", 99), look(1, 9, "step", 97, state="stopped")], 60).rank == 1
    assert stuck([look(0, 9, "step", 97), look(1, 9, "step", 99)], 60).rank == 1
    assert stuck([Look(0, 0, 1, "step", 99.0), Look(1), look(2, 9, "finished", 999)], 60) is None


def test_sigterm_while_all_start_again_ends_with_75(tmp_path):
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen(f'up-{rank}', 'w').close()\n"
    code += "while not os.path.exists('up-0'): time.sleep(0.02)\nrank and sys.exit(70)\ntime.sleep(60)"
    process = job(tmp_path, code)
    process.stdout.readline()
    assert "starting all again" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    exit_code, out, _ = finish(process)
    assert exit_code == 75 and "attempt 1" not in out


def test_a_failing_health_check_stops_one_node(tmp_path):
    saves = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\nopen('up', 'w').close()\ntime.sleep(60)"
    process = supervise(tmp_path, saves, health="! test -e up", health_seconds=0.2)
    exit_code, out, _ = finish(process)
    assert exit_code == 75 and "draining node 0" in out and "ended with 1" in out


def test_a_heartbeat(tmp_path):
    record = tmp_path / "rank-0"
    create(record)
    pulse = Pulse(record)
    assert pulse.read() is None
    beat = Heartbeat(record, attempt=3)
    first = pulse.read()
    assert (first.process, first.attempt, first.step, first.what) == (os.getpid(), 3, 0, "starting")
    assert abs(first.booted - time.time()) < 60 and first.typical_seconds is None
    for step in range(1, 6):
        beat.at(step, "step")
        time.sleep(0.3 if step == 3 else 0.02)  # one slow step is not typical
    assert 0.015 < pulse.read().typical_seconds < 0.2 and pulse.read().count == 6
    for what in PHASES:
        beat.at(7, what)
        assert pulse.read().what == what
    with pytest.raises(ValueError):
        beat.at(8, "pondering")
    Heartbeat().at(1, "step")  # nobody watches
    Heartbeat(tmp_path / "gone" / "rank-0").at(1, "step")


def test_a_beat_is_cheap(tmp_path):
    create(tmp_path / "r")
    beat = Heartbeat(tmp_path / "r")
    began = time.process_time()
    for step in range(10_000):
        beat.at(step, "step")
    assert (time.process_time() - began) / 10_000 < 50e-6


def test_what_a_killed_supervisor_left_is_swept_and_a_living_ones_is_not(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    alive = job(tmp_path / "a", "go(1)\nwhile not os.path.exists('end'): time.sleep(0.02)", workers=1)
    killed = job(tmp_path / "b", "go(1)\ntime.sleep(60)", workers=1)

    def left(process):
        return list(Path("/dev/shm").glob(f"dsjax-launch-{process.pid}-*"))

    def works(process, directory):
        return left(process) and (directory / "at-0").exists()

    wait_for(lambda: works(alive, tmp_path / "a") and works(killed, tmp_path / "b"), 20)
    killed.kill()
    killed.wait(10)
    assert finish(job(tmp_path / "b", "go(1)", workers=1))[0] == 0
    assert not left(killed) and left(alive)
    (tmp_path / "a" / "end").touch()
    assert finish(alive)[0] == 0


def test_nothing_is_left_in_shared_memory(tmp_path):
    process = job(tmp_path, "go(1)", workers=1)
    assert finish(process)[0] == 0
    wait_for(lambda: not list(Path("/dev/shm").glob(f"dsjax-launch-{process.pid}-*")), 5)


def test_a_directory_without_a_lock_is_swept_once_it_is_old(tmp_path):
    old, new = (Path(tempfile.mkdtemp(prefix="dsjax-launch-0-", dir="/dev/shm")) for _ in range(2))
    os.utime(old, (0, 0))
    try:
        assert finish(job(tmp_path, "go(1)", workers=1))[0] == 0
        assert not old.exists() and new.exists()
    finally:
        new.rmdir()

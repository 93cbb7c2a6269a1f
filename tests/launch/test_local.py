"""`dsjax launch`: real workers, watched, ended and waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dsjax.launch.output import without_chatter

ROOT = Path(__file__).parents[2]
# What XLA's CPU collectives say, in two halves.
GLOO = b"[Gloo] Rank 0 is connected to 1 peer ranks. "
LAST = b"Expected number of connected peer ranks is : "
START = "import os, signal, sys, time\nrank = int(os.environ['DSJAX_PROCESS_ID'])\n"


def command(workers: int, code: str, *options: str) -> list[str]:
    """The command line of a job whose first failure ends it, unless `options` say otherwise."""
    options = ("--workers", str(workers), "--max-restarts", "0", *options)
    return [sys.executable, "-m", "dsjax", "launch", *options, "--", sys.executable, "-c", START + code]


def heed() -> None:
    """Gives a child the signals back that the shell took away where tests run behind `nohup` or `&`."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start(directory: Path, arguments: list[str], **more) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DSJAX_")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "preexec_fn": heed, **more}
    return subprocess.Popen(arguments, cwd=directory, env={**clean, "PYTHONPATH": str(ROOT)}, **pipes)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def run(directory: Path, workers: int, code: str) -> tuple[int, str, str]:
    return finish(start(directory, command(workers, code)))


def wait_for(what, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def logs(directory: Path) -> dict[str, str]:
    (made,) = (directory / "launch-logs").iterdir()
    return {path.name: path.read_text() for path in made.iterdir()}


def test_output_goes_to_the_terminal_behind_its_rank_and_to_the_logs(tmp_path):
    code, out, err = run(
        tmp_path, 2, "print('hello', os.environ['DSJAX_NUM_PROCESSES']); print('to stderr', file=sys.stderr)"
    )
    assert code == 0 and err == ""
    lines = out.splitlines()
    assert lines[0].startswith("dsjax launch: 2 processes; their logs are in launch-logs/")
    assert sorted(lines[1:]) == ["[0] hello 2", "[0] to stderr", "[1] hello 2", "[1] to stderr"]
    assert logs(tmp_path) == {f"rank-{r}.log": "hello 2\nto stderr\n" for r in range(2)}


def test_a_line_is_shown_while_its_worker_goes_on(tmp_path):
    process = start(tmp_path, command(1, "print('early'); time.sleep(60)"))
    began = time.monotonic()
    process.stdout.readline()
    assert process.stdout.readline() == "[0] early\n" and time.monotonic() - began < 20
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ("sys.exit(7)", 7),
        ("sys.exit(70)", 70),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("raise ValueError", 1),
    ],
)
def test_all_end_when_one_fails_and_its_code_is_returned(tmp_path, ends, expected):
    began = time.monotonic()
    code, out, _ = run(
        tmp_path,
        3,
        f"open(f'pid-{{rank}}', 'w').write(str(os.getpid()))\nif rank == 1:\n  {ends}\ntime.sleep(60)",
    )
    assert code == expected and time.monotonic() - began < 15
    assert "dsjax launch: rank 1 " in out and "ending the others" in out
    assert not any(
        psutil.pid_exists(int((tmp_path / f"pid-{r}").read_text()))
        for r in (0, 2)
        if (tmp_path / f"pid-{r}").exists()
    )


def test_one_that_was_killed_counts_before_a_peer_that_failed_for_want_of_it(tmp_path):
    # The peer is seen to end first, as when a broken connection ends it while the killed one is still torn down.
    ends = "rank or sys.exit(1)\ntime.sleep(0.3)\nos.kill(os.getpid(), signal.SIGKILL)"
    code, out, _ = run(tmp_path, 2, ends)
    assert code == 137 and "rank 1 was ended by SIGKILL" in out and "rank 0 ended" not in out


def test_a_worker_that_does_not_end_when_told_is_killed(tmp_path):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen(f'up-{rank}', 'w').close()\n"
    ready = "while not os.path.exists('up-0'): time.sleep(0.02)\n"
    began = time.monotonic()
    code = stubborn + ready + "rank and sys.exit(9)\ntime.sleep(60)"
    assert finish(start(tmp_path, command(2, code, "--grace-seconds", "0.5")))[0] == 9
    assert time.monotonic() - began < 8


def test_the_others_are_told_before_they_are_killed(tmp_path):
    tells = (
        "def told(*_):\n  open('told', 'w').close()\n  sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, told)\n"
        "rank or open('up', 'w').close()\n"
        "while not os.path.exists('up'): time.sleep(0.02)\nrank and sys.exit(9)\ntime.sleep(60)"
    )
    began = time.monotonic()
    assert run(tmp_path, 2, tells)[0] == 9
    assert (tmp_path / "told").exists() and time.monotonic() - began < 9


def test_one_that_is_done_does_not_end_the_others(tmp_path):
    code, out, _ = run(tmp_path, 2, "rank and sys.exit(0)\ntime.sleep(0.5)\nprint('went on')")
    assert code == 0 and "[0] went on" in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_passed_on_and_saving_is_waited_for(tmp_path, number):
    saves = (
        "def save(*_):\n  time.sleep(0.5 + rank / 2)\n  open(f'saved-{rank}', 'w').close()\n  sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, save); signal.signal(signal.SIGINT, save)\n"
        "open(f'up-{rank}', 'w').close()\ntime.sleep(60)"
    )
    process = start(tmp_path, command(2, saves))
    wait_for(lambda: all((tmp_path / f"up-{rank}").exists() for rank in range(2)))
    process.send_signal(number)
    assert finish(process)[0] == 75
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(2))


def test_all_preempted_is_preempted(tmp_path):
    assert run(tmp_path, 2, "sys.exit(75)")[0] == 75


def test_a_failure_while_saving_counts_more_than_those_who_saved(tmp_path):
    code = "rank or time.sleep(0.5) or sys.exit(75)\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(0.8)\nsys.exit(70)"
    assert run(tmp_path, 2, code)[0] == 70


def test_one_that_was_told_to_stop_and_did_counts_as_stopped(tmp_path):
    code, _, _ = run(tmp_path, 2, "rank or sys.exit(75)\ntime.sleep(60)")
    assert code == 75


def test_workers_die_with_a_supervisor_that_is_killed(tmp_path):
    process = start(tmp_path, command(2, "open(f'pid-{rank}', 'w').write(str(os.getpid()))\ntime.sleep(60)"))
    wait_for(lambda: all((p := tmp_path / f"pid-{rank}").exists() and p.read_text() for rank in range(2)))
    process.kill()
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]
    wait_for(
        lambda: not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids),
        5,
    )
    assert finish(process)[0] == -signal.SIGKILL


def test_a_terminal_that_goes_away_leaves_the_logs(tmp_path):
    process = start(tmp_path, command(1, "for i in range(300):\n  print('line', i)\n  time.sleep(0.002)"))
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 0 and process.stderr.read() == ""
    assert logs(tmp_path)["rank-0.log"].splitlines()[-1] == "line 299"


def test_a_verb_of_dsjax_can_be_given(tmp_path):
    process = start(
        tmp_path, [sys.executable, "-m", "dsjax", "launch", "--workers", "2", "--", "train", "missing.yaml"]
    )
    code, out, _ = finish(process)
    assert code == 2 and "missing.yaml" in out and "Traceback" not in out


@pytest.mark.parametrize(
    ("words", "says"), [(["no-such-program"], "neither a verb of dsjax"), ([], "nothing to run")]
)
def test_what_cannot_be_run_is_refused(tmp_path, words, says):
    process = start(tmp_path, [sys.executable, "-m", "dsjax", "launch", "--workers", "2", "--", *words])
    code, out, err = finish(process)
    assert code == 2 and says in out + err and not (tmp_path / "launch-logs").exists()


def test_workers_share_the_gpus(monkeypatch):
    from dsjax.launch.workers import Generation, worker_environment

    def devices(local: int) -> str | None:
        generation = Generation("k", 0, "a:1", 4, 2, 2, 2, "b")
        return worker_environment(generation, local, 2, Path("r")).get("DSJAX_LOCAL_DEVICE_IDS")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert [devices(local) for local in range(2)] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices(0) is None


def test_sigterm_ends_a_joined_process_that_does_not_handle_it(tmp_path):
    code = (
        "from dsjax.backend.platform import setup\nfrom dsjax.config.schema import RuntimeConfig\n"
        "setup(RuntimeConfig(platform='cpu', compilation_cache=None))\n"
        "open(f'up-{rank}', 'w').close()\ntime.sleep(60)"
    )
    process = start(tmp_path, command(2, code))
    wait_for(lambda: all((tmp_path / f"up-{rank}").exists() for rank in range(2)), 60)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert finish(process)[0] == 128 + signal.SIGTERM and time.monotonic() - began < 8


def test_two_workers_compute_together_and_a_killed_one_ends_both(tmp_path):
    code = (
        "from dsjax.backend.platform import setup\nfrom dsjax.config.schema import RuntimeConfig\n"
        "setup(RuntimeConfig(platform='cpu', cpu_devices=1, compilation_cache=None))\n"
        "import jax\nfrom jax.experimental.multihost_utils import process_allgather\n"
        "for i in range(10_000):\n"
        "  total = int(process_allgather(jax.numpy.array([rank + 1])).sum())\n"
        "  if i == 0: print('devices', jax.device_count(), 'total', total, flush=True)\n"
        "  if i == 3 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    exit_code, out, _ = run(tmp_path, 2, code)
    assert exit_code == 137 and "[0] devices 2 total 3" in out and "[1] devices 2 total 3" in out
    assert "rank 1 was ended by SIGKILL" in out
    assert "[Gloo]" not in out


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (GLOO + LAST + b"1\n", None),
        (b"[Gloo] Rank " + GLOO.replace(b"0", b"00") + LAST + b"1\n", None),
        (GLOO + b"step 4 loss 3\n", b"step 4 loss 3\n"),
        (LAST + b"1\n", None),
        (GLOO + LAST + b"step 4\n", b"step 4\n"),
        (b"1\n", b"1\n"),
        (b"[Gloo] rendezvous failed\n", b"[Gloo] rendezvous failed\n"),
    ],
)
def test_what_others_say_amid_the_collectives_is_shown(line, shown):
    assert without_chatter(line) == shown

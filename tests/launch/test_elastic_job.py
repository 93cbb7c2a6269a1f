"""A training run whose hosts vanish and return, through the real command: each supervisor here is a host of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import yaml
from test_local import ROOT, wait_for
from test_nodes import free_port

EVERY = 5  # steps between snapshots
BATCH = 12  # divides over 4 and 3 nodes, and over 2 and 1


def settings(directory: Path, steps: int, layers: int) -> dict[str, dict]:
    """A small Llama; what is saved lies in memory until the run stops."""
    return {
        "run": {"dir": str(directory / "run")},
        "runtime": {"platform": "cpu", "compilation_cache": str(directory / "cache")},
        "model": {
            "kind": "llama", "hidden_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4,
            "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 259,
        },
        "train": {"steps": steps, "global_batch_size": BATCH, "sequence_length": 64},
        "data": {"kind": "synthetic", "log_examples": True},
        "checkpoint": {"memory": {"every": EVERY}, "disk": {"every": 100000}},
        "observe": {"log_every": 1, "progress": "none"},
    }  # fmt: skip


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without what describes another job."""
    strangers = ("DSJAX_", "SLURM", "OMPI_", "JAX_", "XLA_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(strangers)}
    return {**clean, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **more}


class Run:
    """What a run has written so far."""

    def __init__(self, directory: Path, steps: int, layers: int = 2):
        self.directory = directory
        directory.mkdir()
        self.config = directory / "job.yaml"
        self.config.write_text(yaml.safe_dump(settings(directory, steps, layers)))

    def lines(self, name: str) -> list[dict]:
        path = self.directory / "run" / name
        whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
        return [json.loads(line) for line in whole.splitlines()]

    def steps(self) -> list[tuple[int, float, float]]:
        """Step, loss and time of each line."""
        return [(r["step"], r["loss"], r["time"]) for r in self.lines("metrics.jsonl") if "loss" in r]

    def reached(self) -> int:
        return max((step for step, *_ in self.steps()), default=0)

    def events(self, *kinds: str) -> list[dict]:
        return [e for e in self.lines("events.jsonl") if e["kind"] in kinds]

    def examples(self) -> dict[int, Counter[str]]:
        """Step -> how often each example was in its batch."""
        found: dict[int, Counter[str]] = {}
        for file in (self.directory / "run").glob("examples-*.jsonl"):
            for line in self.lines(file.name):
                found.setdefault(line["step"], Counter()).update(line["ids"])
        return found

    def train_undisturbed(self, devices: int) -> None:
        command = [sys.executable, "-m", "dsjax", "train", str(self.config), f"runtime.cpu_devices={devices}"]
        subprocess.run(
            command, cwd=self.directory, env=clean_environment(), check=True, capture_output=True, timeout=600
        )


class Host:
    """A supervisor, with a memory of its own.

    Args:
      prefix: words before the command, to run it elsewhere.
      more: further variables of its environment.
    """

    def __init__(
        self, run: Run, rank: int, options: Sequence[str], prefix: Sequence[str] = (), **more: str
    ) -> None:
        self.memory = run.directory / f"memory-{rank}"
        self.said: list[tuple[float, str]] = []  # when, line
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "dsjax", "launch", "--workers", "1", "--node-rank", str(rank),
             *options, "--", "train", str(run.config)],
            cwd=run.directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env=clean_environment(DSJAX_CHECKPOINT__MEMORY__PATH=str(self.memory), **more),
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append((time.time(), line.rstrip("\n")))

    def when(self, text: str, after: float = 0.0) -> float | None:
        """When it said a line with this text."""
        return next((when for when, line in list(self.said) if text in line and when > after), None)

    def text(self) -> str:
        return "\n".join(line for _, line in self.said)

    def workers(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def vanish(self) -> float:
        """Kills the supervisor alone, which takes its worker with it, and empties the memory; returns when."""
        workers, when = self.workers(), time.time()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert not psutil.wait_procs(workers, timeout=5)[1], "a worker outlived its supervisor"
        shutil.rmtree(self.memory)
        return when

    def ends(self, seconds: float) -> int:
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def hosts():
    """Where a test's hosts are kept, by rank; those that are left are ended."""
    kept: dict[int, Host] = {}
    yield kept
    for host in kept.values():
        host.end()


def slowly(steps: int, seconds: float) -> str:
    """A fault that gives each step so long at least: hosts are to come back before the run is over."""
    return f"slow@step=1,seconds={seconds},steps={steps},attempt=any"


def compare(run: Run, twin: Run, steps: int) -> float:
    """Each step and each example once, and the last loss as undisturbed; returns how far it is from that."""
    ours, theirs = run.steps(), twin.steps()
    assert [step for step, *_ in ours] == list(range(1, steps + 1))
    assert run.examples() == twin.examples()
    assert all(batch.total() == BATCH for batch in run.examples().values())
    difference = abs(ours[-1][1] - theirs[-1][1])
    assert difference < 1e-4
    return difference


def report(took: dict[str, float], record_property) -> None:
    """Figures of a test: shown by ``pytest -s``, kept by ``--junit-xml``."""
    for what, value in took.items():
        record_property(what, value)
        print(f"{what}: {value:.3g}")


def recovery(run: Run, leader: Host, killed: float, after: int) -> dict[str, float]:
    """Seconds from the death of a host to the next step, and what they were spent on."""
    lost = leader.when(" is gone; waiting ", killed)
    again = leader.when("attempt ", killed)
    resumed = next(e["time"] for e in run.events("resumed") if e["time"] > killed)
    step = next(when for step, _, when in run.steps() if when > resumed and step > after)
    assert lost is not None and again is not None
    return {
        "in all": step - killed,
        "to see that it is lost": lost - killed,
        "to wait for it": again - lost,
        "to start and restore": resumed - again,
        "to compile and do a step": step - resumed,
    }


def in_time(seconds: float) -> float:
    """Seconds that so many become while a machine has more to do than its cores can."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def test_the_host_that_is_left_goes_on_from_its_buddys_memory(tmp_path, hosts):
    steps = 20
    run = Run(tmp_path / "pair", steps, layers=1)
    options = ["--nodes", "1:2", "--rendezvous", f"127.0.0.1:{free_port()}", "--rejoin-seconds", "0.5"]
    for rank in range(2):
        hosts[rank] = Host(run, rank, options, DSJAX_FAULT=slowly(steps, 0.1))
    wait_for(lambda: run.reached() >= EVERY + 3, 120)
    killed = hosts.pop(1).vanish()
    at = run.reached()
    assert hosts[0].ends(120) == 0, hosts[0].text()
    (event,) = run.events("resumed")
    assert event["tier"] == "memory" and event["processes"] == 1 and 0 <= at - event["step"] <= 2 * EVERY
    assert [step for step, *_ in run.steps()] == list(range(1, steps + 1))
    assert all(batch.total() == len(batch) == BATCH for batch in run.examples().values())
    # Its link ended: there is no need to wait until it has been silent for long.
    assert recovery(run, hosts[0], killed, event["step"])["to see that it is lost"] < 8
    assert not list(hosts[0].memory.rglob("*"))  # what is on disk is no longer kept in memory


@pytest.mark.slow
def test_a_run_goes_on_without_a_lost_host_and_grows_again(tmp_path, hosts, record_property):
    steps = 120
    run, twin = Run(tmp_path / "elastic", steps), Run(tmp_path / "twin", steps)
    twin.train_undisturbed(devices=4)
    options = ["--nodes", "3:4", "--rendezvous", f"127.0.0.1:{free_port()}", "--rejoin-seconds", "3"]
    fault = slowly(steps, 0.1)
    for rank in range(4):
        hosts[rank] = Host(run, rank, options, DSJAX_FAULT=fault)
    wait_for(lambda: run.reached() >= 32, 240)

    killed = hosts[2].vanish()
    at = run.reached()
    wait_for(lambda: run.events("resumed") and run.reached() > at + 2, 180)
    (event,) = run.events("resumed")
    assert event["tier"] == "memory" and event["processes"] == 3
    assert 0 <= at - event["step"] <= 2 * EVERY
    took = recovery(run, hosts[0], killed, event["step"])

    back = time.time()
    hosts[2] = Host(run, 2, options, DSJAX_FAULT=fault)
    wait_for(lambda: len(run.events("resumed")) == 2, 180)
    assert {rank: host.ends(300) for rank, host in hosts.items()} == dict.fromkeys(range(4), 0), hosts[
        0
    ].text()
    grown = run.events("resumed")[1]
    assert grown["processes"] == 4
    said = hosts[0].text()
    assert "attempt 1: 3 nodes, 3 processes" in said and "attempt 2: 4 nodes, 4 processes" in said
    took["to grow again"] = next(when for step, _, when in run.steps() if step > grown["step"]) - back
    took["difference of the last loss"] = compare(run, twin, steps)
    report(took, record_property)
    assert took["in all"] < in_time(30)

"""What a run loses when its processes are killed again and again: kill -9 at random moments, under `dsjax launch`.

    python benchmarks/chaos.py [--quick] [--kills N] [--seed N] [--json FILE]

A small Llama trains as 2, 3 and 4 processes with a snapshot in memory every few steps.  One of them, or all, are killed
(SIGKILL) at random moments: while they start, restore, compile, train and save.  What is counted afterwards: whether
each restart went on at most `memory.every` steps back, whether every step's loss is that of a run that nobody
disturbed, and whether each example was trained on once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

EVERY = 5  # steps between snapshots in memory
# A third of the kills come so many seconds after the one before at most: while processes start, restore and compile.
LONGEST_START = 8.0
LONGEST_LIFE = 1.5  # the others so many seconds after a step at most: while they train and save
STEPS_A_KILL = 60  # more than a life gets done; the run goes on until its steps are done
WIDTH = 118  # of the table where the output is no terminal
BATCH = 12  # divides over 2, 3 and 4 processes


def settings(directory: Path, steps: int) -> dict[str, Any]:
    """A run whose steps are short beside its starts."""
    return {
        "run": {"dir": str(directory)},
        "runtime": {"platform": "cpu", "compilation_cache": str(directory.parent / "cache")},
        "model": {
            "kind": "llama", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 259,
        },
        "train": {"steps": steps, "global_batch_size": BATCH, "sequence_length": 64},
        "data": {"kind": "synthetic", "log_examples": True},
        "checkpoint": {"memory": {"every": EVERY}, "disk": {"every": 50, "keep": 2}},
        "observe": {"log_every": 1, "progress": "none"},
    }  # fmt: skip


@dataclass
class Run:
    """A job of so many processes in a directory of its own."""

    directory: Path
    workers: int
    steps: int
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.directory.mkdir(parents=True)
        config = self.directory / "job.yaml"
        config.write_text(yaml.safe_dump(settings(self.directory / "run", self.steps)))
        command = [sys.executable, "-m", "dsjax", "launch", "--workers", str(self.workers)]
        command += ["--max-restarts", "100000", "--give-up-after", "1000", "--", "train", str(config)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
        log = (self.directory / "output").open("wb")
        self.process = subprocess.Popen(
            command, cwd=self.directory, env=environment, stdout=log, stderr=subprocess.STDOUT
        )

    def ended(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    def pids(self) -> list[int]:
        """The worker processes that are alive."""
        assert self.process is not None
        try:
            return [child.pid for child in psutil.Process(self.process.pid).children()]
        except psutil.NoSuchProcess:
            return []

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The whole records of a log."""
        path = self.directory / "run" / name
        if not path.exists():
            return []
        whole = path.read_bytes().rpartition(b"\n")[0].splitlines()
        return [json.loads(line) for line in whole]

    def losses(self) -> dict[int, float]:
        """Step -> loss, of every line; a step that stands twice fails."""
        found = [(line["step"], line["loss"]) for line in self.lines("metrics.jsonl") if "loss" in line]
        assert len(dict(found)) == len(found), "a step stands twice in metrics.jsonl"
        return dict(found)

    def examples(self) -> dict[int, Counter[str]]:
        """Step -> how often each example was in its batch."""
        found: dict[int, Counter[str]] = {}
        for file in (self.directory / "run").glob("examples-*.jsonl"):
            for line in self.lines(file.name):
                found.setdefault(line["step"], Counter()).update(line["ids"])
        return found


@dataclass
class Outcome:
    """What a disturbed run has come to, beside its undisturbed twin."""

    workers: int
    kills: int = 0
    resumed: int = 0
    steps_lost: list[int] = field(default_factory=list)
    recovery_seconds: list[float] = field(default_factory=list)
    tiers: Counter[str] = field(default_factory=Counter)
    loss_mismatches: int = 0
    examples_lost: int = 0
    examples_repeated: int = 0
    exit_code: int | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """The keys of the results."""
        return {
            "workers": self.workers,
            "kills": self.kills,
            "resumed": self.resumed,
            "max_steps_lost": max(self.steps_lost, default=0),
            "loss_mismatches": self.loss_mismatches,
            "examples_lost": self.examples_lost,
            "examples_repeated": self.examples_repeated,
            "recovery_seconds_median": statistics.median(self.recovery_seconds or [0.0]),
            "from": dict(self.tiers),
            "exit_code": self.exit_code,
        }


def wait_for_step(run: Run, past: int) -> None:
    """Returns when the run has made a step since it was killed, or has ended."""
    written = len(run.lines("metrics.jsonl"))
    while not run.ended():
        lines = run.lines("metrics.jsonl")
        if lines and (lines[-1]["step"] > past or len(lines) > written):
            return
        time.sleep(0.2)


def disturb(run: Run, outcome: Outcome, kills: int, draw: random.Random, progress: Progress) -> None:
    """Kills one or all of the run's processes until that was done `kills` times, then lets it finish."""
    task = progress.add_task(f"{run.workers} processes", total=kills)
    run.start()
    reached: list[tuple[float, int]] = []  # when a kill came, and the last step that was told before
    while outcome.kills < kills and not run.ended():
        if draw.random() < 1 / 3:
            time.sleep(draw.uniform(0.0, LONGEST_START))
        else:
            wait_for_step(run, reached[-1][1] if reached else 0)
            time.sleep(draw.uniform(0.0, LONGEST_LIFE))
        pids = run.pids()
        if not pids:
            continue
        for pid in pids if draw.random() < 0.5 else [draw.choice(pids)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        reached.append((time.time(), max(run.losses(), default=0)))
        outcome.kills += 1
        progress.advance(task)
    assert run.process is not None
    outcome.exit_code = run.process.wait()
    _look_at_restarts(run, outcome, reached)


def _look_at_restarts(run: Run, outcome: Outcome, kills: list[tuple[float, int]]) -> None:
    """Steps lost and seconds to the next step, for each start after a kill."""
    steps = [(line["time"], line["step"]) for line in run.lines("metrics.jsonl") if "loss" in line]
    for event in run.lines("events.jsonl"):
        if event["kind"] not in ("resumed", "started"):
            continue
        before = [kill for kill in kills if kill[0] < event["time"]]
        if not before:
            continue
        outcome.resumed += 1
        outcome.tiers[event["tier"] or "nothing"] += 1
        killed, last = before[-1]
        outcome.steps_lost.append(max(0, last - event["step"]))
        after = [when for when, step in steps if when > event["time"] and step > event["step"]]
        others = [when for when, _ in kills if when > event["time"]]
        if after and not (others and others[0] < after[0]):
            outcome.recovery_seconds.append(after[0] - killed)


def compare(run: Run, twin: Run, outcome: Outcome) -> None:
    """Losses and examples of a disturbed run against those of its undisturbed twin."""
    have, want = run.losses(), twin.losses()
    # The same program on the same processes: the same bits.
    outcome.loss_mismatches = sum(have.get(step) != loss for step, loss in want.items())
    ours, theirs = run.examples(), twin.examples()
    for step, wanted in theirs.items():
        got = ours.get(step, Counter())
        outcome.examples_lost += (wanted - got).total()
        outcome.examples_repeated += (got - wanted).total()


def campaign(workers: int, kills: int, draw: random.Random, place: Path, progress: Progress) -> Outcome:
    """One disturbed run of so many processes, and its twin."""
    outcome, steps = Outcome(workers), max(30, STEPS_A_KILL * kills)
    twin = Run(place / f"twin-{workers}", workers, steps)
    twin.start()
    assert twin.process is not None
    if twin.process.wait() != 0:
        raise SystemExit(f"the undisturbed run failed: {(twin.directory / 'output').read_text()[-2000:]}")
    run = Run(place / f"run-{workers}", workers, steps)
    disturb(run, outcome, kills, draw, progress)
    compare(run, twin, outcome)
    return outcome


def table(outcomes: list[Outcome]) -> Table:
    """One row a number of processes."""
    shown = Table(
        "processes", "kills", "restarts", "steps lost at most", "wrong losses", "examples lost", "repeated",
        "seconds to the next step", "went on from", box=None,
    )  # fmt: skip
    for one in outcomes:
        facts = one.facts
        shown.add_row(
            str(one.workers), str(one.kills), str(one.resumed), f"{facts['max_steps_lost']} (every {EVERY})",
            str(one.loss_mismatches), str(one.examples_lost), str(one.examples_repeated),
            f"{facts['recovery_seconds_median']:.1f}", ", ".join(f"{k} {n}" for k, n in one.tiers.items()),
        )  # fmt: skip
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="3 kills of 2 processes")
    parser.add_argument("--kills", type=int, default=100, help="in all (default 100)")
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    sizes, kills = ([2], 3) if asked.quick else (asked.workers, asked.kills)
    draw = random.Random(asked.seed)
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    outcomes = []
    with tempfile.TemporaryDirectory() as place, Progress(console=console) as progress:
        for i, workers in enumerate(sizes):
            share = kills // len(sizes) + (i < kills % len(sizes))
            outcomes.append(campaign(workers, share, draw, Path(place), progress))
    console.print(table(outcomes))
    cases = [one.facts for one in outcomes]
    totals = {
        key: sum(case[key] for case in cases)
        for key in ("kills", "resumed", "loss_mismatches", "examples_lost", "examples_repeated")
    }
    totals["max_steps_lost"] = max(case["max_steps_lost"] for case in cases)
    if asked.json:
        asked.json.write_text(json.dumps({**totals, "every": EVERY, "cases": cases}, indent=2) + "\n")
    wrong = totals["loss_mismatches"] + totals["examples_lost"] + totals["examples_repeated"]
    failed = any(case["exit_code"] != 0 for case in cases)
    return int(bool(wrong) or failed or totals["max_steps_lost"] > EVERY)


if __name__ == "__main__":
    sys.exit(main())

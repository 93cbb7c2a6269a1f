"""How long a start takes: the help, and the first training step with and without compiled programs at hand.

The times are those that a person waits: from starting the process to the help's last line, or to the
moment the first step's numbers are known.  Data is built before; each cold start has an empty
compilation cache, the warm start after it has that cache filled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
DSJAX = [sys.executable, "-m", "dsjax"]
STOPPED = 75  # train.stop_after ends a call as a pre-emption would


class Unmeasured(Exception):
    """Why a number could not be measured here."""


def seconds_of_help(repeats: int = 5) -> float:
    """Median seconds of `dsjax --help`."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        subprocess.run([*DSJAX, "--help"], check=True, capture_output=True)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def build_data(config: Path) -> None:
    """Build the config's data where that is not done yet."""
    done = subprocess.run([*DSJAX, "data", "build", str(config)], capture_output=True, text=True)
    if done.returncode:
        raise Unmeasured(f"data build ended with {done.returncode}: {last_line(done.stderr)}")


def seconds_to_first_step(config: Path, run: Path, cache: Path) -> float:
    """Seconds from starting `dsjax train` to knowing the first step's loss, in a new run directory."""
    settings = [
        f"run.dir={run}",
        f"runtime.compilation_cache={cache}",
        "train.stop_after=1",
        "eval.every=0",
        "observe.progress=none",
    ]
    started = time.time()
    done = subprocess.run([*DSJAX, "train", str(config), *settings], capture_output=True, text=True)
    if done.returncode not in (0, STOPPED):
        raise Unmeasured(f"train ended with {done.returncode}: {last_line(done.stderr)}")
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    if first["step"] != 1:
        raise Unmeasured(f"the first line of metrics.jsonl is of step {first['step']}, not 1")
    return first["time"] - started


def last_line(text: str) -> str:
    """The last line of a process's errors."""
    return (text.strip().splitlines() or ["no message"])[-1]


def measure(config: Path, rounds: int) -> dict[str, Any]:
    """The numbers of this machine: rounds of a cold and a warm start each, medians."""
    result: dict[str, Any] = {"help_seconds": seconds_of_help()}
    cold, warm = [], []
    try:
        build_data(config)
        for _ in range(rounds):
            with tempfile.TemporaryDirectory(prefix="dsjax-start-") as scratch:
                place = Path(scratch)
                cold.append(seconds_to_first_step(config, place / "cold", place / "cache"))
                warm.append(seconds_to_first_step(config, place / "warm", place / "cache"))
        result["first_step_seconds_cold"] = statistics.median(cold)
        result["first_step_seconds_warm"] = statistics.median(warm)
    except Unmeasured as why:
        result |= {"first_step_seconds_cold": None, "first_step_seconds_warm": None, "skipped": str(why)}
    return result


def table(result: dict[str, Any], config: Path, rounds: int) -> Table:
    """The result as a person reads it."""
    shown = Table(
        "start", "seconds", box=None, title=f"{config.name}, median of {rounds}", title_justify="left"
    )
    rows = [
        ("dsjax --help (median of 5)", "help_seconds"),
        ("first step, empty compilation cache", "first_step_seconds_cold"),
        ("first step, filled compilation cache", "first_step_seconds_warm"),
    ]
    for name, key in rows:
        value = result[key]
        shown.add_row(name, f"skipped: {result['skipped']}" if value is None else f"{value:.2f}")
    return shown


def main() -> int:
    """Measure, print one table, write --json; 1 where something could not be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round instead of three")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    parser.add_argument("--config", type=Path, default=CONFIG, help="what to train (default: the quickstart)")
    options = parser.parse_args()
    rounds = 1 if options.quick else 3
    result = measure(options.config, rounds)
    Console(soft_wrap=True).print(table(result, options.config, rounds))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return int("skipped" in result)


if __name__ == "__main__":
    sys.exit(main())

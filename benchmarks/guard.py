"""What looking after numbers costs, and what becomes of a run whose numbers go wrong.

    python benchmarks/guard.py [--quick] [--json FILE]

Overhead: the compiled step of the quickstart's model as it is, and without what keeps a state as it was where a step is
not finite; they take turns, and the ratio of the medians of their rounds is given with the interval that 95% of
resampled medians lie in.

Recovery: a small model trains with a fault injected (`DSJAX_FAULT`), under each way to meet it.  Told are the events,
how many steps of the run's number did not count or were done again, and the mean loss of the last steps against
that of a run that nothing happened to.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from convergence import QUICK, QUICKSTART, WIDTH
from rich.console import Console
from rich.table import Table

from dsjax.backend.platform import setup
from dsjax.config import Config, load
from dsjax.config.schema import RuntimeConfig
from dsjax.data import open_train
from dsjax.errors import Diverged, InternalError
from dsjax.train import step as step_module
from dsjax.train.assemble import assemble

COMMON = (
    "eval.every=0",
    "eval.compressors=[]",
    "eval.samples=[]",
    "observe.progress=none",
    "observe.log_every=1",
)
TOLD = ("skipped", "recomputed", "rolled_back", "nonfinite_located", "replicas_differ", "recompute_differs")
LAST = 20  # steps whose mean loss is compared
STEPS = 200
RECOVERY = (
    *QUICK,
    "mesh.data=2",
    f"train.steps={STEPS}",
    "checkpoint.disk.every=0",
    "checkpoint.memory.every=5",
)


@dataclass(frozen=True)
class Case:
    """A fault, and the settings that it is met with."""

    fault: str
    settings: tuple[str, ...]

    @property
    def way(self) -> str:
        """The settings in a word."""
        return ", ".join(setting.rpartition(".")[2] for setting in self.settings)


SKIP = ("stability.on_nonfinite=skip",)
ROLLBACK = ("stability.on_nonfinite=rollback",)
CASES = (
    Case("nan@step=100", SKIP),
    Case("inf@step=100", SKIP),
    Case("nan@step=100", ("stability.on_nonfinite=recompute", "precision.policy=bf16")),
    Case("nan@step=100,steps=5", SKIP),
    Case("nan@step=100,steps=5", ROLLBACK),
    Case("spike@step=100,factor=1e4", SKIP),
    Case("spike@step=100,factor=1e4", ROLLBACK),
    Case("spike@step=100,factor=1e4", ("stability.clip=median",)),
    Case("nan@step=100,steps=1000", ROLLBACK),
    Case("nan@step=100,op=ffn", SKIP),
    Case("nan@step=100,layer=0,op=attention,pass=backward", SKIP),
    Case("nan@step=100,layer=0,op=norm,device=1", SKIP),
    Case("bitflip@step=100,device=1", ("stability.check_replicas_every=10",)),
    Case("bitflip@step=100,device=1,where=compute", ("stability.check_recompute_every=10",)),
)


# ---- overhead --------------------------------------------------------------------------------------


def compiled(config: Config, checked: bool) -> Any:
    """A function that makes one step and waits for it."""
    trainer = assemble(config).trainer
    program = trainer.program
    batch = next(iter(open_train(config, trainer.rows(config.train.global_batch_size)).iterate(0)))
    placed = program.place(batch)
    unguarded = mock.patch.object(
        step_module, "guarded", lambda layout, applied, update, state: update(state)
    )
    with mock.MagicMock() if checked else unguarded:
        run = program.step(placed)
    state = program.init(0)

    def turn() -> None:
        nonlocal state
        state, metrics = run(state, placed, program.votes())
        jax.block_until_ready((state, metrics))

    return turn


def overhead(base: Sequence[str], rounds: int, steps: int) -> dict[str, Any]:
    """Seconds a step with checks over those without, minus 1, and the interval; on one device."""
    setup(RuntimeConfig(cpu_devices=1, distributed="none"))
    with tempfile.TemporaryDirectory(prefix="dsjax-guard-") as directory:
        config = load([QUICKSTART], [*COMMON, *base, f"run.dir={directory}"], environ={})
        turns = {"checked": compiled(config, True), "bare": compiled(config, False)}
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        for number in range(rounds + 1):
            for name in sorted(turns, reverse=number % 2 == 0):
                begun = time.perf_counter()
                for _ in range(steps):
                    turns[name]()
                if number:
                    seconds[name].append((time.perf_counter() - begun) / steps)
    ratios = [a / b - 1 for a, b in zip(seconds["checked"], seconds["bare"], strict=True)]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "overhead_fraction": statistics.median(ratios),
        "overhead_interval": [medians[50], medians[-51]],
        "step_seconds": statistics.median(seconds["checked"]),
        "rounds": rounds,
    }


# ---- recovery --------------------------------------------------------------------------------------


def trained(case: Case | None, directory: Path) -> dict[str, Any]:
    """One run: the mean loss of its last steps and what its events say."""
    settings = () if case is None else case.settings
    config = load([QUICKSTART], [*COMMON, *RECOVERY, *settings, f"run.dir={directory}"], environ={})
    gave_up = ""
    with mock.patch.dict(os.environ, {} if case is None else {"DSJAX_FAULT": case.fault}):
        trainer = assemble(config).trainer
        try:
            trainer.fit(open_train(config, trainer.rows(config.train.global_batch_size)), config.train.steps)
        except (Diverged, InternalError) as error:
            gave_up = f"exit code {error.exit_code}"
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    wrong = [e for e in events if e["kind"] in TOLD]
    lost = sum(1 for e in wrong if e["kind"] == "skipped" and not any(_undone(e, w) for w in wrong))
    gone = [e["skipped_batches"] for e in wrong if e["kind"] == "rolled_back"]
    lost += sum(last - first + 1 for first, last in gone)
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
    return {
        "events": [_said(e) for e in wrong],
        "steps_lost": lost,
        "loss": statistics.mean(losses[-LAST:]),
        "gave_up": gave_up,
    }


def _said(event: dict[str, Any]) -> str:
    """An event in few words: what, when and, where it tells, in what of the model or on which device."""
    where = ""
    if event.get("found"):
        layer = "" if event["layer"] is None else f" of layer {event['layer']}"
        where = f" in {event['operator']}{layer}, {event['direction']}"
    alone = f" on device {event['devices'][0]}" if len(event.get("devices", ())) == 1 else ""
    return f"{event['kind']} {event['step']}{where}{alone}"


def _undone(skipped: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a skipped step is among those that a rollback took back."""
    return other["kind"] == "rolled_back" and other["step"] < skipped["step"] <= other["bad_steps"][1]


def recovered(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """All cases against a run that nothing happened to."""
    found = []
    with tempfile.TemporaryDirectory(prefix="dsjax-guard-") as scratch:
        clean = trained(None, Path(scratch) / "clean")
        for number, case in enumerate(cases):
            one = trained(case, Path(scratch) / str(number))
            found.append(
                {
                    "fault": case.fault, "way": case.way, "recovered": not one["gave_up"],
                    "steps_lost": one["steps_lost"], "final_loss_ratio": one["loss"] / clean["loss"],
                    "events": one["events"], "gave_up": one["gave_up"],
                }
            )  # fmt: skip
    return found


def table(results: Sequence[dict[str, Any]]) -> Table:
    """The results as a person reads them."""
    shown = Table("fault", "met with", "steps lost", "last losses to a clean run", "events", box=None)
    for one in results:
        events = one["events"]
        told = ", ".join(events[:3]) + (f", ... {len(events)} in all" if len(events) > 3 else "")
        end = f"{one['final_loss_ratio'] - 1:+.2%}" if one["recovered"] else f"ended, {one['gave_up']}"
        shown.add_row(one["fault"], one["way"], str(one["steps_lost"]), end, told)
    return shown


def main() -> int:
    """Measure, print the tables, write --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model and few cases, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    options = parser.parse_args()
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:
        base, rounds, steps = (QUICK, 10, 20) if options.quick else ((), 40, 3)
        cost = alone.submit(overhead, base, rounds, steps).result()
    setup(RuntimeConfig(cpu_devices=2, distributed="none"))
    results = recovered([CASES[0], CASES[4]] if options.quick else CASES)
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    low, high = cost["overhead_interval"]
    console.print(
        f"checks cost {cost['overhead_fraction']:+.2%} of a step of {cost['step_seconds']:.3f} s "
        f"(95%: {low:+.2%} to {high:+.2%}; {cost['rounds']} rounds)\n"
    )
    console.print(table(results))
    if options.json:
        options.json.write_text(json.dumps({**cost, "cases": results}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How long planning takes for clusters that are not here, and how near the formulas come to the compiler.

    python benchmarks/plan.py [--quick] [--json FILE]

Each case is a process of its own, `dsjax plan` as it is typed, and its seconds are those that a person
waits; of them, what tracing, lowering and compiling took stands beside.  The analytic error is that of the
formulas' bytes a device against XLA's.  `--quick` plans small models only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from start import DSJAX, last_line

from dsjax.aot import missing_for, parse_target
from dsjax.config import load
from dsjax.errors import EXIT_DONE, EXIT_OUT_OF_MEMORY
from dsjax.plan import analytic
from dsjax.plan.compiled import vocabulary
from dsjax.plan.show import gib
from dsjax.plan.template import as_yaml, starting_config

CONFIGS = Path(__file__).parents[1] / "configs"
WIDTH = 110  # of the table where the output is no terminal
LONG = ("train.sequence_length=8192", "train.remat=full", "mesh.fsdp=8")


@dataclass(frozen=True)
class Case:
    """A model on a cluster.

    Attributes:
      config: a file; None: what `dsjax init` makes of the model for the cluster.
    """

    model: str
    target: str
    config: Path | None = None
    settings: tuple[str, ...] = ()


def cases(quick: bool) -> Iterator[Case]:
    """What is planned."""
    if quick:
        small = ("mesh.fsdp=8", "train.global_batch_size=8")
        yield Case("quickstart", "cpu:8", CONFIGS / "quickstart.yaml", small)
        yield Case("llama3.2-1b", "8xH100", CONFIGS / "models" / "llama3.2-1b.yaml", small)
        return
    for nodes in (1, 16, 128):
        spread = (f"mesh.data={nodes}", f"train.global_batch_size={8 * nodes}")
        target = f"{nodes}x8xH100" if nodes > 1 else "8xH100"
        yield Case("llama3-8b", target, CONFIGS / "models" / "llama3-8b.yaml", (*LONG, *spread))
    yield Case("llama3-70b", "32x8xH100")
    yield Case("llama3-405b", "128x8xH100")


def measure(case: Case) -> dict[str, Any]:
    """One case; `skipped` says why where it could not run."""
    told: dict[str, Any] = {"model": case.model, "target": case.target}
    target = parse_target(case.target)
    missing = missing_for(target.chip.kind)
    if missing:
        return {**told, "skipped": missing}
    with tempfile.TemporaryDirectory(prefix="dsjax-plan-") as scratch:
        config, answer = case.config, Path(scratch) / "plan.json"
        if config is None:
            config = Path(scratch) / "start.yaml"
            config.write_text(as_yaml(starting_config(case.model, target), target, config.name))
        command = [*DSJAX, "plan", str(config), *case.settings, "--on", case.target, "--json", str(answer)]
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - started
        if done.returncode not in (EXIT_DONE, EXIT_OUT_OF_MEMORY) or not answer.exists():
            return {**told, "skipped": f"dsjax plan ended with {done.returncode}: {last_line(done.stderr)}"}
        plan = json.loads(answer.read_text())
        resolved = load([config], list(case.settings))
    total = plan["memory"]["total"]
    formulas = analytic.memory(analytic.lay_out(resolved, target, vocabulary(resolved))).total
    return {
        **told,
        "seconds": seconds,
        "compile_seconds": plan["compile_seconds"],
        "bytes_per_device": total,
        "fits": plan["fits"],
        "analytic_error": formulas / total - 1 if plan["compiled"] else None,
        "predicted_step_seconds": plan["forecast"]["step_seconds"],
    }


def table(results: list[dict[str, Any]]) -> Table:
    """The results as a person reads them."""
    shown = Table(
        "model", "cluster", "seconds", "of it compiling", "a device", "fits", "formulas off by", "a step", box=None
    )  # fmt: skip
    for one in results:
        if "skipped" in one:
            shown.add_row(one["model"], one["target"], "skipped")
            continue
        error = one["analytic_error"]
        shown.add_row(
            one["model"],
            one["target"],
            f"{one['seconds']:.1f}",
            f"{one['compile_seconds']:.1f}",
            gib(one["bytes_per_device"]),
            "yes" if one["fits"] else "no",
            "" if error is None else f"{error:+.1%}",
            f"{one['predicted_step_seconds']:.3g} s",
        )
    return shown


def main() -> int:
    """Measure, print one table, write --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small models only, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    options = parser.parse_args()
    results = [measure(case) for case in cases(options.quick)]
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(table(results))
    for one in results:
        if "skipped" in one:
            console.print(f"{one['model']} on {one['target']} skipped: {one['skipped']}", markup=False)
    if options.json:
        options.json.write_text(json.dumps({"cases": results}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How much of its time a pipeline stands idle: schedules as the executor runs them, against their formulas.

    python benchmarks/pipeline.py [--quick] [--pace N] [--json FILE]

The executor runs on simulated devices, one a stage, and a layer sleeps where it would compute: 50 ms a forward,
100 ms a backward (zero_bubble: 50 ms each half).  Devices sleep at the same time, so two cores are enough for
eight of them.  A chunk of an interleaved stage sleeps as long as a whole stage of the other schedules does: idle
shares do not depend on the unit of time, and a long sleep outweighs what simulating the devices costs.  What a
forward computed is kept for its backward, not computed again.  Work is the time that was really slept.

Two real processes with a core each then train a small Llama in two stages, against one process with one core that
holds all its layers; they take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table
from start import DSJAX

from dsjax.backend.platform import setup
from dsjax.config.schema import RuntimeConfig
from dsjax.mesh import make_mesh
from dsjax.mesh.axes import AXES
from dsjax.pipelining.executor import AXIS, Parts, Pipeline, Work
from dsjax.pipelining.schedule import bubble_formula, make_schedule
from dsjax.pipelining.slots import allot

FORWARD, BACKWARD, WEIGHT = 0.05, 0.1, 0.05  # seconds; the weights' half is part of the backward
WIDTH = 110  # of the table where the output is no terminal
NOTHING = np.zeros((), np.float32)


@dataclass(frozen=True)
class Case:
    """A schedule and its size."""

    schedule: str
    stages: int
    microbatches: int
    virtual: int = 1


def cases(quick: bool) -> Iterator[Case]:
    """What is run."""
    if quick:
        for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble"):
            yield Case(schedule, 2, 8, 2 if schedule == "interleaved" else 1)
        yield Case("interleaved", 4, 16, 2)
        for schedule in ("1f1b", "interleaved", "zero_bubble"):
            yield Case(schedule, 8, 13, 4 if schedule == "interleaved" else 1)
        return
    for stages in (2, 4, 8):
        for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble"):
            for count in sorted({stages, 13, 4 * stages, 64}):
                yield Case(schedule, stages, count, 2 if schedule == "interleaved" else 1)
    yield Case("interleaved", 8, 13, 4)
    yield Case("interleaved", 8, 13, 8)


# ---- schedules -------------------------------------------------------------------------------------


@dataclass
class Sleeps:
    """The sleeps of one run.

    Attributes:
      pace: what the seconds asked for are multiplied with.
      taken: what each was for, and the seconds it really took; those of all devices.
    """

    pace: float = 0.0
    taken: list[tuple[str, float]] = field(default_factory=list)

    def after(self, kind: str, seconds: float, x: jax.Array) -> jax.Array:
        """A zero that is known so many seconds after x is."""

        def sleep(_: Any) -> np.ndarray:
            begun = time.perf_counter()
            time.sleep(seconds * self.pace)
            self.taken.append((kind, time.perf_counter() - begun))
            return NOTHING

        # Whatever is added to the answer waits for it, and the compiler cannot know that it is zero.
        return jax.pure_callback(sleep, jax.ShapeDtypeStruct((), jnp.float32), x[0])


def sleeping_layer(sleeps: Sleeps, halves: bool) -> Any:
    """``layer(weight, x) -> weight * x``, slowly.

    Args:
      halves: the gradients of x and of the weight take their time apart.
    """

    def forward(weight: jax.Array, x: jax.Array) -> Any:
        return weight * x + sleeps.after("forward", FORWARD, x), (weight, x)

    def backward(kept: Any, gradient: jax.Array) -> Any:
        weight, x = kept
        if halves:
            of_x = gradient + sleeps.after("backward", BACKWARD - WEIGHT, gradient)
            of_weight = gradient + sleeps.after("weight", WEIGHT, gradient * x)
        else:
            of_x = of_weight = gradient + sleeps.after("backward", BACKWARD, gradient)
        return of_weight * x, of_x * weight

    layer = jax.custom_vjp(lambda weight, x: forward(weight, x)[0])
    layer.defvjp(forward, backward)
    return layer


class Run:
    """A case, compiled."""

    def __init__(self, case: Case, pace: float):
        self.case, self.sleeps = case, Sleeps()
        p, v = case.stages, case.virtual
        self.schedule = make_schedule(case.schedule, p, case.microbatches, v)
        mesh = make_mesh({"pipeline": p}, jax.devices()[:p])
        places = (NamedSharding(mesh, P(AXIS)), NamedSharding(mesh, P()))
        self.arguments = jax.device_put((jnp.full((p * v, 4), 1.01), jnp.ones(4)), places)
        # Manual over all axes, as callbacks want it; all but one are of size 1.
        mapped = jax.shard_map(
            self._gradients, mesh=mesh, axis_names=set(AXES), in_specs=(P(AXIS), P()),
            out_specs=(P(), P(AXIS)), check_vma=False,
        )  # fmt: skip
        self.step = jax.jit(mapped).lower(*self.arguments).compile()
        self()
        self.sleeps.pace = pace

    def _gradients(self, layers: jax.Array, rest: jax.Array) -> Any:
        layer = sleeping_layer(self.sleeps, halves=self.schedule.weight is not None)
        parts = Parts(
            embed=lambda rest, m: rest * (1 + m),
            layer=lambda own, state, x, m: ((layer(own, x), jnp.zeros(())), {}),
            head=lambda rest, x, m: (jnp.sum(rest * x), (jnp.ones(()), {})),
        )
        each = (1,) * self.case.stages * self.case.virtual
        work = Work(self.schedule, allot(self.schedule, "residuals"), 1, each)
        pipeline = Pipeline(parts, work, layers, {}, rest)
        zeros = jax.tree.map(jnp.zeros_like, (pipeline.sums, layers, rest))
        sums, of_layers, of_rest = pipeline.gradients(*zeros)
        return lax.psum((sums, of_rest), AXIS), of_layers

    def __call__(self) -> tuple[float, float]:
        """Seconds of one pass of all microbatches, and of work on a stage in it.

        Raises:
          RuntimeError: it did not sleep once for each forward and backward.
        """
        self.sleeps.taken.clear()
        begun = time.perf_counter()
        jax.block_until_ready(self.step(*self.arguments))
        seconds = time.perf_counter() - begun
        taken, case = list(self.sleeps.taken), self.case
        kinds = ["forward", "backward"] + ["weight"] * (self.schedule.weight is not None)
        wanted = dict.fromkeys(kinds, case.stages * case.virtual * case.microbatches)
        if (counts := Counter(kind for kind, _ in taken)) != wanted:
            raise RuntimeError(f"{case} slept {dict(counts)} times, not {wanted}")
        return seconds, sum(slept for _, slept in taken) / case.stages


def figures(case: Case, passes: list[tuple[float, float]]) -> dict[str, Any]:
    """A case's numbers from (seconds, seconds of work) of its passes; shares are medians of the passes' own."""
    formula = bubble_formula(
        case.schedule, case.stages, case.microbatches, case.virtual, FORWARD, BACKWARD, WEIGHT
    )
    measured = statistics.median(1 - work / seconds for seconds, work in passes)
    return {
        "schedule": case.schedule,
        "stages": case.stages,
        "microbatches": case.microbatches,
        "virtual": case.virtual,
        "bubble_measured": measured,
        "bubble_formula": formula,
        "seconds": statistics.median(seconds for seconds, _ in passes),
        "ideal_seconds": statistics.median(work for _, work in passes) / (1 - formula),
        "over_ideal": (1 - formula) / (1 - measured),
    }


def measure(chosen: list[Case], rounds: int, pace: float = 1.0) -> list[dict[str, Any]]:
    """All cases, in rounds, each case once in a round."""
    runs = [Run(case, pace) for case in chosen]
    passes: list[list[tuple[float, float]]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, mine in zip(runs, passes, strict=True):
            mine.append(run())
    return [figures(run.case, mine) for run, mine in zip(runs, passes, strict=True)]


# ---- two processes ---------------------------------------------------------------------------------

# A process keeps to the core of its rank; XLA then starts one thread for its arithmetic.
PINNED = """
import os, sys
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[int(os.environ.get("DSJAX_PROCESS_ID", "0"))]})
from dsjax.cli import main
main(sys.argv[1:])
"""
MICROBATCHES, STEPS, WARM_UP = 16, 8, 2
LLAMA = {
    "runtime": {"platform": "cpu"},
    "model": {
        "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 258,
    },
    "train": {"global_batch_size": MICROBATCHES, "sequence_length": 128, "steps": STEPS},
    "eval": {"every": 0},
    "observe": {"log_every": 1, "progress": "none"},
}  # fmt: skip
# The same arithmetic on both sides: activations are kept, nothing is computed again.
PIPELINED = ("mesh.pipeline=2", f"pipeline.microbatches={MICROBATCHES}", "pipeline.recompute=false")
ALONE = (f"train.gradient_accumulation_steps={MICROBATCHES}",)


def tokens_per_second(place: Path, name: str, settings: tuple[str, ...], workers: int) -> float:
    """The median step's speed in a run of its own; raises RuntimeError where it fails."""
    config, run = place / "llama.yaml", place / name
    config.write_text(json.dumps(LLAMA))
    command = [sys.executable, "-c", PINNED, "train", str(config), *settings]
    command += [f"run.dir={run}", f"runtime.compilation_cache={place / 'cache'}"]
    if workers > 1:
        command = [*DSJAX, "launch", "--workers", str(workers), "--", *command]
    sources = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
    paths = os.pathsep.join(str(Path(source).resolve()) for source in sources)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, cwd=place, env=environment)
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()[-3:]
        raise RuntimeError(f"training with {' '.join(settings)} failed: {' | '.join(said)}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(line["tokens_per_second"] for line in lines[WARM_UP:])


def processes(rounds: int) -> dict[str, Any]:
    """Two processes against one, in turns; the speed-up is the median of the rounds' own."""
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
        return {"skipped": "takes two cores and a system that can pin a process to one"}
    both, alone = [], []
    try:
        with tempfile.TemporaryDirectory(prefix="dsjax-pipeline-") as scratch:
            for number in range(rounds):
                both.append(tokens_per_second(Path(scratch), f"both-{number}", PIPELINED, workers=2))
                alone.append(tokens_per_second(Path(scratch), f"alone-{number}", ALONE, workers=1))
    except RuntimeError as why:
        return {"skipped": str(why)}
    return {
        "tokens_per_second": statistics.median(both),
        "one_process_tokens_per_second": statistics.median(alone),
        "speedup": statistics.median(two / one for two, one in zip(both, alone, strict=True)),
        "ideal": 2 * (1 - bubble_formula("1f1b", 2, MICROBATCHES)),
        "stages": 2,
        "microbatches": MICROBATCHES,
    }


# ---- showing ---------------------------------------------------------------------------------------


def table(results: list[dict[str, Any]]) -> Table:
    """The results as a person reads them."""
    shown = Table(
        "schedule", "p", "M", "v", "idle", "by formula", "efficiency", "seconds", "over ideal", box=None
    )
    for one in results:
        shown.add_row(
            one["schedule"], str(one["stages"]), str(one["microbatches"]), str(one["virtual"]),
            f"{one['bubble_measured']:.1%}", f"{one['bubble_formula']:.1%}", f"{1 - one['bubble_measured']:.1%}",
            f"{one['seconds']:.2f}", f"{one['over_ideal'] - 1:+.1%}",
        )  # fmt: skip
    return shown


def remarks(results: list[dict[str, Any]]) -> Iterator[str]:
    """What the cases say about how far interleaving brings the idle share down, and about efficiency."""
    of = {(r["stages"], r["microbatches"], r["schedule"], r["virtual"]): r for r in results}
    names = [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("interleaved", 8), ("zero_bubble", 1)]
    idle = [
        f"{name}{f' of {v}' if v > 1 else ''} {one['bubble_measured']:.1%} ({one['bubble_formula']:.1%})"
        for name, v in names
        if (one := of.get((8, 13, name, v)))
    ]
    if idle:
        yield "8 stages, 13 microbatches, idle measured (by formula): " + ", ".join(idle)
    deep = [r for r in results if r["virtual"] == 2 and r["microbatches"] >= 4 * r["stages"]]
    if deep:
        least = max(deep, key=lambda r: r["bubble_measured"])
        yield (
            f"efficiency of 2 chunks a stage with at least 4 microbatches a stage: {1 - least['bubble_measured']:.1%} "
            f"or more (the least at {least['stages']} stages, {least['microbatches']} microbatches; formula "
            f"{1 - least['bubble_formula']:.1%})"
        )
    over = max(results, key=lambda r: r["over_ideal"])
    yield (
        f"furthest over the ideal time: {over['over_ideal'] - 1:+.1%}, {over['schedule']}, {over['stages']} stages, "
        f"{over['microbatches']} microbatches"
    )


def told(pair: dict[str, Any]) -> str:
    """The two processes in one line."""
    if "skipped" in pair:
        return f"two processes skipped: {pair['skipped']}"
    return (
        f"two processes, a core each: {pair['tokens_per_second']:,.0f} tokens/s; one with one core "
        f"{pair['one_process_tokens_per_second']:,.0f}: {pair['speedup']:.2f}x (ideal {pair['ideal']:.2f}x)"
    )


def main() -> int:
    """Measure, print one table, write --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few cases, under a minute")
    parser.add_argument("--pace", type=float, default=1.0, metavar="N", help="sleep N times as long")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    options = parser.parse_args()
    setup(RuntimeConfig(cpu_devices=8, distributed="none", compilation_cache=None))
    pair = (
        {"skipped": "--quick: two processes and one take minutes"} if options.quick else processes(rounds=3)
    )
    results = measure(list(cases(options.quick)), 1 if options.quick else 3, options.pace)
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(table(results))
    for line in (*remarks(results), told(pair)):
        console.print(line, markup=False)
    if options.json:
        options.json.write_text(json.dumps({"cases": results, "processes": pair}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

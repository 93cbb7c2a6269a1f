"""How a pipeline with a slow stage helps itself: steps until layers moved, speed before and after.

    python benchmarks/rebalance.py [--quick] [--json FILE]

Four simulated devices, a stage each, train a small network whose layers sleep where they would compute; on stage
1 they sleep three times as long.  The run starts with even stages, times them every hundred steps (--quick: every
15) and moves layers.  A second run never moves: its losses are the same, its speed is what not moving costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

import dsjax
from dsjax.backend.platform import setup
from dsjax.config.schema import RuntimeConfig
from dsjax.pipelining.executor import AXIS

STAGES, LAYERS, MICROBATCHES, WIDTH, SLOW, TIMES = 4, 12, 8, 16, 1, 3.0
FORWARD, BACKWARD = 0.003, 0.006  # seconds a layer


def _slept(x: jax.Array, seconds: float) -> jax.Array:
    """x, so many seconds later; on the slow stage TIMES as many."""

    def sleep(stage: Any, x: Any) -> np.ndarray:
        time.sleep(seconds * (TIMES if stage == SLOW else 1.0))
        return np.asarray(x)

    return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.axis_index(AXIS), x)


@jax.custom_vjp
def slowly(x: jax.Array) -> jax.Array:
    """x; takes its time in forward and backward."""
    return x


slowly.defvjp(lambda x: (_slept(x, FORWARD), None), lambda _, g: (_slept(g, BACKWARD),))


class Layer(nnx.Module):
    """A residual layer that sleeps."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return slowly(x + jnp.tanh(self.linear(x)))


class Net(nnx.Module):
    """Layers between two projections."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(4, WIDTH, rngs=rngs)
        self.layers = dsjax.stacked(lambda rngs: Layer(rngs=rngs), LAYERS, rngs)
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs)


def _squares(model: Net, x: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
    errors = (model.last(x)[:, 0] - batch["y"]) ** 2
    return errors.sum(), jnp.float32(errors.shape[0])


def batches() -> Iterator[dict[str, np.ndarray]]:
    """The same rows in every run."""
    rng = np.random.default_rng(0)
    while True:
        x = rng.normal(size=(2 * MICROBATCHES, 4)).astype(np.float32)
        yield {"x": x, "y": x.sum(1)}


@dataclass
class Told:
    """What a run wrote: losses and seconds a step, and its moves."""

    losses: list[float]
    seconds: list[float]
    moves: list[dict[str, Any]]


def run(place: Path, every: int, steps: int) -> Told:
    """Trains with stages timed every so many steps (0: never)."""
    trainer = dsjax.Trainer(
        init=lambda rngs: Net(rngs=rngs),
        stages=dsjax.Stages(
            embed=lambda model, batch: model.first(batch["x"]),
            layer=lambda layer, x, batch: layer(x),
            head=_squares,
        ),
        optimizer=optax.adam,
        learning_rate=1e-3,
        mesh={"pipeline": STAGES},
        pipeline={"microbatches": MICROBATCHES, "rebalance_every": every, "recompute": False},
        run={"dir": str(place)},
        observe={"progress": "none", "log_every": 1},
    )
    trainer.fit(batches(), steps=steps)
    metrics = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (place / "events.jsonl").read_text().splitlines()]
    return Told(
        [line["loss"] for line in metrics],
        [line["step_seconds"] for line in metrics],
        [event for event in events if event["kind"] == "rebalanced"],
    )


def compare(every: int, steps: int) -> dict[str, Any]:
    """Both runs, and what the one saved."""
    with tempfile.TemporaryDirectory(prefix="dsjax-rebalance-") as scratch:
        moved, still = run(Path(scratch) / "moved", every, steps), run(Path(scratch) / "still", 0, steps)
    if not moved.moves:
        return {"skipped": "no layers moved: the machine was too busy to tell the stages apart"}
    settled = moved.moves[-1]["step"] + 3
    before, after = statistics.median(moved.seconds[2:every]), statistics.median(moved.seconds[settled:])
    return {
        "stages": STAGES,
        "slow_stage_times": TIMES,
        "first_move_step": moved.moves[0]["step"],
        "last_move_step": moved.moves[-1]["step"],
        "layers_before": moved.moves[0]["before"]["layers a stage"],
        "layers_after": moved.moves[-1]["after"]["layers a stage"],
        "step_seconds_before": before,
        "step_seconds_after": after,
        "step_seconds_never_moved": statistics.median(still.seconds[settled:]),
        "speedup": before / after,
        "largest_loss_difference": max(
            abs(a - b) / abs(b) for a, b in zip(moved.losses, still.losses, strict=True)
        ),
    }


def main() -> int:
    """Measure, print one table, write --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="times stages every 15 steps, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    options = parser.parse_args()
    setup(RuntimeConfig(cpu_devices=STAGES, distributed="none", compilation_cache=None))
    result = compare(15, 32) if options.quick else compare(100, 220)
    table = Table("what", "value", box=None)
    for name, value in result.items():
        table.add_row(name.replace("_", " "), f"{value:.3g}" if isinstance(value, float) else str(value))
    Console(highlight=False, soft_wrap=True).print(table)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What saving costs a run, how fast it is, how little a part of it reads, and how long a recovery takes.

    python benchmarks/checkpoint.py [--quick] [--json FILE]

* The stall of snapshots in memory: a Llama of 50 million parameters with 2048 tokens a step; steps with a snapshot
  and steps without take turns, and the share is the mean of their differences over the median step (with a 95%
  interval by resampling).
* The stall of a save to disk: how long the loop waits for it and how much longer the next step takes, in steps.
* The rate of a save, against a plain sequential write of as many bytes beside it; both to the disk itself (fsync).
* Partial reads: processes that each restore their own shard of a checkpoint; bytes that the hungriest one read over
  the bytes that it needs.
* Recovery: the quickstart under `dsjax launch`, its worker killed (SIGKILL) while it trains; seconds from the kill
  to the next step's line in metrics.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
WIDTH = 110  # of the table where the output is no terminal
LARGE = {
    "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8,
    "intermediate_size": 2048, "vocab_size": 16384,
}  # fmt: skip
SMALL = {**LARGE, "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 512, "vocab_size": 4096}
ROWS, LENGTH = 8, 256
READER = "--read-a-part-of"
SHARDS = 8


# ---- what saving costs -------------------------------------------------------------------------


class Bench:
    """A run in this process, step by step."""

    def __init__(self, fields: dict[str, int]):
        from dsjax.backend.platform import setup
        from dsjax.config import from_dict
        from dsjax.train.assemble import program_for

        config = from_dict(
            {
                "model": {"kind": "llama", **fields},
                "train": {"global_batch_size": ROWS, "sequence_length": LENGTH, "steps": 1000},
                "runtime": {"platform": "cpu"},
            }
        )
        setup(config.runtime)
        import jax

        self.program, _ = program_for(config, jax.devices()[:1])
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, fields["vocab_size"], (ROWS, LENGTH + 1), dtype=np.int32)
        self.batch = self.program.place(
            {
                "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((ROWS, LENGTH), np.float32),
                "segment_ids": np.ones((ROWS, LENGTH), np.int32),
                "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH)).copy(),
            }
        )  # fmt: skip
        self.state = self.program.init(0)
        self.number = 0
        self.step()

    def step(self) -> float:
        """Seconds of one step."""
        import jax

        began = time.perf_counter()
        self.state, _ = self.program.step(self.batch)(self.state, self.batch, self.program.votes())
        jax.block_until_ready(self.state)
        self.number += 1
        return time.perf_counter() - began

    @property
    def num_bytes(self) -> int:
        """Of the state."""
        from dsjax.checkpoint.disk import state_bytes

        return state_bytes(self.program.abstract_state)


def snapshot_stall(bench: Bench, rounds: int, place: Path) -> dict[str, Any]:
    """Steps that begin with a snapshot of the last one's state, against steps that do not."""
    from dsjax.checkpoint import MemorySnapshots
    from dsjax.config.checkpoint import MemoryConfig

    place.mkdir()
    memory = MemorySnapshots(MemoryConfig(), place, 1)
    memory.prepare(bench.state, bench.number)
    memory.save(bench.number, bench.state, {})
    memory.wait()
    plain, differences, waits = [], [], []
    for turn in range(rounds):
        seconds = {}
        for snapshot in (True, False) if turn % 2 else (False, True):
            began = time.perf_counter()
            if snapshot:
                memory.save(bench.number, bench.state, {})
                waits.append(time.perf_counter() - began)
            bench.step()
            seconds[snapshot] = time.perf_counter() - began
            memory.wait()
        plain.append(seconds[False])
        differences.append(seconds[True] - seconds[False])
    memory.clear()
    memory.close()
    step = statistics.median(plain)
    draw = np.random.default_rng(0)
    means = draw.choice(differences, (4000, rounds)).mean(axis=1) / step
    return {
        "snapshot_stall_fraction": statistics.mean(differences) / step,
        "snapshot_stall_interval": [float(q) for q in np.quantile(means, [0.025, 0.975])],
        "snapshot_wait_seconds": statistics.median(waits),
        "step_seconds": step,
    }


def disk_save(bench: Bench, rounds: int, place: Path) -> dict[str, Any]:
    """The wait and the slower step after it; and, with nothing else to do, the rate against a plain write."""
    from dsjax.checkpoint import DiskCheckpoints

    disk = DiskCheckpoints(place / "disk")
    stalls, ratios, rates = [], [], []
    for turn in range(rounds):
        plain = bench.step()
        began = time.perf_counter()
        disk.save(bench.number, bench.state, {})
        bench.step()
        stalls.append((time.perf_counter() - began - plain) / plain)
        disk.wait()
        raw = _raw_seconds(place / "raw", bench.num_bytes) if turn % 2 else None
        began = time.perf_counter()
        disk.save(bench.number, bench.state, {})
        disk.wait()
        _flush(place / "disk" / str(bench.number))
        saved = time.perf_counter() - began
        raw = raw or _raw_seconds(place / "raw", bench.num_bytes)
        ratios.append(raw / saved)
        rates.append(bench.num_bytes / saved / 1e6)
        shutil.rmtree(place / "disk" / str(bench.number - 1), ignore_errors=True)
    disk.close()
    return {
        "disk_stall_steps": statistics.median(stalls),
        "disk_over_raw": statistics.median(ratios),
        "disk_mb_per_second": statistics.median(rates),
        "state_mb": bench.num_bytes / 1e6,
    }


def _raw_seconds(path: Path, size: int) -> float:
    block = np.random.default_rng(0).bytes(16 << 20)
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for at in range(0, size, len(block)):
            file.write(block[: size - at])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


def _flush(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            number = os.open(path, os.O_RDONLY)
            os.fsync(number)
            os.close(number)


# ---- what a part of it reads -------------------------------------------------------------------


def partial_read(bench: Bench, shards: int, place: Path) -> dict[str, Any]:
    """Each of so many processes restores its shard; the most that one read over what it needs."""
    from dsjax.checkpoint import DiskCheckpoints

    disk = DiskCheckpoints(place / "disk")
    disk.save(bench.number, bench.state, {})
    disk.close()
    told = place / "read"
    told.mkdir()
    command = [sys.executable, "-m", "dsjax", "launch", "--workers", str(shards), "--max-restarts", "0", "--"]
    command += [sys.executable, __file__, READER, str(place / "disk"), str(told)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"partial_read_over_ideal": None, "skipped": done.stdout[-300:]}
    found = [json.loads(path.read_text()) for path in told.iterdir()]
    return {"partial_read_over_ideal": max(one["read"] / one["needed"] for one in found), "shards": shards}


def read_a_part(directory: Path, told: Path) -> None:
    """One process: restores its own shards of everything that divides, and tells what it read."""
    from dsjax.backend.platform import setup
    from dsjax.config.schema import RuntimeConfig

    setup(RuntimeConfig(platform="cpu"))
    import jax
    import tensorstore
    from jax.sharding import NamedSharding, PartitionSpec

    from dsjax.checkpoint.stored import read_arrays, steps_in, stored_arrays
    from dsjax.mesh import make_mesh, named_leaves

    mesh = make_mesh({"fsdp": -1})
    path = directory / str(steps_in(directory)[-1])

    def shard(leaf: Any) -> jax.ShapeDtypeStruct:
        """Cut along the largest dimension that divides, as a parameter without a name is."""
        cut = [(size, -i) for i, size in enumerate(leaf.shape) if size % mesh.size == 0]
        at = -max(cut)[1] if cut else None
        spec = PartitionSpec(*("fsdp" if i == at else None for i in range(len(leaf.shape))))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    wanted = jax.tree.map(shard, stored_arrays(path))
    before = _bytes_read(tensorstore)
    got = read_arrays(path, wanted)
    jax.block_until_ready(got)
    needed = sum(
        sum(s.data.nbytes for s in leaf.addressable_shards[:1]) for leaf in named_leaves(got).values()
    )
    facts = {"read": _bytes_read(tensorstore) - before, "needed": needed}
    (told / f"{jax.process_index()}.json").write_text(json.dumps(facts))


def _bytes_read(tensorstore: Any) -> int:
    metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])


# ---- how long a recovery takes -----------------------------------------------------------------


def recovery(kills: int, place: Path) -> dict[str, Any]:
    """Seconds from each kill to the next line of metrics.jsonl, and where they go."""
    run = place / "run"
    settings = [
        f"run.dir={run}",
        "train.steps=100000",
        "observe.log_every=1",
        "observe.progress=none",
        "eval.every=0",
    ]
    settings += ["checkpoint.memory.every=5", "checkpoint.disk.every=0"]
    command = [sys.executable, "-m", "dsjax", "launch", "--workers", "1", "--max-restarts", "1000", "--"]
    command += ["train", str(ROOT / "configs" / "quickstart.yaml"), *settings]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with (place / "output").open("wb") as output:
        job = subprocess.Popen(command, cwd=place, env=environment, stdout=output, stderr=output)
    taken, parts = [], []
    try:
        for _ in range(kills):
            _until(job, lambda: len(_lines(run / "metrics.jsonl")) >= 12 and _settled(run))
            pids = [child.pid for child in psutil.Process(job.pid).children()]
            killed = time.time()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            _until(
                job,
                lambda since=killed: any(line["time"] > since for line in _lines(run / "metrics.jsonl")[-1:]),
            )
            first = next(line["time"] for line in _lines(run / "metrics.jsonl") if line["time"] > killed)
            events = [e for e in _lines(run / "events.jsonl") if e["time"] > killed]
            resumed = next(e["time"] for e in events if e["kind"] == "resumed")
            compiled = next(
                (e["time"] for e in events if e["kind"] == "compiled" and e["what"] == "step"), first
            )
            taken.append(first - killed)
            parts.append((resumed - killed, compiled - resumed, first - compiled))
    finally:
        job.send_signal(signal.SIGTERM)
        job.wait(120)
    names = ("start_and_restore_seconds", "step_from_cache_seconds", "first_step_seconds")
    medians = {name: statistics.median(part[i] for part in parts) for i, name in enumerate(names)}
    return {"recovery_seconds_median": statistics.median(taken), "recovery_seconds": taken, **medians}


def _lines(path: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(t) for t in path.read_bytes().rpartition(b"\n")[0].splitlines()] if path.exists() else []
    )


def _settled(run: Path) -> bool:
    """Whether a dozen steps have been made since the last start."""
    starts = [e["time"] for e in _lines(run / "events.jsonl") if e["kind"] in ("started", "resumed")]
    return bool(starts) and sum(line["time"] > starts[-1] for line in _lines(run / "metrics.jsonl")) >= 12


def _until(job: subprocess.Popen[bytes], there: Callable[[], Any]) -> None:
    while not there():
        if job.poll() is not None:
            raise SystemExit(f"the run ended with {job.returncode}")
        time.sleep(0.02)


# ---- the table ---------------------------------------------------------------------------------


def shown(result: dict[str, Any]) -> Table:
    """What was measured, with the aims."""
    table = Table("what", "measured", "aim", box=None)
    low, high = result["snapshot_stall_interval"]
    stall = f"{result['snapshot_stall_fraction']:.2%} ({low:.2%} to {high:.2%})"
    wait = f"{result['snapshot_wait_seconds']:.3f} s of {result['step_seconds']:.2f} s"
    part = result["partial_read_over_ideal"]
    rows = [
        ("snapshot every step: share of a step", stall, "under 2%"),
        ("  the loop waits, of a step of", wait, ""),
        ("save to disk: steps lost", f"{result['disk_stall_steps']:.2f}", "under 1"),
        (f"  rate, {result['state_mb']:.0f} MB", f"{result['disk_mb_per_second']:.0f} MB/s", ""),
        ("  over a plain sequential write", f"{result['disk_over_raw']:.2f}", "at least 0.80"),
        ("a shard reads, over what it needs", f"{part:.2f}" if part else "-", "at most 1.10"),
        ("kill to the next step", f"{result['recovery_seconds_median']:.1f} s", "under 10 s"),
        ("  start, join, restore", f"{result['start_and_restore_seconds']:.1f} s", ""),
        ("  step from the compilation cache", f"{result['step_from_cache_seconds']:.1f} s", ""),
        ("  first step", f"{result['first_step_seconds']:.1f} s", ""),
    ]  # fmt: skip
    for row in rows:
        table.add_row(*row)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a small model, two shards, one kill")
    parser.add_argument("--json", type=Path)
    parser.add_argument(READER, nargs=2, type=Path, dest="reader", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.reader:
        read_a_part(*asked.reader)
        return 0
    quick, result = asked.quick, {}
    with tempfile.TemporaryDirectory(prefix="dsjax-checkpoint-") as name:
        place = Path(name)
        bench = Bench(SMALL if quick else LARGE)
        result |= snapshot_stall(bench, 4 if quick else 16, place / "memory")
        result |= disk_save(bench, 2 if quick else 5, place)
        result |= partial_read(bench, 2 if quick else SHARDS, place)
        result |= recovery(1 if quick else 7, place)
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    console.print(shown(result))
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""One GPU, a Llama of about a billion parameters, sequences of 4096 tokens: how much of the chip is used.

    python benchmarks/gpu_train.py [--quick] [--json FILE] [--batch N] [--remat none|dots|full]

Prints a row for each precision: MFU (model FLOPs, causal attention counted once, over the chip's
dense peak), tokens a second, the highest memory in use and what the compiler planned.  Without a GPU
it says so and ends; `--quick` goes through the same code with a tiny model, on a CPU too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from dsjax.config import from_dict
from dsjax.observe import peak_flops
from dsjax.train.assemble import assemble
from dsjax.train.memory import compiled_bytes, peak_bytes

BILLION = {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True,
    "rope_theta": 500000.0,
}  # fmt: skip
"""The shape of Llama 3.2 1B."""
TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 128, "vocab_size": 512, "tie_word_embeddings": True,
}  # fmt: skip
POLICIES = {"bf16": "bfloat16", "fp8": None}
"""Precision -> the type whose peak counts; None: this version has no such policy."""


def config_of(policy: str, quick: bool, batch: int, remat: str) -> Any:
    """The config of one case."""
    return from_dict(
        {
            "model": TINY if quick else BILLION,
            "train": {
                "global_batch_size": 2 if quick else batch,
                "sequence_length": 128 if quick else 4096,
                "remat": remat,
            },
            "precision": {"policy": policy},
            "optimizer": {"schedule": {"warmup_steps": 0}},
        }
    )


def rows_of(config: Any) -> dict[str, np.ndarray]:
    """The rows of a step, host arrays: tokens of no meaning."""
    rng = np.random.default_rng(0)
    shape = (config.train.global_batch_size, config.train.sequence_length)
    tokens = rng.integers(0, config.model.fields["vocab_size"], shape, dtype=np.int32)
    return {
        "tokens": tokens, "targets": np.roll(tokens, -1, 1), "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        "weights": np.ones(shape, np.float32),
    }  # fmt: skip


def seconds_a_step(program: Any, state: Any, placed: Any, rounds: int, each: int) -> float:
    """The median of rounds of so many steps, after a round that warms up; the state is donated."""
    step, votes, seconds = program.step(placed), program.votes(), []
    for number in range(rounds + 1):
        started = time.perf_counter()
        for _ in range(each):
            state, metrics = step(state, placed, votes)
        jax.block_until_ready(metrics["loss"])
        if number:
            seconds.append((time.perf_counter() - started) / each)
    return statistics.median(seconds)


def measure(policy: str, quick: bool, batch: int, remat: str) -> dict[str, Any]:
    """One case: rounds of steps, the median round."""
    config = config_of(policy, quick, batch, remat)
    trainer = assemble(config).trainer
    placed = trainer.program.place(rows_of(config))
    median = seconds_a_step(trainer.program, trainer.init(), placed, *((2, 2) if quick else (5, 10)))
    shape = (config.train.global_batch_size, config.train.sequence_length)
    device = jax.devices()[0]
    peak, flops = peak_flops(device.device_kind, POLICIES[policy] or ""), trainer.flops_per_step
    return {
        "policy": policy,
        "batch": shape[0],
        "remat": remat,
        "mfu": flops / median / peak if peak and flops else None,
        "tokens_per_second": shape[0] * shape[1] / median,
        "peak_bytes": peak_bytes(jax.devices()[:1]),
        "planned_bytes": compiled_bytes(trainer.program.step(placed)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, on whatever device there is")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--remat", default="dots", help="what the backward pass recomputes")
    options = parser.parse_args()
    device = jax.devices()[0]
    cases: list[dict[str, Any]] = []
    for policy, kind in POLICIES.items():
        if kind is None:
            cases.append({"policy": policy, "skipped": f"precision.policy {policy} is not in this version"})
        elif device.platform != "gpu" and not options.quick:
            cases.append(
                {
                    "policy": policy,
                    "skipped": f"no GPU here (found {device.device_kind}); --quick runs anyway",
                }
            )
        else:
            cases.append(measure(policy, options.quick, options.batch, options.remat))
    keys = ("mfu", "tokens_per_second", "peak_bytes", "planned_bytes")
    table = Table("precision", *keys, title=f"one {device.device_kind}", box=None)
    for case in cases:
        shown = [f"{case[k]:,.3g}" if case.get(k) is not None else "" for k in keys]
        table.add_row(case["policy"], *(["skipped"] if "skipped" in case else shown))
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    for case in cases:
        if "skipped" in case:
            console.print(f"{case['policy']} skipped: {case['skipped']}", markup=False)
    if options.json:
        first = next((case for case in cases if "skipped" not in case), {})
        result = {"device": device.device_kind, **{k: first.get(k) for k in keys}, "cases": cases}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""What forms of exchanged gradients and number formats cost a model: held-out loss after the same tokens.

    python benchmarks/convergence.py [--quick] [--only codecs|policies] [--json FILE] [--svg FILE]

The quickstart's model, data and optimizer, on four simulated devices of which each is a replica of its own
(`mesh.data=4`, route flat): dense exchange of every step's gradients first, then each codec with error feedback and
without, then DiLoCo's local steps.  All start from the same parameters, see the same examples in the same order and
are evaluated on the whole held-out set.  The schedule of the learning rate is the quickstart's, shortened; tokens
are fewer than there and a step has half of them, so that all runs together take about half an hour on two cores.

Then number formats, exchanged densely: bf16; fp16 from the default loss scale, from one that is far too high (2^24:
every step overflows until it has come down), also stopped half-way and resumed, and from one that is far too low
(1: small gradients are lost until it has risen).  `overflow rate` is the share of steps skipped for the scale after
the first tenth of the run, in which the scale finds its place; it is to stay under 0.3%.  Last, a training state in
fewer bytes, whose loss is to stay within 0.5%.

All matrices are coded, the embedding too (`grad_sync.dense=[]`, `grad_sync.min_size=0`), which leaves the norms'
vectors dense: the share of coded numbers is a column.  Curves are the loss of each step's own batch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from curves import Line, page
from rich.console import Console
from rich.table import Table

from dsjax.backend.platform import setup
from dsjax.config import Config, load
from dsjax.config.schema import RuntimeConfig
from dsjax.data import open_eval, open_train
from dsjax.errors import ConfigError, Diverged, Preempted
from dsjax.train.assemble import Assembled, assemble

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
REPLICAS = 4
WIDTH = 110  # of the table where the output is no terminal
# The most that held-out loss may be above that of dense exchange, with error feedback.
# Codecs that send little, and the steps of 200 after which they begin where they are to be as good as dense.
SPARSE, WARMUP = ("topk", "topk_int4"), 60
AIMS = {"int8": 0.01, "int4": 0.01, "e2m4": 0.01, "topk": 0.03, "topk_int4": 0.03}
INNER_STEPS = 10
POLICY_AIM, OVERFLOW_AIM = 0.01, 0.003
HELD_AIM = 0.005
# What the optimizer's moments, the parameters and the sums of gradients are held in.
HELD = {
    "bf16 moments": ("optimizer.state_dtype=bfloat16",),
    "int8 moments": ("optimizer.state_dtype=int8",),
    "int8 moments, bf16 parameters": ("optimizer.state_dtype=int8", "precision.params=bfloat16"),
    "int8 moments, bf16 parameters and gradients": (
        "optimizer.state_dtype=int8", "precision.params=bfloat16", "precision.gradients=bfloat16",
        "train.gradient_accumulation_steps=2",
    ),
}  # fmt: skip

COMMON = (
    f"mesh.data={REPLICAS}", "mesh.fsdp=1", "grad_sync.route=flat", "grad_sync.dense=[]", "grad_sync.min_size=0",
    "grad_sync.fraction=0.05", "eval.compressors=[]", "eval.samples=[]", "checkpoint.disk.every=0",
)  # fmt: skip
FULL = (
    "train.global_batch_size=8", "train.steps=200", "eval.every=200", "optimizer.schedule.warmup_steps=35",
    "optimizer.schedule.decay_steps=115",
)  # fmt: skip
QUICK = (
    "model.hidden_size=32", "model.num_hidden_layers=1", "model.num_attention_heads=2", "model.num_key_value_heads=1",
    "model.head_dim=16", "model.intermediate_size=64", "data.kind=synthetic", "data.paths=[]", "data.tokenizer=bytes",
    "train.steps=40", "train.global_batch_size=8", "train.sequence_length=64", "eval.every=40", "eval.steps=4",
    "optimizer.kind=adamw", "optimizer.schedule.warmup_steps=5", "optimizer.schedule.decay_steps=20",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A form of exchange, `feedback` being None where there is nothing to be fed back; or a number format.

    Attributes:
      warmup: steps that are exchanged dense before.
      scale: the first loss scale, where it is not the default.
      scaling: of fp8.
      resumed: the run is stopped half-way and resumed.
      held: one of `HELD`.
    """

    codec: str = "dense"
    feedback: bool | None = None
    warmup: int = 0
    policy: str | None = None
    scale: float | None = None
    scaling: str | None = None
    resumed: bool = False
    held: str | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """How it is named in results."""
        if self.held is not None:
            return {"held": self.held}
        if self.policy is not None:
            how = {"first_scale": self.scale, "scaling": self.scaling, "resumed": self.resumed}
            return {"policy": self.policy, **how}
        return {"codec": self.codec, "error_feedback": self.feedback, "warmup_steps": self.warmup}

    @property
    def settings(self) -> tuple[str, ...]:
        """What sets it apart from the others, as it would be typed."""
        if self.held is not None:
            return HELD[self.held]
        if self.policy is not None:
            scale = () if self.scale is None else (f"precision.loss_scale.initial={self.scale}",)
            how = () if self.scaling is None else (f"precision.fp8.scaling={self.scaling}",)
            return (f"precision.policy={self.policy}", *scale, *how)
        if self.codec == "diloco":
            return (f"diloco.inner_steps={INNER_STEPS}",)
        if self.feedback is None:
            return (f"grad_sync.codec={self.codec}",)
        feedback = f"grad_sync.error_feedback={str(self.feedback).lower()}"
        warmup = (f"grad_sync.warmup_steps={self.warmup}",) if self.warmup else ()
        return f"grad_sync.codec={self.codec}", feedback, *warmup


def cases(quick: bool = False, only: str | None = None) -> list[Case]:
    """What is trained, the reference first; `quick`: some of it."""
    policies = [
        Case(policy="bf16"),
        Case(policy="fp16"),
        Case(policy="fp16", scale=2.0**24),
        Case(policy="fp16", scale=2.0**24, resumed=True),
        Case(policy="fp16", scale=1.0),
        *(Case(policy="fp8", scaling=scaling) for scaling in ("tensor", "delayed", "block")),
        *(Case(held=held) for held in HELD),
    ]
    if only == "policies":
        return [Case("dense"), *policies]
    return _codecs(quick) + ([] if only == "codecs" else policies)


def _codecs(quick: bool) -> list[Case]:
    if quick:
        return [
            Case("dense"),
            Case("int4", True),
            Case("int4", False),
            Case("topk_int4", True),
            Case("diloco"),
        ]
    return [
        Case("dense"),
        *(Case(codec, feedback) for codec in AIMS for feedback in (True, False)),
        *(Case(codec, True, WARMUP) for codec in SPARSE),
        Case("diloco"),
    ]


def config_of(case: Case, base: Sequence[str], directory: Path) -> Config:
    """The quickstart's config, changed for a case; raises ConfigError where it does not know a setting."""
    every = ("observe.log_every=1",) if case.policy is not None else ()
    return load([QUICKSTART], [*COMMON, *base, *every, *case.settings, f"run.dir={directory}"], environ={})


def trained(case: Case, base: Sequence[str], directory: Path) -> dict[str, Any]:
    """One case: its losses; where it cannot run here or did not reach the end, why."""
    if case.codec == "diloco" and "diloco" not in Config.model_fields:
        return {**case.facts, "skipped": "this version has no section diloco"}
    curve: list[list[Any]] = []
    results: dict[str, Any] = {}
    begun = time.perf_counter()
    try:
        config = config_of(case, base, directory)
        for stop_after in (config.train.steps // 2, None) if case.resumed else (None,):
            job = assemble(config)
            rows = job.trainer.rows(config.train.global_batch_size)
            with contextlib.suppress(Preempted):
                job.trainer.fit(
                    open_train(config, rows),
                    config.train.steps,
                    stop_after=stop_after,
                    eval_loader={name: one.batches for name, one in open_eval(config, rows).items()},
                    on_step=lambda step, metrics: curve.append([step, metrics["loss"]]),
                    on_eval=lambda step, sets: results.update(sets),
                )
    except (ConfigError, Diverged) as error:
        return {**case.facts, "curve": curve, "skipped": str(error)}
    return {
        **case.facts,
        "final_loss": results["heldout"]["loss"],
        "overflow_rate": overflow_rate(directory) if case.policy == "fp16" else None,
        "coded_share": coded_share(job),
        "seconds": time.perf_counter() - begun,
        "curve": curve,
    }


def overflow_rate(directory: Path) -> float:
    """Share of steps whose gradients overflowed, after the first tenth of a run."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    overflows = [line["overflows"] for line in lines if "overflows" in line]
    settled = len(overflows) // 10
    before = overflows[settled - 1] if settled else 0
    return (overflows[-1] - before) / (len(overflows) - settled)


def coded_share(job: Assembled) -> float:
    """Share of a gradient's numbers that go through a codec."""
    exchange = job.trainer.program.parts.exchange
    if exchange is None or exchange.codec is None:
        return 0.0
    numbers = [(sum(tensor.numbers), tensor.coded) for tensor in exchange.tensors.values()]
    return sum(n for n, coded in numbers if coded) / sum(n for n, _ in numbers)


def measure(chosen: Sequence[Case], base: Sequence[str]) -> list[dict[str, Any]]:
    """All cases, one after the other, each with what it is to the first."""
    found = []
    with tempfile.TemporaryDirectory(prefix="dsjax-convergence-") as scratch:
        for number, case in enumerate(chosen, 1):
            print(f"\n{number}/{len(chosen)}: {' '.join(case.settings)}", flush=True)
            found.append(trained(case, base, Path(scratch) / str(number)))
    reference = found[0].get("final_loss")
    for one in found:
        if "final_loss" in one:
            one["ratio_to_reference"] = one["final_loss"] / reference if reference else None
    return found


# ---- showing ---------------------------------------------------------------------------------------


def aim(one: dict[str, Any]) -> str:
    """How near to the reference a case should be, and whether it is; nothing where nothing is asked of it."""
    ratio = one["ratio_to_reference"]
    codec = one.get("codec")
    unasked = codec is not None and not (one["error_feedback"] and codec in AIMS)
    if ratio is None or unasked or (codec in SPARSE and not one["warmup_steps"]):
        return ""
    most = HELD_AIM if "held" in one else POLICY_AIM if "policy" in one else AIMS[one["codec"]]
    met = ratio <= 1 + most and (one.get("overflow_rate") or 0) <= OVERFLOW_AIM
    return f"{100 * most:g}%: {'met' if met else 'missed'}"


def named(one: dict[str, Any]) -> str:
    """What a case is called."""
    if "codec" in one:
        return one["codec"] + (f", {one['warmup_steps']} steps dense" if one["warmup_steps"] else "")
    if "held" in one:
        return one["held"]
    scale = "" if one["first_scale"] is None else f" from {one['first_scale']:.0f}"
    scale = scale or (f" by {one['scaling']}" if one["scaling"] else "")
    return f"{one['policy']}{scale}{' resumed' if one['resumed'] else ''}"


def table(results: Sequence[dict[str, Any]], judged: bool = True) -> Table:
    """The results as a person reads them; `judged`: with the aims, which a few steps say nothing about."""
    shown = Table(
        "codec or format", "error feedback", "held-out loss", "to dense", "aim", "coded", "overflow rate", "seconds",
        box=None,
    )  # fmt: skip
    for one in results:
        feedback = {True: "yes", False: "no", None: ""}[one.get("error_feedback")]
        if "final_loss" not in one:
            shown.add_row(named(one), feedback, f"skipped: {one['skipped']}")
            continue
        overflows = "" if one["overflow_rate"] is None else f"{one['overflow_rate']:.2%}"
        ratio = one["ratio_to_reference"]
        above = "" if ratio is None else f"{ratio - 1:+.2%}"
        shown.add_row(
            named(one), feedback, f"{one['final_loss']:.4f}", above, aim(one) if judged else "",
            f"{one['coded_share']:.1%}", overflows, f"{one['seconds']:.0f}",
        )  # fmt: skip
    return shown


def lines(results: Sequence[dict[str, Any]]) -> list[Line]:
    """The curves of the forms of exchange that have one."""
    codecs = [one for one in results if "codec" in one and one.get("curve") and not one["warmup_steps"]]
    return [Line(one["codec"], one["error_feedback"], one["curve"]) for one in codecs]


def main() -> int:
    """Train, print one table, write --json and --svg."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, under a minute")
    parser.add_argument("--only", choices=("codecs", "policies"), help="leave the others out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw the curves there")
    options = parser.parse_args()
    setup(RuntimeConfig(cpu_devices=REPLICAS, distributed="none"))
    base = QUICK if options.quick else FULL
    chosen = cases(options.quick, options.only)
    results = measure(chosen, base)
    left = [case for case in cases() if case not in chosen]
    results += [{**case.facts, "skipped": "left to a run without --quick"} for case in left]
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print()
    console.print(table(results, judged=not options.quick))
    train = config_of(cases()[0], base, Path("unused")).train
    tokens = train.global_batch_size * train.sequence_length
    console.print(
        f"{train.steps} steps of {tokens:,} tokens each, {train.steps * tokens:,} in all; {REPLICAS} replicas"
    )
    if options.json:
        options.json.write_text(json.dumps({"cases": results}, indent=2) + "\n")
    if options.svg:
        options.svg.write_text(
            page(lines(results), f"{train.steps} steps of {tokens:,} tokens, {REPLICAS} replicas")
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

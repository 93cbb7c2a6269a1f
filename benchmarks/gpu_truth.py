"""How near plans come to the truth: bytes and seconds of real steps on the devices at hand.

    python benchmarks/gpu_truth.py [--quick] [--record] [--json FILE]

For a few layouts: what `dsjax plan` says that a step takes, what XLA says once it has compiled for the real
device, the highest memory in use, the seconds that were predicted and those that it took; and whether
XLA's bytes of arguments and results are those of the live arrays.  Each is a process of its own, as a
device's peak only ever rises.  Then the shares of the chip table's peaks that large products, copies and
gathers reach; `--record` keeps these and the steps, and later plans for this kind of device use them.

Without a GPU it says so and ends; `--quick` goes through the same with a tiny model, on eight simulated CPU
devices too.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_train import BILLION, TINY, rows_of, seconds_a_step
from rich.console import Console
from rich.table import Table
from start import last_line

SIMULATED = 8  # CPU devices
WIDTH = 120  # of the table where the output is no terminal
# A program of several results gives them as one tuple, which is a table of their addresses.
POINTER = 8
TYPES = {"bf16": "bfloat16", "f32": "float32"}


@dataclass(frozen=True)
class Case:
    """A layout: a mesh, and what differs from 8 sequences a device, one microbatch, remat dots."""

    mesh: dict[str, int]
    train: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As it is typed."""
        meshed = [f"{axis} {size}" for axis, size in self.mesh.items()] or ["one device"]
        return ", ".join([*meshed, *(f"{key} {value}" for key, value in self.train.items())])


def cases(devices: int, quick: bool) -> list[Case]:
    """What is run on so many devices; the first few where it has to be quick."""
    return _cases(devices)[: 3 if quick else None]


def _cases(devices: int) -> list[Case]:
    if devices == 1:
        return [
            Case({}, {"remat": "dots"}),
            Case({}, {"remat": "full"}),
            Case({}, {"remat": "full", "gradient_accumulation_steps": 4}),
            Case({}, {"remat": "none", "global_batch_size": 2}),
        ]
    half = devices // 2
    return [
        Case({"fsdp": devices}),
        Case({"data": 2, "fsdp": half}, {"remat": "full", "gradient_accumulation_steps": 2}),
        Case({"tensor": 2, "context": half}, {"remat": "none"}),
        Case({"fsdp": half, "tensor": 2}),
    ]


def config_of(case: Case, quick: bool, devices: int) -> Any:
    """The config of a case."""
    from dsjax.config import from_dict

    train = {
        "global_batch_size": (2 if quick else 8) * devices,
        "sequence_length": 128 if quick else 4096,
        "remat": "dots",
        **case.train,
    }
    return from_dict(
        {
            "model": TINY if quick else BILLION,
            "mesh": {"fsdp": 1, **case.mesh},
            "train": train,
            "optimizer": {"schedule": {"warmup_steps": 0}},
        }
    )


# ---- in processes of their own ---------------------------------------------------------------------


def look() -> dict[str, Any]:
    """The devices at hand, and the name of such a cluster where the chip table has one."""
    import jax

    found, target = jax.devices(), target_here()
    told = {"platform": found[0].platform, "device": found[0].device_kind, "devices": len(found)}
    return {**told, "target": target and target.name}


def target_here() -> Any:
    """The devices at hand as a cluster; None where the chip table has no such chip."""
    import jax

    from dsjax.aot import Target, load_chips
    from dsjax.plan.measured import device_kind

    found = jax.devices()
    chips = [chip for chip in load_chips().values() if device_kind(chip) == found[0].device_kind]
    return Target(1, len(found), chips[0]) if chips else None


def planned(case: Case, quick: bool, on: str) -> dict[str, Any]:
    """What a plan says; no device is touched."""
    from dsjax.aot import parse_target
    from dsjax.plan import plan

    target = parse_target(on)
    found = plan(config_of(case, quick, target.size), target, suggest=False)
    return {"planned_bytes": found.memory.total, "planned_by": "compiling" if found.compiled else "formulas"}


def run(case: Case, quick: bool) -> dict[str, Any]:
    """A case on the devices at hand."""
    import jax

    from dsjax import aot
    from dsjax.plan import cost
    from dsjax.plan.measured import correction
    from dsjax.train.assemble import assemble
    from dsjax.train.memory import compiled_bytes, peak_bytes

    config = config_of(case, quick, jax.device_count())
    program = assemble(config).trainer.program
    placed = program.place(rows_of(config))
    step = program.step(placed)
    told, state = account(program, placed)
    told |= {"compiled_bytes": compiled_bytes(step), "predicted_seconds": None}
    target = target_here()
    if target is not None:
        forecast = cost.step_forecast(aot.inspect(step, program.mesh), target, correction(target).reached)
        told |= {"predicted_seconds": forecast.step_seconds, "forecast": asdict(forecast)}
    told["step_seconds"] = seconds_a_step(program, state, placed, *((2, 2) if quick else (5, 10)))
    return {**told, "peak_bytes": peak_bytes(jax.local_devices())}


def account(program: Any, placed: Any) -> tuple[dict[str, Any], Any]:
    """Bytes of a step's arguments and results on the first device, XLA's and those of the live arrays; a state."""
    import jax

    device, step, votes = program.mesh.devices.flat[0], program.step(placed), program.votes()
    stats, state = step.memory_analysis(), program.init(0)
    before = held((state, placed, votes), device)
    results = step(state, placed, votes)
    after = held(results, device) + POINTER * len(jax.tree.leaves(results))
    told = {
        "argument_bytes": stats.argument_size_in_bytes,
        "live_argument_bytes": before,
        "output_bytes": stats.output_size_in_bytes,
        "live_output_bytes": after,
    }
    return told, results[0]


def held(tree: Any, device: Any) -> int:
    """Bytes of the shards of a tree's arrays that lie on a device."""
    import jax

    shards = (shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def shares(quick: bool) -> dict[str, Any]:
    """The shares of the chip table's peaks that large operations reach here, medians of rounds."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    target = target_here()
    if target is None:
        return {"skipped": f"the chip table has no {jax.devices()[0].device_kind}"}
    chip, devices = target.chip, jax.devices()
    side, size = (512, 1 << 22) if quick else (8192, 1 << 28)  # of a product; of a copy, fp32 numbers
    rounds, each = (3, 2) if quick else (7, 20)
    products = {}
    for name, dtype in TYPES.items():
        a = jax.random.normal(jax.random.key(0), (side, side), dtype)
        seconds = timed(jax.jit(lambda x: x @ x), a, rounds, each)
        products[chip.unit(name)] = 2 * side**3 / seconds / chip.flops(name)
    x = jnp.zeros(size, jnp.float32)
    found = {"products": products, "memory": 2 * x.nbytes / timed(jax.jit(lambda x: x + 1), x, rounds, each)}
    found["memory"] /= chip.memory.bandwidth
    if len(devices) > 1:
        mesh = Mesh(devices, ("all",))
        cut = jax.device_put(x, NamedSharding(mesh, P("all")))
        gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))
        sent = x.nbytes * (len(devices) - 1) / len(devices)
        found["node"] = sent / timed(gather, cut, rounds, each) / chip.node.bandwidth
    how = f"products of {side} x {side}, copies and gathers of {x.nbytes} bytes; medians of {rounds} rounds of {each}"
    return {**found, "how": how, "count": rounds * each}


def timed(function: Callable[[Any], Any], argument: Any, rounds: int, each: int) -> float:
    """Median seconds of a call, after a round that warms up."""
    import jax

    seconds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        for _ in range(each):
            result = function(argument)
        jax.block_until_ready(result)
        seconds.append((time.perf_counter() - started) / each)
    return statistics.median(seconds[1:])


# ---- the comparison --------------------------------------------------------------------------------


def child(work: dict[str, Any], platform: str) -> dict[str, Any]:
    """What a process of its own finds; `skipped` says why where it found nothing."""
    environ = dict(os.environ) | ({"JAX_PLATFORMS": "cpu"} if platform == "cpu" else {})
    with tempfile.TemporaryDirectory(prefix="dsjax-truth-") as scratch:
        answer = Path(scratch) / "answer.json"
        command = [sys.executable, __file__, "--work", json.dumps({**work, "answer": str(answer)})]
        done = subprocess.run(command, capture_output=True, text=True, env=environ)
        if done.returncode or not answer.exists():
            return {"skipped": f"{work['do']} ended with {done.returncode}: {last_line(done.stderr)}"}
        return json.loads(answer.read_text())


def work_on(work: dict[str, Any]) -> None:
    """The other side of `child`."""
    import jax

    jax.config.update("jax_num_cpu_devices", SIMULATED)
    case, quick = Case(**work["case"]) if "case" in work else None, work.get("quick", False)
    if work["do"] == "look":
        found = look()
    elif work["do"] == "shares":
        found = shares(quick)
    elif work["do"] == "plan":
        found = planned(case, quick, work["on"])
    else:
        found = run(case, quick)
    Path(work["answer"]).write_text(json.dumps(found))


def measure(case: Case, quick: bool, here: dict[str, Any]) -> dict[str, Any]:
    """One case: planned, then run."""
    told = {"layout": case.name}
    work = {"case": asdict(case), "quick": quick}
    found = child({"do": "run", **work}, here["platform"])
    if "skipped" in found:
        return {**told, **found}
    # On a CPU a plan compiles for the very devices that are here.
    apart = here["target"] and here["platform"] != "cpu"
    plan = child({"do": "plan", "on": here["target"], **work}, "cpu") if apart else {}
    return {**told, "planned_bytes": None, "planned_by": plan.pop("skipped", "nothing"), **plan, **found}


def compare(quick: bool, recording: bool) -> dict[str, Any]:
    """Everything, as `--json` writes it."""
    import jax

    from dsjax.plan.measured import Shares, record_shares, record_step, today
    from dsjax.plan.result import Forecast

    here = child({"do": "look"}, "any")
    if "skipped" in here:
        return {"device": "unknown", "devices": 0, "cases": [{"layout": "all", **here}], "shares": here}
    if here["platform"] != "gpu" and not quick:
        why = f"no GPU here (found {here['device']}); --quick runs anyway"
        listed = [{"layout": case.name, "skipped": why} for case in cases(1, quick)]
        return {**here, "cases": listed, "shares": {"skipped": why}}
    reached = child({"do": "shares", "quick": quick}, here["platform"])
    recording = recording and here["platform"] != "cpu" and "skipped" not in reached
    if recording:
        record_shares(here["device"], Shares(**reached, date=today(), jax=jax.__version__))
    results = [measure(case, quick, here) for case in cases(here["devices"], quick)]
    for one in results:
        forecast = one.pop("forecast", None)
        if recording and forecast:
            record_step(here["device"], Forecast(**forecast), one["step_seconds"])
    return {**here, "shares": reached, "cases": results, "recorded": recording}


def table(result: dict[str, Any]) -> Table:
    """The cases as a person reads them."""
    keys = ("planned", "XLA here", "peak", "live arrays", "predicted", "a step", "off by")
    shown = Table("layout", *keys, title=f"{result['devices']} x {result['device']}", box=None)
    for one in result["cases"]:
        if "skipped" in one:
            shown.add_row(one["layout"], "skipped")
            continue
        agree = all(one[f"{what}_bytes"] == one[f"live_{what}_bytes"] for what in ("argument", "output"))
        predicted, seconds = one["predicted_seconds"], one["step_seconds"]
        shown.add_row(
            one["layout"],
            *(mebibytes(one[f"{what}_bytes"]) for what in ("planned", "compiled", "peak")),
            "as XLA says" if agree else "OTHERWISE",
            "" if predicted is None else f"{predicted:.4g} s",
            f"{seconds:.4g} s",
            "" if predicted is None else f"{predicted / seconds - 1:+.0%}",
        )
    return shown


def mebibytes(size: int | None) -> str:
    """A size in MiB; nothing where it is not known."""
    return "" if size is None else f"{size / 2**20:,.2f} MiB"


def told_shares(reached: dict[str, Any]) -> str:
    """The shares in a line."""
    if "skipped" in reached:
        return f"shares of the peaks skipped: {reached['skipped']}"
    listed = {**reached["products"], "memory": reached["memory"], "links in a node": reached.get("node")}
    told = ", ".join(f"{name} {share:.0%}" for name, share in listed.items() if share is not None)
    return f"shares of the chip table's peaks: {told} ({reached['how']})"


def main() -> int:
    """Measure, print one table, write --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, on whatever devices there are")
    parser.add_argument("--record", action="store_true", help="keep what is measured for later plans")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work_on(options.work)
        return 0
    result = compare(options.quick, options.record)
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(table(result))
    for one in result["cases"]:
        if "skipped" in one:
            console.print(f"{one['layout']} skipped: {one['skipped']}", markup=False)
    console.print(told_shares(result["shares"]), markup=False)
    if options.record:
        kept = "kept for later plans" if result.get("recorded") else "not kept: only an accelerator's are"
        console.print(f"what was measured is {kept}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What crosses a slow link in an exchange of gradients, and how long that takes: each codec against dense fp32.

    python benchmarks/wire.py [--quick] [--json FILE]

Two processes in two network namespaces are two hosts; a link of 100 Mbit/s joins them, and bytes are what its
counters say that a host sent (headers too).  A Llama of 16 million parameters (--quick: 3 million) trains on few
tokens, all its matrices coded.  All codecs take turns in one run: the exchange alone, of given gradients, and a whole
training step.  Each host has cores of its own where there are two.

Then each host has four simulated devices, and the exchange in two levels is compared with one among all eight.
It takes root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import namespaces
from rich.console import Console
from rich.table import Table

MEGABITS = 100.0
WIDTH = 118  # of the table where the output is no terminal
TIMEOUT = 1800.0  # seconds of all rounds, with compiling
HOST = Path(__file__).with_name("wire_host.py")
LLAMA = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 5, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 256,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A form of gradients and a way for them: settings of grad_sync."""

    codec: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def told(self) -> dict[str, Any]:
        """As the result names it."""
        way = {"route": self.settings["route"]} if "route" in self.settings else {}
        return {"codec": self.codec, **way}


@dataclass(frozen=True)
class Part:
    """Cases that are compared with the first of them."""

    cases: Sequence[Case]
    devices: int
    steps: bool
    rounds: int


def coded(codec: str, **settings: Any) -> Case:
    """A case that is named as its codec."""
    return Case(codec, {"codec": codec, **settings})


def parts(quick: bool) -> dict[str, Part]:
    """What is run, by its name in the result."""
    few = ("int4", "topk_int4")
    codecs = few if quick else ("int8", "int4", "e2m4", "topk", "topk_int4")
    rounded = [] if quick else [Case("bfloat16", {"codec": "dense", "dense_dtype": "bfloat16"})]
    one_device = [coded("dense"), *rounded, *map(coded, codecs)]
    ways = [("dense", "flat"), ("dense", "hierarchical"), ("int4", "hierarchical")]
    two_level = [coded(codec, route=route) for codec, route in ways]
    return {
        "cases": Part(one_device, 1, steps=True, rounds=2 if quick else 3),
        "two_level": Part(two_level, 4, steps=False, rounds=1 if quick else 2),
    }


def measure(part: Part, model: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All cases of a part, on two hosts; where that cannot be, each with the reason."""
    why = namespaces.missing()
    if why is None:
        try:
            return figures(part, _on_hosts(part, model))
        except namespaces.Failed as failed:
            why = str(failed)
    return [{**case.told, "skipped": why} for case in part.cases]


def _on_hosts(part: Part, model: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """What each host found of each case."""
    sources = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
    paths = os.pathsep.join(str(Path(source).resolve()) for source in sources)
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    with (
        tempfile.TemporaryDirectory(prefix="dsjax-wire-") as scratch,
        namespaces.two_hosts(MEGABITS) as hosts,
    ):
        job = {
            "model": model, "cases": [dict(case.settings) for case in part.cases], "rounds": part.rounds,
            "steps": part.steps, "cpu_devices": part.devices, "out": scratch,
        }  # fmt: skip
        place = Path(scratch)
        namespaces.run_on(hosts, [sys.executable, str(HOST), json.dumps(job)], environ, place, TIMEOUT)
        return [json.loads((place / f"{rank}.json").read_text()) for rank in range(len(hosts))]


def figures(part: Part, found: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The numbers of all cases: a round is as slow as its slower host, a case is the median of its rounds.

    Speed-ups are medians of the rounds' own: what ran one after the other is compared.
    """
    rounds = [_slower(hosts) for hosts in zip(*found, strict=True)]
    dense = rounds[0]
    bytes_of = "step_bytes" if part.steps else "exchange_bytes"
    made = []
    for case, mine, (facts, *_) in zip(part.cases, rounds, zip(*found, strict=True), strict=True):
        one = {name: statistics.median(r[name] for r in mine) for name in mine[0]}
        wire = one.pop("step_bytes", one["exchange_bytes"])
        result = {
            **case.told, "route": facts["route"], "devices_a_host": part.devices, "parameters": facts["numbers"],
            "wire_bytes": wire, "ratio_to_dense_bytes": wire / statistics.median(r[bytes_of] for r in dense),
            **one, "link_seconds": one["exchange_bytes"] * 8e-6 / MEGABITS,
            "speedup_over_dense": _speedup(dense, mine, "exchange_seconds"),
        }  # fmt: skip
        if part.steps:
            result["step_speedup_over_dense"] = _speedup(dense, mine, "step_seconds")
        made.append({**result, "relative_error": facts["relative_error"]})
    return made


def _slower(hosts: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """A case's rounds: of each number the larger of the hosts'."""
    every = zip(*(host["rounds"] for host in hosts), strict=True)
    return [{name: max(one[name] for one in each) for name in each[0]} for each in every]


def _speedup(dense: Sequence[Mapping[str, float]], mine: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(d[name] / m[name] for d, m in zip(dense, mine, strict=True))


# ---- showing ---------------------------------------------------------------------------------------


def table(results: Sequence[Mapping[str, Any]]) -> Table:
    """The results as a person reads them."""
    shown = Table(
        "codec", "route", "devices", "MB sent", "of dense", "exchange s", "on link s", "faster", "step s", "faster",
        "error", box=None,
    )  # fmt: skip
    for one in results:
        if "skipped" in one:
            shown.add_row(one["codec"], one.get("route", ""), "skipped")
            continue
        step = ("", "")
        if "step_seconds" in one:
            step = f"{one['step_seconds']:.2f}", f"{one['step_speedup_over_dense']:.1f}x"
        shown.add_row(
            one["codec"], one["route"], f"2 x {one['devices_a_host']}", f"{one['wire_bytes'] / 1e6:.2f}",
            f"{one['ratio_to_dense_bytes']:.3f}", f"{one['exchange_seconds']:.2f}", f"{one['link_seconds']:.2f}",
            f"{one['speedup_over_dense']:.1f}x", *step, f"{one['relative_error']:.2g}",
        )  # fmt: skip
    return shown


def remarks(result: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Why cases are missing, and what the numbers say about the aims."""
    yield from sorted(
        {f"skipped: {one['skipped']}" for part in result.values() for one in part if "skipped" in one}
    )
    of = {one["codec"]: one for one in result["cases"] if "skipped" not in one}
    if {"int4", "topk_int4"} <= set(of):
        int4, sparse = of["int4"], of["topk_int4"]
        yield (
            f"int4: 1/{1 / int4['ratio_to_dense_bytes']:.2f} of dense's bytes (aim: at most 1/7.5), its exchange "
            f"{int4['speedup_over_dense']:.1f} times as fast (aim: 5); topk_int4 sends "
            f"{sparse['wire_bytes'] / int4['wire_bytes']:.2f} of int4's bytes (aim: fewer)"
        )
    ways = [one["ratio_to_dense_bytes"] for one in result["two_level"] if "skipped" not in one]
    if ways:
        yield (
            f"two levels of 4 devices: dense {ways[1]:.3f} of the flat exchange's bytes between hosts (aim: at most "
            f"0.58), int4 {ways[2]:.3f} (aim: at most 0.08)"
        )
    if of:
        yield "on link: what the exchange's bytes take at the link's rate; error: relative, of the first sums"


def main() -> int:
    """Measure, print one table, write --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small model, few cases, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    options = parser.parse_args()
    model = {**LLAMA, "num_hidden_layers": 1} if options.quick else LLAMA
    with namespaces.as_interrupt(signal.SIGTERM, signal.SIGHUP):
        found = {name: measure(part, model) for name, part in parts(options.quick).items()}
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)
    console.print(table([*found["cases"], *found["two_level"]]))
    for line in remarks(found):
        console.print(line)
    if options.json:
        result = {"megabits_per_second": MEGABITS, **found}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)

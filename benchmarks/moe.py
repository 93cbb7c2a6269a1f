"""A mixture of experts against layers of as many FLOPs a token, and what its dispatch moves.

    python benchmarks/moe.py [--quick] [--json FILE]

Forward and backward of one layer. Contenders of a group take turns in one run and the medians of their rounds are
compared:

- dense: a gated feed-forward layer of as many columns as a token's experts have together;
- dropless: this framework's mixture, router and all;
- one-hot: the same mixture as products with one-hot matrices [tokens, experts, capacity], by hand, with capacity
  for twice the even share (so that on the evenest routing nothing is dropped).

On one device, and over four: experts cut over `expert`, the others over `fsdp`. Bytes are those of the all-to-alls in
the compiled program, times the rounds that the routing takes, over those of the rows that must go to another device
and back, with their gradients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from dsjax.aot.inspection import inspect
from dsjax.mesh import Layout, make_mesh, use_layout
from dsjax.models.layers import GatedMLP, normal
from dsjax.models.moe import Mixture, MixtureConfig, Routing, mixture_axes
from dsjax.models.moe.dispatch import plan
from dsjax.models.moe.experts import Network

PEERS = 4
MLP_AXES = {f"{x}_proj/kernel": ("embed", "mlp") for x in ("gate", "up")} | {
    "down_proj/kernel": ("mlp", "embed")
}


@dataclass(frozen=True)
class Size:
    """A layer and its input: rows x length tokens, features d, columns m of an expert, e experts, k a token."""

    rows: int
    length: int
    features: int
    columns: int
    experts: int
    choices: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.length


class Contender:
    """One layer's forward and backward, compiled for a mesh."""

    def __init__(
        self, name: str, size: Size, layer: nnx.Module, call: Any, axes: Any, devices: int, cut: str
    ):
        self.name, self.size, self.devices = name, size, devices
        self.layout = Layout(make_mesh({"fsdp": 1, cut: devices}, jax.devices()[:devices]), axes)
        graph, params, others = nnx.split(layer, nnx.Param, ...)
        self.params = jax.device_put(params, self.layout.param_shardings(params))
        x = jax.random.normal(jax.random.key(1), (size.rows, size.length, size.features))
        self.x = jax.device_put(x, self.layout.sharding("batch", "sequence", None))

        def loss(params: Any, x: Any) -> jax.Array:
            return jnp.sum(call(nnx.merge(graph, params, others, copy=True), x) ** 2)

        with use_layout(self.layout):
            step = jax.jit(jax.grad(loss, (0, 1)))
            self.compiled = step.lower(self.params, self.x).compile()

    def round(self, steps: int) -> float:
        """Seconds a step."""
        started = time.perf_counter()
        for _ in range(steps):
            made = self.compiled(self.params, self.x)
        jax.block_until_ready(made)
        return (time.perf_counter() - started) / steps


def one_hot(mixture: Mixture, x: jax.Array) -> jax.Array:
    """The mixture as three products over [groups, tokens, experts, capacity] (GShard, Lepikhin et al. 2020)."""
    config, counts = mixture.config, jnp.ones(x.shape[:2])
    routed = mixture.router(x, counts)
    experts, length = config.routing.experts, x.shape[1]
    most = min(length, 2 * length * config.routing.choices // experts)
    chosen = jax.nn.one_hot(routed.choices, experts)
    flat = chosen.reshape(x.shape[0], -1, experts)
    rank = jnp.sum((jnp.cumsum(flat, 1) - flat) * flat, -1).reshape(routed.choices.shape)
    slots = jax.nn.one_hot(rank, most)
    send = jnp.einsum("bske,bskc->bsec", chosen, slots)
    back = jnp.einsum("bske,bskc,bsk->bsec", chosen, slots, routed.gates)
    gate, up, down = (
        m.kernel[...] for m in (mixture.experts.gate_proj, mixture.experts.up_proj, mixture.experts.down_proj)
    )
    rows = jnp.einsum("bsec,bsd->ebcd", send, x)
    hidden = jax.nn.silu(jnp.einsum("ebcd,edm->ebcm", rows, gate)) * jnp.einsum("ebcd,edm->ebcm", rows, up)
    return jnp.einsum("bsec,ebcd->bsd", back, jnp.einsum("ebcm,emd->ebcd", hidden, down))


def contenders(size: Size, devices: int) -> list[Contender]:
    """The layers that are compared on so many devices."""

    def init(inputs: int, outputs: int) -> Any:
        return normal(inputs**-0.5)

    routing = Routing(size.experts, size.choices)
    config = MixtureConfig(size.features, size.columns, routing, 1)
    mixture = Mixture(config, init=init, rngs=nnx.Rngs(0))
    dense = GatedMLP(size.features, size.choices * size.columns, init=init, rngs=nnx.Rngs(0))
    axes = {path.removeprefix("moe/"): names[1:] for path, names in mixture_axes("moe").items()}
    made: list[tuple[str, nnx.Module, Callable[..., Any], Any, str]] = [
        ("dense", dense, lambda layer, x: layer(x), MLP_AXES, "fsdp"),
        ("dropless", mixture, lambda layer, x: layer(x, None)[0], axes, "expert"),
        ("one-hot", mixture, one_hot, axes, "fsdp"),
    ]
    return [Contender(name, size, layer, call, axes, devices, cut) for name, layer, call, axes, cut in made]


def over_ideal(size: Size, contender: Contender) -> float:
    """Bytes that the dispatch of a device sends, over those of the rows that must move (there and back, twice)."""
    mixture = contender.layout
    found = inspect(contender.compiled, mixture.mesh).collectives.of("all-to-all")
    rounds, moving = routed(size, contender)
    sent = sum(c.wire_bytes * (rounds if not c.times_known else 1) for c in found)
    return sent / (4 * moving / PEERS * size.features * contender.x.dtype.itemsize)


def routed(size: Size, contender: Contender) -> tuple[int, int]:
    """(rounds that the routing takes, rows that go to another device) of a contender's input."""
    kernel = np.asarray(contender.params["router"]["kernel"][...])
    logits = np.asarray(contender.x) @ kernel
    choices = np.argsort(-logits, -1)[..., : size.choices]
    peer = choices.reshape(PEERS, -1) // (size.experts // PEERS)
    counts = np.stack([np.bincount(row, minlength=PEERS) for row in peer])
    each = size.tokens // PEERS
    room = plan(each, size.choices, size.experts, PEERS, 1.25, Network(jax.nn.silu)).room
    return int(-(-counts.max() // room)), int(counts.sum() - np.trace(counts))


def measured(size: Size, devices: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    """The cases of one group."""
    group = contenders(size, devices)
    for contender in group:
        contender.round(1)
    seconds: dict[str, list[float]] = {contender.name: [] for contender in group}
    for _ in range(rounds):
        for contender in group:
            seconds[contender.name].append(contender.round(steps))
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return [
        {
            "dispatch": f"{c.name}, {size.experts} experts, {devices} device{'s' * (devices > 1)}",
            "tokens_per_second": size.tokens / medians[c.name],
            "ratio_to_dense": medians["dense"] / medians[c.name],
            "dispatch_bytes_over_ideal": over_ideal(size, c)
            if c.name == "dropless" and devices > 1
            else None,
        }
        for c in group
    ]


def table_of(cases: Sequence[dict[str, Any]]) -> Table:
    """The cases for people."""
    table = Table("dispatch", "tokens/s", "to dense", "bytes over ideal", title="mixtures of experts")
    for case in cases:
        if "skipped" in case:
            table.add_row(case["dispatch"], case["skipped"], "", "")
            continue
        over = case["dispatch_bytes_over_ideal"]
        table.add_row(
            case["dispatch"], f"{case['tokens_per_second']:.0f}", f"{case['ratio_to_dense']:.2f}",
            "" if over is None else f"{over:.2f}",
        )  # fmt: skip
    return table


def main() -> None:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds of smaller layers")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", PEERS)  # of a CPU, where that is all there is
    quick = arguments.quick
    rounds, steps = (3, 1) if quick else (7, 3)
    width = 192 if quick else 384
    cases: list[dict[str, Any]] = []
    for experts in (8, 32):
        size = Size(PEERS, 256 if quick else 512, width, 2 * width, experts, 2)
        for devices in (1, PEERS):
            if devices > jax.device_count():
                cases.append(
                    {
                        "dispatch": f"all, {experts} experts, {devices} devices",
                        "skipped": f"there is {jax.device_count()} device",
                    }
                )
                continue
            cases += measured(size, devices, rounds, steps)
    Console(width=100).print(table_of(cases))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"cases": cases}, file, indent=1)


if __name__ == "__main__":
    main()

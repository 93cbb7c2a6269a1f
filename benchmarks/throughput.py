"""Training speed of the quickstart's model: this framework against loops written by hand.

    python benchmarks/throughput.py [--quick] [--json FILE] [--torch]

Contenders take turns in one run, some steps each, and the medians of their rounds are compared:

- dsjax: `Trainer.fit` as the command line runs it, metrics and progress on;
- bare loop: JAX and optax by hand, a scan over layers, no XLA options, `jax.nn.dot_product_attention`,
  a plain log-softmax;
- matched loop: the same by hand with this framework's XLA options, loop form and attention, which leaves
  only the framework itself between the two;
- torch (with --torch): PyTorch eager on the CPU.

Bytes are the compiler's own account of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from dsjax.backend.xla_options import choose
from dsjax.config import Config, from_dict, load
from dsjax.models.attention import attention
from dsjax.train.assemble import assemble
from dsjax.train.memory import compiled_bytes

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
LEARNING_RATE, BETA1, BETA2, EPS, DECAY, CLIP = 1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0
Params = dict[str, Any]


def config_of(directory: str) -> Config:
    """The quickstart's model and batch, on tokens of no meaning, with plain AdamW."""
    quickstart = load([QUICKSTART], environ={})
    train = quickstart.train
    return from_dict(
        {
            "run": {"dir": directory},
            "model": {**quickstart.model.fields, "vocab_size": quickstart.data.bpe_vocab_size},
            "train": {
                "global_batch_size": train.global_batch_size, "sequence_length": train.sequence_length,
                "steps": 10**6,
            },
            "data": {"kind": "synthetic"},
            "optimizer": {
                "kind": "adamw", "learning_rate": LEARNING_RATE, "beta1": BETA1, "beta2": BETA2, "eps": EPS,
                "weight_decay": DECAY, "max_grad_norm": CLIP,
                "schedule": {"kind": "constant", "warmup_steps": 0},
            },
            "observe": {"progress": "plain"},
        }
    )  # fmt: skip


def batches_of(config: Config, count: int = 8) -> list[dict[str, np.ndarray]]:
    """Host batches, as a loader hands them over."""
    rng = np.random.default_rng(0)
    shape = (config.train.global_batch_size, config.train.sequence_length)
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    made = []
    for _ in range(count):
        tokens = rng.integers(0, config.model.fields["vocab_size"], (shape[0], shape[1] + 1), dtype=np.int32)
        made.append(
            {
                "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": positions,
                "segment_ids": np.ones(shape, np.int32), "weights": np.ones(shape, np.float32),
            }
        )  # fmt: skip
    return made


class Framework:
    """dsjax: every round is a call of `fit` that goes on from the state before."""

    name = "dsjax"

    def __init__(self, config: Config, batches: list[dict[str, np.ndarray]]):
        self.trainer = assemble(config).trainer
        self.batches, self.state = cycle(batches), None
        self.losses: list[float] = []
        placed = self.trainer.program.place(batches[0])
        self.bytes = compiled_bytes(self.trainer.program.step(placed))

    def round(self, steps: int) -> float:
        """Seconds of so many steps, from asking for the first batch to knowing the last loss."""
        times: list[float] = []

        def loader() -> Iterator[Any]:
            times.append(time.perf_counter())
            yield from self.batches

        def on_step(step: int, metrics: Any) -> None:
            times.append(time.perf_counter())
            self.losses.append(metrics["loss"])

        begun = 0 if self.state is None else int(self.state.step)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            self.state = self.trainer.fit(loader, begun + steps, state=self.state, on_step=on_step)
        return times[-1] - times[0]

    @property
    def compiles(self) -> int:
        """How many times the training step was compiled."""
        return sum(what == "step" for what, _ in self.trainer.compiles)


# ---- by hand ---------------------------------------------------------------------------------------


class Sizes:
    """The model's numbers, from the config's fields."""

    def __init__(self, config: Config):
        fields = config.model.fields
        self.d, self.f = fields["hidden_size"], fields["intermediate_size"]
        self.layers, self.vocab = fields["num_hidden_layers"], fields["vocab_size"]
        self.n, self.k, self.h = (
            fields[f] for f in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        self.theta = fields["rope_theta"]
        self.rows, self.length = config.train.global_batch_size, config.train.sequence_length


def initial(z: Sizes) -> Params:
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def draw(*shape: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), shape)

    layers = {
        "q": draw(z.layers, z.d, z.n * z.h), "k": draw(z.layers, z.d, z.k * z.h),
        "v": draw(z.layers, z.d, z.k * z.h), "o": draw(z.layers, z.n * z.h, z.d),
        "gate": draw(z.layers, z.d, z.f), "up": draw(z.layers, z.d, z.f), "down": draw(z.layers, z.f, z.d),
        "norm1": jnp.ones((z.layers, z.d)), "norm2": jnp.ones((z.layers, z.d)),
    }  # fmt: skip
    return {"embed": draw(z.vocab, z.d), "layers": layers, "norm": jnp.ones(z.d)}


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def rope(x: jax.Array, z: Sizes) -> jax.Array:
    angles = jnp.arange(z.length)[:, None] / z.theta ** (jnp.arange(0, z.h, 2) / z.h)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def loss_by_hand(params: Params, batch: Any, z: Sizes, matched: bool) -> jax.Array:
    """Mean next-token loss; `matched`: layers written out, this framework's attention."""
    tokens, targets, segments = batch

    attend = (
        partial(attention, segment_ids_bs=segments)
        if matched
        else partial(jax.nn.dot_product_attention, is_causal=True)
    )

    def layer(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
        y = rms_norm(x, w["norm1"])
        q = rope((y @ w["q"]).reshape(z.rows, z.length, z.n, z.h), z)
        k = rope((y @ w["k"]).reshape(z.rows, z.length, z.k, z.h), z)
        v = (y @ w["v"]).reshape(z.rows, z.length, z.k, z.h)
        x = x + attend(q, k, v).reshape(z.rows, z.length, -1) @ w["o"]
        y = rms_norm(x, w["norm2"])
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], None

    x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"], unroll=z.layers if matched else 1)
    logits = rms_norm(x, params["norm"]) @ params["embed"].T
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
    return -jnp.mean(picked)


class ByHand:
    """JAX and optax in thirty lines, the loss looked at a step late."""

    def __init__(self, config: Config, batches: list[dict[str, np.ndarray]], matched: bool):
        self.name = "matched loop" if matched else "bare loop"
        sizes = Sizes(config)
        optimizer = optax.chain(
            optax.clip_by_global_norm(CLIP),
            optax.adamw(
                LEARNING_RATE, BETA1, BETA2, EPS, weight_decay=DECAY,
                mask=lambda tree: jax.tree_util.tree_map_with_path(lambda p, x: "norm" not in str(p), tree),
            ),
        )  # fmt: skip

        def step(params: Any, opt_state: Any, *batch: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_by_hand)(params, batch, sizes, matched)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        params = initial(sizes)
        self.state = (params, optimizer.init(params))
        host = [(b["tokens"], b["targets"], b["segment_ids"]) for b in batches]
        self.batches = cycle(host)
        options = choose(jax.default_backend()).options if matched else {}
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*self.state, *host[0])
        self.step = lowered.compile(compiler_options=options)
        self.bytes = compiled_bytes(self.step)
        self.losses: list[float] = []

    def round(self, steps: int) -> float:
        """Seconds of so many steps."""
        started, waiting = time.perf_counter(), None
        for _ in range(steps):
            *state, loss = self.step(*self.state, *next(self.batches))
            self.state = tuple(state)
            if waiting is not None:
                self.losses.append(float(waiting))
            waiting = loss
        self.losses.append(float(waiting))
        return time.perf_counter() - started


def torch_contender(config: Config, batches: list[dict[str, np.ndarray]]) -> Any:
    """The same model in PyTorch, eager; raises ImportError where torch is missing."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    z = Sizes(config)
    angles = torch.arange(z.length)[:, None] / z.theta ** (torch.arange(0, z.h, 2) / z.h)
    cos, sin = angles.cos(), angles.sin()

    def turned(x: Any) -> Any:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(z.d, 1e-6), nn.RMSNorm(z.d, 1e-6)
            self.qkv = nn.Linear(z.d, (z.n + 2 * z.k) * z.h, bias=False)
            self.o = nn.Linear(z.n * z.h, z.d, bias=False)
            self.gate, self.up = (nn.Linear(z.d, z.f, bias=False) for _ in range(2))
            self.down = nn.Linear(z.f, z.d, bias=False)

        def forward(self, x: Any) -> Any:
            heads = self.qkv(self.norm1(x)).view(z.rows, z.length, -1, z.h).transpose(1, 2)
            q, k, v = heads.split([z.n, z.k, z.k], 1)
            mixed = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
            x = x + self.o(mixed.transpose(1, 2).reshape(z.rows, z.length, -1))
            y = self.norm2(x)
            return x + self.down(F.silu(self.gate(y)) * self.up(y))

    class Torch:
        name = "torch eager"
        bytes = None

        def __init__(self) -> None:
            torch.manual_seed(0)
            self.embed = nn.Embedding(z.vocab, z.d)
            self.layers = nn.Sequential(*(Layer() for _ in range(z.layers)), nn.RMSNorm(z.d, 1e-6))
            weights = [*self.embed.parameters(), *self.layers.parameters()]
            for weight in weights:
                if weight.ndim > 1:
                    nn.init.normal_(weight, std=0.02)
            self.weights = weights
            self.optimizer = torch.optim.AdamW(weights, LEARNING_RATE, (BETA1, BETA2), EPS, DECAY)
            self.batches = cycle(
                [
                    tuple(torch.from_numpy(b[k].astype(np.int64)) for k in ("tokens", "targets"))
                    for b in batches
                ]
            )
            self.losses: list[float] = []

        def round(self, steps: int) -> float:
            started = time.perf_counter()
            for _ in range(steps):
                tokens, targets = next(self.batches)
                logits = self.layers(self.embed(tokens)) @ self.embed.weight.T
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.weights, CLIP)
                self.optimizer.step()
                self.losses.append(loss.item())
            return time.perf_counter() - started

    return Torch()


# ---- the comparison --------------------------------------------------------------------------------


def compare(contenders: list[Any], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds a step of each contender in each round, taking turns; one round of warm-up before."""
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(rounds + 1):
        for contender in contenders:
            taken = contender.round(2 if number == 0 else steps) / steps
            if number:
                seconds[contender.name].append(taken)
    return seconds


def figures(contenders: list[Any], seconds: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    """The numbers that are reported; ratios are medians of the rounds' own ratios."""

    def ratio(other: str) -> float:
        return statistics.median(b / a for a, b in zip(seconds["dsjax"], seconds[other], strict=True))

    speed = {name: tokens / statistics.median(rounds) for name, rounds in seconds.items()}
    framework, bare = contenders[0], contenders[1]
    result = {
        "tokens_per_second": speed["dsjax"],
        "bare_tokens_per_second": speed["bare loop"],
        "matched_tokens_per_second": speed["matched loop"],
        "ratio_to_bare_loop": ratio("bare loop"),
        "ratio_to_matched_loop": ratio("matched loop"),
        "peak_bytes": framework.bytes,
        "bare_peak_bytes": bare.bytes,
        "compiles": framework.compiles,
    }
    if "torch eager" in speed:
        result["torch"] = {"tokens_per_second": speed["torch eager"], "ratio_to_torch": ratio("torch eager")}
    return result


def show(contenders: list[Any], seconds: dict[str, list[float]], tokens: int, result: dict[str, Any]) -> None:
    table = Table("", "tokens/s", "dsjax is faster by", "bytes of a step", "loss", box=None)
    for contender in contenders:
        median = statistics.median(seconds[contender.name])
        pairs = zip(seconds["dsjax"], seconds[contender.name], strict=True)
        faster = statistics.median(b / a for a, b in pairs)
        table.add_row(
            contender.name,
            f"{tokens / median:,.0f}",
            "" if contender.name == "dsjax" else f"{faster:.2f}x",
            f"{contender.bytes / 2**20:,.0f} MiB" if contender.bytes else "",
            f"{contender.losses[-1]:.3f}",
        )
    console = Console()
    console.print(table)
    console.print(f"the framework's step was compiled {result['compiles']} time(s)")
    if "skipped" in result.get("torch", {}):
        console.print(f"torch: {result['torch']['skipped']}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--torch", action="store_true", help="also PyTorch, where it is installed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dsjax-throughput-") as directory:
        config = config_of(directory)
        batches = batches_of(config)
        contenders = [
            Framework(config, batches),
            ByHand(config, batches, matched=False),
            ByHand(config, batches, matched=True),
        ]
        skipped = {}
        if options.torch:
            try:
                contenders.append(torch_contender(config, batches))
            except ImportError as error:
                skipped = {"torch": {"skipped": f"torch is not installed here ({error})"}}
        seconds = compare(contenders, *((3, 3) if options.quick else (9, 5)))
    tokens = config.train.global_batch_size * config.train.sequence_length
    result = {**figures(contenders, seconds, tokens), **skipped}
    show(contenders, seconds, tokens, result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

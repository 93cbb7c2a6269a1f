"""What a person is told when a run or an evaluation is over."""

from __future__ import annotations

import gzip
import lzma
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from rich.console import Console
from rich.table import Table

from dsjax.config import Config

if TYPE_CHECKING:
    from dsjax.data import EvalData


def show(what: Any) -> None:
    """Prints text or a table, from process 0 only."""
    if jax.process_index() != 0:
        return
    if isinstance(what, str):
        print(what, flush=True)
    else:
        # Into a file all of a table's columns, whatever they are called.
        Console(soft_wrap=True, width=None if sys.stdout.isatty() else 200).print(what)


def bits_per_byte(loss: float, tokens: float, num_bytes: int) -> float | None:
    """Bits that the model needs for a byte of the text: loss (nats a token) * tokens / ln 2 / bytes."""
    return loss * tokens / math.log(2) / num_bytes if num_bytes else None


def compressed_bits(texts: Iterable[str], compressors: Iterable[str]) -> dict[str, float]:
    """Bits a byte that general compressors at level 9 need for the texts, joined into one stream.

    One stream is the best case for them: what repeats from file to file counts once.
    """
    raw = b"".join(text.encode() for text in texts)
    tools = {"gzip": lambda: gzip.compress(raw, 9), "xz": lambda: lzma.compress(raw, preset=9)}
    return {name: len(tools[name]()) * 8 / len(raw) for name in compressors} if raw else {}


def eval_table(
    results: Mapping[str, Mapping[str, float]],
    sets: Mapping[str, EvalData],
    compressed: Mapping[str, Mapping[str, float]],
    step: int | None = None,
) -> Table:
    """A row an evaluation set: loss, perplexity, tokens, bits a byte, and other compressors' bits a byte."""
    names = list(dict.fromkeys(name for one in compressed.values() for name in one))
    others = list(
        dict.fromkeys(
            key for one in results.values() for key in one if key not in ("loss", "tokens", "perplexity")
        )
    )
    title = "evaluation" if step is None else f"evaluation of step {step}"
    table = Table(title=title, title_justify="left", box=None)
    for column in ("set", "loss", "perplexity", "tokens", "bits/byte", *(f"{n} -9" for n in names), *others):
        table.add_column(column, justify="left" if column == "set" else "right")
    for name, result in results.items():
        whole = math.isclose(result["tokens"], sets[name].num_tokens)
        bits = bits_per_byte(result["loss"], result["tokens"], sets[name].num_bytes) if whole else None
        table.add_row(
            name if sets[name].num_bytes else f"{name} (synthetic, no text)",
            f"{result['loss']:.4f}",
            f"{result['perplexity']:.2f}",
            f"{result['tokens']:,.0f}",
            "" if bits is None else f"{bits:.3f}",
            *(f"{compressed[name][n]:.3f}" for n in names),
            *(f"{result[key]:.4f}" if key in result else "" for key in others),
        )
    return table


def where_things_lie(config: Config, latest: int | None) -> None:
    """Names the places of checkpoint, metrics and report."""
    run = Path(config.run.directory)
    checkpoints = config.checkpoint.disk.directory(run)
    if latest is not None:
        show(f"checkpoint  {checkpoints / str(latest)}")
    show(f"metrics     {run / 'metrics.jsonl'}")
    show(f"report      {run / 'report.html'}")

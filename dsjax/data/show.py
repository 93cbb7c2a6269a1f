"""`dsjax data build` and `dsjax data inspect`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from dsjax.config import Config
from dsjax.data.evaluation import open_eval
from dsjax.data.tokenizer import Tokenizer
from dsjax.data.training import open_train

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_red")
_EDGE = 4
"""Pairs shown at each end of a segment."""


def build(config: Config) -> int:
    """Prepares all that a config reads, training and evaluation, and prints what there is.

    Interrupted, it goes on where it stopped when it is called again.

    Returns:
      0, the exit code.

    Raises:
      ConfigError, InputError: as their messages say.
    """
    from rich.console import Console
    from rich.table import Table

    data = open_train(config, np.arange(config.train.global_batch_size))
    console = Console(soft_wrap=True, highlight=False)
    for line in data.describe():
        console.print(line, markup=False)
    wanted = data.holds_out or config.eval.sets or config.eval.every
    sets = open_eval(config, np.arange(config.train.global_batch_size)) if wanted else {}
    table = Table("evaluation set", "documents", "bytes", "tokens", "batches", box=None)
    for name, one in sets.items():
        numbers = (one.num_documents, one.num_bytes, one.num_tokens, one.num_batches)
        table.add_row(name, *(f"{number:,}" for number in numbers))
    if sets:
        console.print(table)
    for place in data.places():
        console.print(f"kept in {place}", markup=False)
    return 0


def inspect(config: Config, rows: int = 2, step: int = 0) -> int:
    """Prints rows of a step's batch as the model will see them.

    Text is coloured by segment and dim where it is no target of the loss; a table shows what predicts
    what at both ends of each segment.

    Args:
      rows: how many rows of the batch, from its first.
      step: number of the batch, from 0.

    Returns:
      0, the exit code.

    Raises:
      ConfigError, InputError: as their messages say.
    """
    from rich.console import Console

    data = open_train(config, np.arange(min(rows, config.train.global_batch_size)))
    console = Console(soft_wrap=True, highlight=False)
    for line in data.describe():
        console.print(line, markup=False)
    batches = data.iterate(step)
    try:
        batch = next(batches)
    finally:
        batches.close()
    for number in range(len(batch["tokens"])):
        row = {name: values[number] for name, values in batch.items()}
        targets, padding = int((row["weights"] > 0).sum()), int((row["segment_ids"] == 0).sum())
        console.print()
        console.rule(f"batch {step}, row {number}: {targets} targets, {padding} padding", style="bold")
        _show_row(console, data.tokenizer, row, data.row_ids(step, number))
    return 0


def _show_row(console: Any, tokenizer: Tokenizer, row: dict[str, np.ndarray], ids: list[str]) -> None:
    from rich.table import Table

    table = Table("segment", "position", "token", "target", "weight", box=None, header_style="bold")
    for segment in range(1, int(row["segment_ids"].max()) + 1):
        here = np.flatnonzero(row["segment_ids"] == segment)
        colour = _COLOURS[(segment - 1) % len(_COLOURS)]
        name = ids[segment - 1] if segment <= len(ids) else ""
        console.print(f"[segment {segment}: {name}]", style=f"bold {colour}", markup=False)
        console.print(_coloured(tokenizer, row, here, colour))
        shown = here if len(here) <= 2 * _EDGE else [*here[:_EDGE], *here[-_EDGE:]]
        for place, at in enumerate(shown):
            if place == _EDGE and len(here) > 2 * _EDGE:
                table.add_row("", "...", "", "", "")
            pair = (_piece(tokenizer, row["tokens"][at]), _piece(tokenizer, row["targets"][at]))
            cells = (str(segment), str(row["positions"][at]), *pair, f"{row['weights'][at]:g}")
            table.add_row(*(_plain(cell) for cell in cells), style=colour)
    console.print(table)


def _coloured(tokenizer: Tokenizer, row: dict[str, np.ndarray], here: np.ndarray, colour: str) -> Any:
    """The segment's text with its special tokens, dim where it is no target that counts."""
    from rich.text import Text

    text = Text()
    # The first token is predicted by nothing; each further one is the target of the one before.
    ids = [int(row["tokens"][here[0]]), *row["targets"][here].tolist()]
    counts = np.array([False, *(row["weights"][here] > 0)])
    # Runs of equal weight are decoded whole: a character may take several tokens.
    bounds = [0, *(np.flatnonzero(np.diff(counts)) + 1).tolist(), len(ids)]
    for begin, end in pairwise(bounds):
        said = tokenizer.decode(ids[begin:end], special=True)
        text.append(said, style=colour if counts[begin] else f"dim {colour}")
    return text


def _piece(tokenizer: Tokenizer, token: int) -> str:
    role = {tokenizer.bos_id: " BOS", tokenizer.eos_id: " EOS"}.get(int(token), "")
    return f"{int(token)} {tokenizer.decode([int(token)], special=True)!r}{role}"


def _plain(cell: str) -> Any:
    from rich.text import Text

    return Text(cell)

"""The verbs under `dsjax checkpoints`, as they are typed; dsjax.checkpoint.command does them."""

from __future__ import annotations

from typing import Annotated

import typer

from dsjax.cli_errors import guarded, on_cpu

app = typer.Typer(no_args_is_help=True, help="What a run has stored.")

_PLACE = "A config, a run's directory, a directory of checkpoints, or a URL; key=value as for train."
Where = Annotated[list[str], typer.Argument(metavar="WHERE [key=value ...]", help=_PLACE, show_default=False)]
WhichOne = Annotated[
    list[str],
    typer.Argument(metavar="WHERE [STEP]", help=f"{_PLACE} Without a step: the newest.", show_default=False),
]
WhichTwo = Annotated[
    list[str],
    typer.Argument(
        metavar="WHERE [STEP] [WHERE] [STEP]",
        help="Two checkpoints: runs/a 400 500, say, or runs/a runs/b (the newest of each).",
        show_default=False,
    ),
]


@app.command(name="list")
def list_(where: Where) -> int:
    """List what is stored, in memory, on disk and in stores: step, size, age."""

    def do() -> int:
        from dsjax.checkpoint.command import list_checkpoints

        return list_checkpoints(where)

    return guarded(do)


@app.command()
def inspect(
    which: WhichOne,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every array and compare it with its checksum.")
    ] = False,
) -> int:
    """Show a checkpoint's arrays, shapes, types, sizes, checksums, and the mesh that saved it."""

    def do() -> int:
        from dsjax.checkpoint.command import inspect_checkpoint

        return inspect_checkpoint(which, check=verify)

    return on_cpu(do)


@app.command()
def prune(
    where: Where,
    keep: Annotated[
        int | None,
        typer.Option(min=1, help="Keep the newest N. Default: as the config says.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and stop.")] = False,
) -> int:
    """Remove the checkpoints that the run's rules do not keep, on disk and in its stores."""

    def do() -> int:
        from dsjax.checkpoint.command import prune_checkpoints

        return prune_checkpoints(where, keep=keep, dry_run=dry_run)

    return guarded(do)


@app.command()
def copy(
    which: WhichOne,
    to: Annotated[
        str,
        typer.Argument(
            metavar="TO", help="A directory of checkpoints, a run's, or a URL.", show_default=False
        ),
    ],
) -> int:
    """Copy a checkpoint to another directory or store, or back, and check what arrived."""

    def do() -> int:
        from dsjax.checkpoint.command import copy_checkpoint

        return copy_checkpoint(which, to)

    return guarded(do)


@app.command()
def diff(which: WhichTwo) -> int:
    """Show which arrays of two checkpoints differ, and by how much; ends with 1 if any does."""

    def do() -> int:
        from dsjax.checkpoint.command import diff_checkpoints

        return diff_checkpoints(which)

    return on_cpu(do)

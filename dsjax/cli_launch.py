"""`dsjax launch` as it is typed; dsjax.launch.command does it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dsjax.cli_errors import guarded


def _option(help: str, metavar: str | None = None, quiet: bool = False, **more: Any) -> Any:
    """An option; one that is text has no default worth showing."""
    return typer.Option(help=help, metavar=metavar, show_default=metavar is None and not quiet, **more)


Command = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- COMMAND [ARGS ...]",
        help="A verb of dsjax (train CONFIG ...) or another program (python my_train.py).",
        show_default=False,
    ),
]
Workers = Annotated[int | None, _option("Processes to start on each node.", quiet=True, min=1)]
_NODES = "Nodes of the job, each with a supervisor. Default: as the scheduler says, else 1."
Nodes = Annotated[str | None, _option(_NODES, "N|MIN:MAX")]
_RANK = "Which node this is; 0 leads. Default: the scheduler's."
NodeRank = Annotated[int | None, _option(_RANK, quiet=True, min=0)]
_MEET = "Where node 0's supervisor listens. Default: by the scheduler."
Rendezvous = Annotated[str | None, _option(_MEET, "HOST:PORT")]
Hosts = Annotated[str | None, _option("Start the supervisors on these hosts, by ssh.", "A,B|FILE")]
MaxRestarts = Annotated[int, _option("Start all again so often at most.", min=0)]
GiveUpAfter = Annotated[int, _option("End after so many failures in a row that got no further.", min=1)]
_HANG = "Start again when a rank stands still so long (or 10 of its steps)."
HangSeconds = Annotated[float, _option(_HANG, min=0.1)]
_REJOIN = "Wait so long for a node that is lost, then go on without."
RejoinSeconds = Annotated[float, _option(_REJOIN, min=0.0)]
_GRACE = "Kill workers that have not ended so long after they were told to."
GraceSeconds = Annotated[float, _option(_GRACE, min=0.0)]
_HEALTH = "Run this every 30 s on each node; where it fails the job goes on without that node."
Health = Annotated[str | None, _option(_HEALTH, "COMMAND")]
Drain = Annotated[str | None, _option("Have the job at --rendezvous go on without a node.", "NODE")]


def launch(
    command: Command = None,
    workers: Workers = None,
    nodes: Nodes = None,
    node_rank: NodeRank = None,
    rendezvous: Rendezvous = None,
    hosts: Hosts = None,
    max_restarts: MaxRestarts = 100,
    give_up_after: GiveUpAfter = 3,
    hang_seconds: HangSeconds = 60.0,
    rejoin_seconds: RejoinSeconds = 30.0,
    grace_seconds: GraceSeconds = 10.0,
    health: Health = None,
    drain: Drain = None,
) -> int:
    """Run a command as N processes on each node, start all again when one fails or hangs."""
    options = {name: value for name, value in locals().items() if name != "command"}

    def supervise() -> int:
        from dsjax.launch.command import launch_command

        return launch_command(command or [], **options)

    return guarded(supervise)

"""What is typed after `dsjax launch`, as one function."""

from __future__ import annotations

from collections.abc import Sequence

from dsjax.errors import ConfigError
from dsjax.launch.options import Options, place


def launch_command(
    command: Sequence[str],
    *,
    workers: int | None,
    nodes: str | None,
    node_rank: int | None,
    rendezvous: str | None,
    hosts: str | None,
    drain: str | None,
    **more: int | float | str | None,
) -> int:
    """Supervises a job on this node, on a list of hosts, or has a running one go on without a node.

    Args:
      more: further fields of `Options`.

    Raises:
      ConfigError: options that are missing or do not go together.
    """
    if drain is not None:
        return _drain(drain, rendezvous, command)
    if workers is None:
        raise ConfigError("launch: missing option '--workers' (see dsjax launch --help)")
    if hosts is not None:
        if node_rank is not None:
            raise ConfigError("launch: --hosts numbers the nodes by itself; leave out --node-rank")
        from dsjax.launch.hosts import on_hosts

        return on_hosts(hosts, command, workers=workers, nodes=nodes, rendezvous=rendezvous, **more)
    from dsjax.launch.run import launch

    return launch(Options(workers=workers, **place(nodes, node_rank, rendezvous), **more), command)  # type: ignore[arg-type]


def _drain(which: str, rendezvous: str | None, command: Sequence[str]) -> int:
    if rendezvous is None or command:
        raise ConfigError("launch: --drain NODE takes the job's --rendezvous HOST:PORT and no command")
    from dsjax.launch.follower import drain

    print(f"dsjax launch: {drain(which, rendezvous)}")
    return 0

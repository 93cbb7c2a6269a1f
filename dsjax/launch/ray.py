"""A job on a Ray cluster: one actor a node, which runs that node's supervisor.

    from dsjax.launch.ray import launch_on_ray
    launch_on_ray(["train", "configs/my_run.yaml"], nodes=4, workers=1, resources={"GPU": 8})

Ray chooses the nodes and starts the supervisors; meeting, restarting and draining are theirs.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from dsjax.errors import EXIT_INTERNAL, ConfigError
from dsjax.launch.hosts import passed_on, supervisor_command
from dsjax.launch.options import node_counts
from dsjax.launch.run import WATCH_STDIN


class _Node:
    """The actor."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        """HOST:PORT of a port that is free on this node."""
        import ray

        with socket.create_server(("", 0)) as server:
            return f"{ray.util.get_node_ip_address()}:{server.getsockname()[1]}"

    def run(self, words: list[str], variables: dict[str, str]) -> int:
        """Runs the supervisor to its end; it ends with the actor, too."""
        environment = {**os.environ, **variables, WATCH_STDIN: "1"}
        self._process = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE)
        return self._process.wait()

    def stop(self) -> None:
        """Has the job save and stop."""
        if self._process is not None:
            self._process.terminate()


def launch_on_ray(
    command: Sequence[str],
    *,
    nodes: int | str,
    workers: int = 1,
    resources: Mapping[str, float] | None = None,
    wait_seconds: float = 600.0,
    **options: Any,
) -> int:
    """Runs a command as one job on nodes of a Ray cluster.

    Args:
      command: a verb of dsjax and its arguments, or another program and its.
      nodes: N, or MIN:MAX, of which MAX are asked of Ray at the start.
      workers: processes a node.
      resources: what a node needs to have, for Ray: ``{"CPU": 8, "GPU": 8}``.
      wait_seconds: how long to wait for Ray to find them.
      options: further fields of `dsjax.launch.options.Options`, as max_restarts.

    Returns:
      The exit code of the job.

    Raises:
      ConfigError: Ray is not installed, or has no such nodes.
    """
    try:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    except ImportError:
        raise ConfigError("launch on Ray: ray is not installed; pip install 'dsjax[ray]'") from None
    count = node_counts(str(nodes))[1]
    needed = {"CPU": 1.0, **(resources or {})}
    if not ray.is_initialized():
        ray.init()
    group = placement_group([dict(needed) for _ in range(count)], strategy="STRICT_SPREAD")
    try:
        if not group.wait(wait_seconds):
            raise ConfigError(f"launch on Ray: the cluster does not have {count} nodes with {needed} each")
        actor = ray.remote(_Node)
        actors = [
            actor.options(
                num_cpus=needed["CPU"],
                num_gpus=needed.get("GPU", 0),
                resources={k: v for k, v in needed.items() if k not in ("CPU", "GPU")},
                max_concurrency=2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank
                ),
            ).remote()
            for rank in range(count)
        ]
        address = ray.get(actors[0].address.remote())
        place = {"workers": workers, "nodes": str(nodes), "rendezvous": address, **options}
        commands = [supervisor_command(command, rank=rank, **place) for rank in range(count)]
        variables = passed_on(os.environ)
        return _wait(actors, [one.run.remote(w, variables) for one, w in zip(actors, commands, strict=True)])
    finally:
        remove_placement_group(group)


def _wait(actors: list[Any], ends: list[Any]) -> int:
    """The leader's exit code; Ctrl-C has the job save first."""
    import ray

    try:
        return int(ray.get(ends[0]))
    except KeyboardInterrupt:
        ray.get(actors[0].stop.remote())
        return int(ray.get(ends[0]))
    except ray.exceptions.RayActorError:
        return EXIT_INTERNAL

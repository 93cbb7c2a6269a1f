"""Which snapshots there are, over all hosts, and what it takes to read one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dsjax.checkpoint.snapshots.file import Index, read_index, snapshot_files
from dsjax.checkpoint.snapshots.hosts import Hosts
from dsjax.checkpoint.snapshots.partition import extents
from dsjax.checkpoint.snapshots.reading import Copy, Fetch, LocalFiles, Snapshot
from dsjax.errors import Damaged, InputError
from dsjax.processes import gather

_READERS = 4

# Step and session of a snapshot -> the files that hold each process's part.
Complete = dict[tuple[int, str], dict[int, list[Copy]]]


def complete_snapshots(directory: Path, hosts: Hosts, run: str) -> Complete:
    """The snapshots of a run of which every process's part is valid on some host, by step and age.

    All processes call this together, when none of them writes.
    """
    mine = []
    for path in snapshot_files(directory) if hosts.leads else []:
        index = read_index(path)
        if index is not None and run and index.run == run:
            mine.append([index.step, index.written, index.session, index.processes, index.rank, path.name])
    told = [(one, hosts.of[rank]) for rank, found in enumerate(gather(mine)) for one in found]
    found: Complete = {}
    needed: dict[tuple[int, str], int] = {}
    for (step, _, session, processes, part, name), host in sorted(told):
        needed[step, session] = processes
        found.setdefault((step, session), {}).setdefault(part, []).append(Copy(host, name))
    return {key: parts for key, parts in found.items() if len(parts) == needed[key]}


def open_snapshot(
    complete: Complete, step: int, directory: Path, hosts: Hosts, files: LocalFiles, fetch: Fetch
) -> tuple[Snapshot, dict[str, Any]]:
    """The youngest snapshot of a step, and what was given with the state; all processes call this together.

    Raises:
      InputError: there is none.
    """
    keys = [key for key in complete if key[0] == step]
    if not keys:
        known = ", ".join(str(s) for s in sorted({s for s, _ in complete})) or "none"
        raise InputError(f"no snapshot of step {step} in {directory}; steps there: {known}")
    parts = complete[keys[-1]]
    told = {
        rank: _text(directory / copies[0].file)
        for rank, copies in parts.items()
        if hosts.leads and copies[0].host == hosts.mine
    }
    texts = {int(rank): text for said in gather(told) for rank, text in said.items()}
    held = [(Index.from_json(texts[rank].encode()), parts[rank]) for rank in sorted(parts) if texts[rank]]
    if len(held) < len(parts) or any((index.step, index.session) != keys[-1] for index, _ in held):
        raise Damaged(f"the snapshot of step {step} in {directory} has gone while it was read")
    return Snapshot(held, files, hosts.mine, fetch), dict(held[0][0].meta)


def _text(path: Path) -> str:
    index = read_index(path)
    return "" if index is None else index.to_json().decode()


def place(snapshot: Snapshot, wanted: dict[str, Any]) -> dict[str, jax.Array]:
    """A snapshot's arrays in the places of the abstract arrays of the same names.

    Raises:
      Damaged: what this process needs is damaged.
    """

    def one(name: str) -> jax.Array:
        leaf, shape = wanted[name], tuple(wanted[name].shape)
        on: dict[jax.Device, jax.Array] = {}
        for (start, stop), devices in extents(leaf.sharding, shape).items():
            here = [device for device in devices if device.process_index == jax.process_index()]
            if here:
                read = snapshot.read(name, start, stop)
                # Copies: on a CPU a device array could share the file's memory, which is written again.
                on |= {device: jnp.array(read, copy=True, device=device) for device in here}
        return jax.make_array_from_single_device_arrays(
            shape, leaf.sharding, list(on.values()), dtype=leaf.dtype
        )

    with ThreadPoolExecutor(_READERS) as pool:
        placed = dict(zip(wanted, pool.map(one, wanted), strict=True))
    return jax.block_until_ready(placed)

"""Snapshots of a run's state in the memory of its hosts: they outlive the processes that made them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dsjax.checkpoint.snapshots.copying import Staged, pieces_of, take
from dsjax.checkpoint.snapshots.file import (
    SUFFIX,
    Index,
    SnapshotFile,
    file_bytes,
    invalidate,
    lay_out,
    read_index,
    snapshot_files,
)
from dsjax.checkpoint.snapshots.hosts import Hosts, remove_empty
from dsjax.checkpoint.snapshots.partition import partition
from dsjax.checkpoint.snapshots.peers import Peers
from dsjax.checkpoint.snapshots.reading import Copy, LocalFiles, Snapshot
from dsjax.checkpoint.snapshots.room import make_room, private_directory
from dsjax.checkpoint.snapshots.sender import Sender
from dsjax.checkpoint.snapshots.survey import Complete, complete_snapshots, open_snapshot, place
from dsjax.checkpoint.tree import check_matches, from_stored, to_stored
from dsjax.config.checkpoint import MemoryConfig
from dsjax.errors import DsjaxError, InputError, InternalError
from dsjax.files import write_atomically
from dsjax.mesh import named_leaves
from dsjax.processes import gather, together

_RUN_FILE = ".snapshots"
_COPIES = 2  # of each process that this one is the buddy of: one is good while the other is written


def snapshot_directory(config: MemoryConfig, run_directory: str | Path) -> Path:
    """Where the snapshots of a run lie on each host."""
    run = Path(run_directory).resolve()
    root = Path(config.path) if config.path else Path(f"/dev/shm/dsjax-{os.getuid()}")
    return root.absolute() / f"{run.name}-{hashlib.blake2b(str(run).encode(), digest_size=6).hexdigest()}"


class MemorySnapshots:
    """The snapshots of one run.  All processes make the same calls in the same order.

    A run asks for `newest`, restores one, says with `prepare` from which step it goes on, and then saves.
    No process waits for another in `save`; a snapshot counts when every process's part of it is there.

    Args:
      config: `checkpoint.memory`.
      run_directory: of the run; a file in it says which snapshots are this run's.
      every: snapshot every N steps; 0: never.
    """

    def __init__(self, config: MemoryConfig, run_directory: str | Path, every: int):
        self.directory = snapshot_directory(config, run_directory)
        self.every = every
        self._config, self._run_file = config, Path(run_directory) / _RUN_FILE
        self._me, self._processes = jax.process_index(), jax.process_count()
        self._hosts: Hosts | None = None
        self._peers: Peers | None = None
        self._sender: Sender | None = None
        self._complete: Complete = {}
        self._slots: list[SnapshotFile] = []
        self._steps: dict[Path, int] = {}
        self._leftovers: list[Path] = []
        self._saved = 0
        self._background = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._pending: Future[None] | None = None

    def due(self, step: int) -> bool:
        """Whether a snapshot is to be made after this step."""
        return bool(self.every) and step % self.every == 0

    # ---- what there is -------------------------------------------------------------------------

    def newest(self) -> list[int]:
        """Steps of the snapshots that are complete, the newest first, over all hosts.

        Raises:
          ConfigError: the directory cannot be used.
        """
        self._survey()
        return sorted({step for step, _ in self._complete}, reverse=True)

    def latest_step(self) -> int | None:
        """The newest complete snapshot's step."""
        return next(iter(self.newest()), None)

    def _meet(self) -> Hosts:
        if self._hosts is None:
            together(lambda: private_directory(self.directory.parent))
            together(lambda: private_directory(self.directory))
            self._hosts = Hosts.meet(self.directory)
            if self._hosts.count > 1:
                self._peers = Peers(self.directory, self._hosts)
        return self._hosts

    def _run(self) -> str:
        """Which run the run directory holds; "": none that has made snapshots."""
        own = self._run_file.read_text() if self._run_file.exists() else ""
        return str(gather(own)[0])

    def _survey(self) -> None:
        hosts, run = self._meet(), self._run()
        together(self.wait)
        gather(None)  # now no process writes any more
        self._files = LocalFiles(self.directory)
        if self._peers is not None:
            self._peers.serve_afresh()
        self._complete = complete_snapshots(self.directory, hosts, run)

    # ---- restoring -----------------------------------------------------------------------------

    def facts(self, step: int) -> dict[str, Any]:
        """What was given with the state of a step.

        Raises:
          InputError: there is no such snapshot.
        """
        return self._open(step)[1]

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """The state of a snapshot, placed as the abstract tree `like` says, and what was given with it.

        The mesh, its processes and its hosts may be others than those that saved it.  Each process reads the
        bytes that its own devices need, and their digests are checked.

        Raises:
          InputError: no such snapshot, a damaged one, or one of another model; on all processes if on one.
        """
        snapshot, meta = self._open(step)
        wanted = to_stored(like)
        arrays = {n: jax.ShapeDtypeStruct(r.shape, jnp.dtype(r.dtype)) for n, r in snapshot.arrays.items()}
        check_matches(arrays, wanted, f"the snapshot of step {step} in {self.directory}")
        placed = together(lambda: place(snapshot, named_leaves(wanted)))
        if self._peers is not None:
            self._peers.hang_up()
        return from_stored(placed, like), meta

    def _open(self, step: int) -> tuple[Snapshot, dict[str, Any]]:
        if not any(its == step for its, _ in self._complete):
            self._survey()
        fetch = _nobody if self._peers is None else self._peers.fetch
        return open_snapshot(self._complete, step, self.directory, self._meet(), self._files, fetch)

    # ---- saving --------------------------------------------------------------------------------

    def prepare(self, state: Any, step: int) -> None:
        """Makes room for the snapshots of a run that goes on from a step.

        What can still be needed stays until newer snapshots are complete: those of the same layout are
        overwritten in turn, the newest one of another layout is removed later.  Memory is taken in the
        background.

        Args:
          state: the (concrete or abstract) state, with shardings.
          step: where the run goes on; snapshots of later steps are of a past that is no longer.

        Raises:
          ConfigError: they do not fit, or the directory cannot be used.
        """
        self.forget_after(step)
        hosts = self._meet()
        together(self._name_run)
        self._run_name = self._run()
        if self._peers is not None:
            self._peers.take_copies({})
        stored = to_stored(state)
        self._boxes = partition(stored, self._me)
        self._shardings = {name: leaf.sharding for name, leaf in named_leaves(stored).items()}
        self._records = lay_out([(b.name, b.dtype, b.shape, b.start, b.stop) for b in self._boxes])
        layout = hashlib.blake2b(repr(self._records).encode(), digest_size=4).hexdigest()
        told = gather(
            [f"{self._me}of{self._processes}-{layout}", file_bytes(self._records), secrets.token_hex(8)]
        )
        self._session, self._saved = told[0][2], 0
        names = [[f"{stem}.{k}{SUFFIX}" for k in range(self._count())] for stem, _, _ in told]
        copies = [[f"{stem}.copy{k}{SUFFIX}" for k in range(_COPIES)] for stem, _, _ in told]
        sends = self._config.buddy and hosts.count > 1
        sizes: dict[str, int] = {}  # of all files of this host
        for rank, (_, size, _) in enumerate(told):
            if hosts.of[rank] == hosts.mine:
                sizes |= dict.fromkeys(names[rank], size)
            keeper = hosts.buddy(rank) if sends else None
            if keeper is not None and hosts.of[keeper] == hosts.mine:
                sizes |= dict.fromkeys(copies[rank], size)
        newest = self._complete[max(self._complete)] if self._complete else {}
        keep = {copy.file for found in newest.values() for copy in found if copy.host == hosts.mine}
        self._leftovers = together(
            lambda: make_room(self.directory, sizes, keep, self._config.budget_gib) if hosts.leads else []
        )
        self._slots = [SnapshotFile(self.directory / name, told[self._me][1]) for name in names[self._me]]
        kept: dict[str, list[SnapshotFile]] = {}
        for rank in hosts.keeps_for() if sends else []:
            kept[told[rank][0]] = [SnapshotFile(self.directory / n, told[rank][1]) for n in copies[rank]]
        if self._sender is not None:
            self._sender.close()
        buddy = hosts.buddy(self._me) if sends else None
        self._sender = Sender(self._peers.addresses, buddy) if self._peers and buddy is not None else None
        self._stem = told[self._me][0]
        self._pending = self._background.submit(self._guarded, self._allocate, kept)

    def _name_run(self) -> None:
        if self._me == 0 and not (self._run_file.exists() and self._run_file.read_text()):
            try:
                write_atomically(self._run_file, secrets.token_hex(16).encode())
            except OSError as error:
                raise InputError(
                    f"run.dir {self._run_file.parent}: cannot be written ({error.strerror})"
                ) from None

    def _count(self) -> int:
        """Files of each process: one is written; of several processes one may still finish the one before."""
        return max(self._config.keep, 2 if self._processes > 1 else 1) + 1

    def _allocate(self, copies: dict[str, list[SnapshotFile]]) -> None:
        self._steps = {}
        for file in [*self._slots, *itertools.chain(*copies.values())]:
            file.allocate()
            index = read_index(file.path)
            if index is not None and index.run != self._run_name:
                file.begin()
                index = None
            self._steps[file.path] = -1 if index is None else index.step
        if self._peers is not None:
            self._peers.take_copies(copies)

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Takes a snapshot; when it returns, the state may be donated.

        On CPUs it copies the state; elsewhere it starts copying it to pinned memory of the host.  Digests, and
        what makes the snapshot count, follow in the background.  Waits only for the one before.

        Raises:
          InputError, InternalError: an earlier one failed, or the state is not what was prepared for.
        """
        self.wait()
        if self._saved >= min(self._processes, 2):
            for path in self._leftovers:
                path.unlink(missing_ok=True)
            self._leftovers = []
        pieces = pieces_of(self._boxes, self._shardings, named_leaves(to_stored(state)))
        self._complete = {}  # it is about to change
        slot = min(self._slots, key=lambda slot: self._steps[slot.path])
        attempt = int(os.environ.get("DSJAX_ATTEMPT", "0"))
        index = Index(
            self._run_name, self._session, step, self._me, self._processes, attempt, time.time(), dict(meta),
            tuple(self._records),
        )  # fmt: skip
        self._steps[slot.path] = -1
        self._guarded(slot.begin)
        targets = [slot.bytes_of(record) for record in self._records]
        staged = take(pieces, targets)
        del pieces
        self._pending = self._background.submit(self._guarded, self._finish, slot, index, staged)

    def _finish(self, slot: SnapshotFile, index: Index, staged: Staged | None) -> None:
        if staged is not None:
            staged.copy()
        slot.finish(index)
        self._steps[slot.path] = index.step
        self._saved += 1
        if self._sender is not None:
            self._sender.send(slot, self._stem)

    def _guarded(self, act: Any, *arguments: Any) -> None:
        try:
            act(*arguments)
        except DsjaxError:
            raise
        except OSError as error:
            raise InputError(
                f"checkpoint.memory.path {self.directory}: {error.strerror}; free some memory, lower "
                "checkpoint.memory.keep, or set checkpoint.memory.every=0"
            ) from error
        except Exception as error:
            raise InternalError(
                f"the snapshot in {self.directory} failed: {type(error).__name__}: {error}"
            ) from error

    # ---- the rest ------------------------------------------------------------------------------

    def forget_after(self, step: int) -> None:
        """Snapshots of later steps no longer count: the run goes on from this one, on another path."""
        self._survey()
        hosts = self._meet()
        if self._sender is not None:
            self._sender.forget()
        gather(None)  # now nothing more is sent
        for path in snapshot_files(self.directory) if hosts.leads else []:
            index = read_index(path)
            if index is not None and index.step > step:
                invalidate(path)
        gather(None)
        self._steps = {path: its if its <= step else -1 for path, its in self._steps.items()}
        self._complete = {key: parts for key, parts in self._complete.items() if key[0] <= step}

    def check(self) -> None:
        """Raises the error of the background work that failed, once."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Waits until the last snapshot of this process counts; raises its error if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    @property
    def buddy_step(self) -> int | None:
        """Step of this process's newest snapshot that another host has too; None: of none."""
        return self._sender.sent_step if self._sender is not None else None

    @property
    def trouble(self) -> str | None:
        """Why the last snapshot did not reach another host; None: it did, or there is none."""
        return self._sender.trouble if self._sender is not None else None

    def wait_for_buddy(self, seconds: float) -> None:
        """Waits until the last snapshot is with the buddy too, or the time is up."""
        self.wait()
        if self._sender is not None:
            self._sender.wait(seconds)

    def clear(self) -> None:
        """Removes the snapshots of this run from this host; its memory is free then.

        Each process removes the files that it made, the first of a host all that are left of others; what
        another one is still writing fails, and nobody is told.
        """
        with contextlib.suppress(DsjaxError):
            self.wait()
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        leads = self._hosts is None or self._hosts.leads
        for path in [*self._steps, *(snapshot_files(self.directory) if leads else [])]:
            path.unlink(missing_ok=True)
        self._slots, self._steps, self._complete, self._leftovers = [], {}, {}, []

    def close(self) -> None:
        """Ends the threads; the snapshots stay, and a directory without any goes."""
        try:
            self.wait()
        finally:
            if self._sender is not None:
                self._sender.close()
            if self._peers is not None:
                self._peers.close()
            self._background.shutdown()
            if self._hosts is not None and self._hosts.leads and not snapshot_files(self.directory):
                remove_empty(self.directory)


def _nobody(copy: Copy, *where: Any) -> Any:
    raise InputError(f"snapshot {copy.file} is on another host")

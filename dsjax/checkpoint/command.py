"""What the verbs under `dsjax checkpoints` do."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from dsjax.checkpoint import copies, snapshots
from dsjax.checkpoint.digests import verify
from dsjax.checkpoint.places import Place, checkpoints_of, references, run_place, whole_steps
from dsjax.checkpoint.retention import superfluous
from dsjax.checkpoint.stored import (
    age,
    free,
    listing,
    metric_of,
    read_arrays,
    read_meta,
    remove_checkpoints,
    stored_arrays,
)
from dsjax.config.checkpoint import DiskConfig
from dsjax.errors import ConfigError, DsjaxError, InputError
from dsjax.mesh import named_leaves


def _print(table: Table) -> None:
    """Prints a table, into a pipe or file with nothing cut off."""
    for column in table.columns:
        column.overflow = "fold"
    Console(soft_wrap=True, width=None if sys.stdout.isatty() else 1000).print(table)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"


# ---- list --------------------------------------------------------------------------------------


def list_checkpoints(words: Sequence[str]) -> int:
    """Prints what is stored in memory, on disk and in stores, oldest first in each.

    Raises:
      InputError: a store that cannot be read, after all else was listed.
    """
    where, faults = run_place(words), []
    table = Table("step", "MiB", "written", "tier", "path", box=None)
    if where.memory is not None:
        for shot in snapshots.listing(where.memory):
            parts = (
                "memory" if shot.complete else f"memory ({len(shot.ranks)} of {shot.processes} parts here)"
            )
            table.add_row(str(shot.step), _mib(shot.num_bytes), age(shot.written), parts, str(shot.path))
    if where.disk is not None:
        for one in listing(where.disk):
            table.add_row(str(one.step), _mib(one.num_bytes), age(one.written), "disk", str(one.path))
    for url in where.urls:
        try:
            for step in whole_steps(url):
                manifest = copies.manifest_of(copies.open_store(url), step, url)
                row = (str(step), _mib(manifest["bytes"]), age(manifest["written"]), "remote")
                table.add_row(*row, f"{url.rstrip('/')}/{step}")
        except InputError as error:
            faults += error.faults
    if table.row_count:
        _print(table)
    elif not faults:
        print(f"no checkpoints in {where}")
    if faults:
        raise InputError(faults)
    return 0


# ---- inspect -----------------------------------------------------------------------------------


def inspect_checkpoint(words: Sequence[str], *, check: bool = False) -> int:
    """Prints what a checkpoint holds.

    Args:
      check: read every array and compare it with the checksum written when it was saved.

    Raises:
      InputError: no such checkpoint; Damaged: it cannot be read, or an array is not as it was saved.
    """
    named = references(words)
    if len(named) != 1:
        raise ConfigError(f"inspect: takes one checkpoint, got {len(named)}")
    with named[0].located() as path:
        facts, arrays = read_meta(path), named_leaves(stored_arrays(path))
        digests = facts.get("digests") or {}
        _print_facts(path, facts, arrays)
        table = Table("array", "shape", "type", "MiB", "checksum", box=None)
        for name, array in arrays.items():
            shape = " x ".join(map(str, array.shape)) or "scalar"
            row = (name, shape, str(array.dtype), _mib(_bytes(array)), digests.get(name, "-"))
            table.add_row(*row)
        _print(table)
        if check:
            unknown = [name for name in arrays if name not in digests]
            for name, array in arrays.items():
                if name in digests:
                    verify({name: _read(path, name, array)}, digests, f"checkpoint {path}")
            print(f"{len(arrays) - len(unknown)} arrays are as they were saved")
            if unknown:
                print(f"{len(unknown)} were saved without a checksum")
    return 0


def _bytes(array: Any) -> int:
    return int(np.prod(array.shape, dtype=np.int64)) * jax.numpy.dtype(array.dtype).itemsize


def _print_facts(path: Path, facts: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    files = copies.files_of(path)
    print(path)
    print(
        f"{sum(files.values()) / 2**20:,.1f} MiB in {len(files)} files, {len(arrays)} arrays of "
        f"{sum(map(_bytes, arrays.values())) / 2**20:,.1f} MiB"
    )
    if "time" in facts:
        print(f"saved {age(facts['time'])}")
    if "mesh" in facts:
        cut = [f"{axis} {size}" for axis, size in facts["mesh"].items() if size > 1]
        print(f"by {facts.get('processes', 1)} processes over a mesh of {', '.join(cut) or 'one device'}")
    for group, metrics in (facts.get("metrics") or {}).items():
        print(f"{group}: " + ", ".join(f"{name} {value:g}" for name, value in metrics.items()))
    print()


def _read(path: Path, name: str, array: Any) -> jax.Array:
    """One array of a checkpoint, whole on one device."""
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    wanted: Any = jax.ShapeDtypeStruct(tuple(array.shape), array.dtype, sharding=here)
    for part in reversed(name.split("/")):
        wanted = {part: wanted}
    return named_leaves(read_arrays(path, wanted))[name]


# ---- prune -------------------------------------------------------------------------------------


def prune_checkpoints(words: Sequence[str], *, keep: int | None = None, dry_run: bool = False) -> int:
    """Removes what the rules of a run, or `keep`, do not keep, on disk and in its stores.

    Raises:
      InputError: the run is under way, or a store cannot be read.
    """
    where = run_place(words)
    if where.step is not None:
        raise ConfigError(
            f"prune: takes a run, a directory of checkpoints or a URL, got one checkpoint: {words[0]}"
        )
    if keep is None and where.rules is None:
        raise ConfigError(f"--keep: say how many to keep; {where} comes without the config of a run")
    with _locked(where):
        if where.disk is not None:
            rules = where.rules or DiskConfig()
            best = rules.best_metric if rules.keep_best else None
            sizes = {one.step: one.num_bytes for one in listing(where.disk)}
            metrics = {s: metric_of(where.disk / str(s), best) if best else None for s in sizes}
            gone = superfluous(metrics, keep or rules.keep, rules.keep_every, rules.keep_best)
            _told(where.disk, gone, sum(sizes[step] for step in gone), len(sizes), dry_run)
            if gone and not dry_run:
                remove_checkpoints(where.disk, gone)
                free(where.disk)
        for url in where.urls:
            held = whole_steps(url)
            gone = superfluous(dict.fromkeys(held), keep or where.keep_remote or len(held))
            store = copies.open_store(url)
            sizes = {step: copies.manifest_of(store, step, url)["bytes"] for step in gone}
            _told(url, gone, sum(sizes.values()), len(held), dry_run)
            for step in [] if dry_run else gone:
                copies.remove(store, step)
    return 0


def _told(where: Path | str, gone: list[int], num_bytes: int, total: int, dry_run: bool) -> None:
    if not gone:
        print(f"{where}: nothing to remove, {total} kept")
        return
    verb = "would remove" if dry_run else "removed"
    steps = ", ".join(map(str, gone))
    print(f"{where}: {verb} {len(gone)} of {total} ({num_bytes / 2**20:,.1f} MiB): {steps}")


@contextlib.contextmanager
def _locked(where: Place) -> Iterator[None]:
    """Holds the run's directory, so that no run works with what is removed."""
    if where.run is None or not where.run.is_dir():
        yield
        return
    try:
        with filelock.FileLock(where.run / ".lock", blocking=False):
            yield
    except filelock.Timeout:
        raise InputError(
            f"{where.run}: a run is using this directory and prunes by itself; wait for it"
        ) from None


# ---- copy --------------------------------------------------------------------------------------


def copy_checkpoint(words: Sequence[str], to: str) -> int:
    """Copies checkpoints to a directory of checkpoints, to a run's, or to a store.

    Raises:
      InputError: no such checkpoint, or there is one of that step already.
    """
    for one in references(words):
        with one.located() as path:
            store = copies.open_store(to, create=True) if "://" in to else None
            root = checkpoints_of(to) if (Path(to) / "config.yaml").is_file() else Path(to)
            target = str(root / path.name) if store is None else f"{to.rstrip('/')}/{path.name}"
            try:
                done = (
                    _copy_here(path, root / path.name)
                    if store is None
                    else copies.send(store, int(path.name), path)
                )
            except DsjaxError:
                raise
            except Exception as error:
                raise InputError(f"{target}: cannot be written ({copies.reason(error)})") from error
            print(f"{path} -> {target} ({_mib(done['bytes'])} MiB)")
    return 0


def _copy_here(path: Path, to: Path) -> dict[str, int]:
    """Copies a checkpoint to a new directory, which appears when all of it has been compared."""
    if to.exists():
        raise InputError(f"{to}: exists already; remove it first, or copy to another directory")
    draft = to.with_name(f"{to.name}.orbax-checkpoint-tmp")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        shutil.copytree(path, draft)
        files = copies.files_of(path)
        wrong = [name for name in files if copies.digest_of(path / name) != copies.digest_of(draft / name)]
        if wrong:
            raise InputError(
                f"{to}: {wrong[0]} did not arrive as it was sent; look at the disk, and try again"
            )
        os.replace(draft, to)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return {"bytes": sum(files.values())}


# ---- diff --------------------------------------------------------------------------------------


def diff_checkpoints(words: Sequence[str]) -> int:
    """Prints which arrays of two checkpoints differ, and by how much; 1 if any does, as `diff` says it.

    Arrays with the same checksum are not read.

    Raises:
      ConfigError: not two checkpoints; InputError: no such one.
    """
    named = references(words)
    if len(named) != 2:
        raise ConfigError(f"diff: takes two checkpoints, got {len(named)}")
    with named[0].located() as a, named[1].located() as b:
        arrays = [named_leaves(stored_arrays(path)) for path in (a, b)]
        sums = [read_meta(path).get("digests") or {} for path in (a, b)]
        table = Table("array", "differs in", "largest difference", box=None)
        same = 0
        for name in dict.fromkeys([*arrays[0], *arrays[1]]):
            first, second = arrays[0].get(name), arrays[1].get(name)
            if first is None or second is None:
                table.add_row(name, f"only in {a if second is None else b}", "")
            elif tuple(first.shape) != tuple(second.shape) or first.dtype != second.dtype:
                both = (f"{one.dtype}{list(one.shape)}" for one in (first, second))
                table.add_row(name, " and ".join(both), "")
            elif name in sums[0] and sums[0][name] == sums[1].get(name):
                same += 1
            else:
                x, y = _read(a, name, first), _read(b, name, second)
                count, largest = _difference(x, y)
                same += not count
                if count:
                    table.add_row(name, f"{count:,} of {x.size:,} elements", f"{largest:.6g}")
        if table.row_count:
            _print(table)
        print(f"{same} arrays are the same, {table.row_count} differ")
    return int(table.row_count > 0)


def _difference(a: jax.Array, b: jax.Array) -> tuple[int, float]:
    """How many elements differ, bit for bit, and the largest |a - b| of them (inf: only one is finite)."""
    x, y = np.asarray(a), np.asarray(b)
    differ = (x.reshape(-1, 1).view(np.uint8) != y.reshape(-1, 1).view(np.uint8)).any(axis=-1)
    if not differ.any():
        return 0, 0.0
    with np.errstate(invalid="ignore"):
        apart = np.abs(x.ravel()[differ].astype(np.float64) - y.ravel()[differ].astype(np.float64))
    return int(differ.sum()), float(np.where(np.isnan(apart), np.inf, apart).max())

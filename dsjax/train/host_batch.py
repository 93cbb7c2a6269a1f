"""Batches as a loader brings them: host arrays, checked before they go onto devices."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from dsjax.errors import InputError
from dsjax.mesh import named_leaves, path_name


def abstract(batch: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), batch)


def signature(batch: Any) -> Any:
    leaves = named_leaves(batch)
    return tuple((n, x.shape, str(x.dtype), str(x.sharding.spec)) for n, x in leaves.items())


def same_everywhere(batch: Any) -> bool:
    """Whether all processes bring the same batch."""
    told = hashlib.blake2b(digest_size=8)
    for leaf in jax.tree.leaves(batch):
        told.update(np.ascontiguousarray(leaf).tobytes())
    digest = np.frombuffer(told.digest(), np.uint32)
    return bool(np.all(multihost_utils.process_allgather(digest) == digest))


def leading_rows(batch: Any) -> int:
    leaves = named_leaves(batch)
    if not leaves:
        raise InputError("the batch holds no arrays")
    rows = {name: (np.shape(leaf) or (0,))[0] for name, leaf in leaves.items()}
    if len(set(rows.values())) != 1 or 0 in rows.values():
        shown = ", ".join(f"{name or 'batch'}: {np.shape(leaf)}" for name, leaf in leaves.items())
        raise InputError(
            f"the arrays of a batch have the examples as their first dimension, all alike; got {shown}"
        )
    return next(iter(rows.values()))


def narrow(name: str, value: np.ndarray) -> np.ndarray:
    """The array in the type that a device holds it in, if its numbers fit there."""
    kind = np.dtype(jax.dtypes.canonicalize_dtype(value.dtype))
    if kind == value.dtype or value.dtype.kind not in "iuf" or not value.size:
        return value
    finite = value[np.isfinite(value)]
    limits: Any = np.finfo(kind) if kind.kind == "f" else np.iinfo(kind)
    if finite.size and (finite.min() < limits.min or finite.max() > limits.max):
        raise InputError(
            f"data: {name or 'the batch'} holds {value.dtype} numbers that {kind} cannot hold (from "
            f"{finite.min()} to {finite.max()}); scale them, or set jax_enable_x64"
        )
    return value.astype(kind)


def refuse_nan(name: str, value: np.ndarray, step: int | None) -> None:
    if value.dtype.kind not in "fcV" or value.dtype.names is not None:
        return
    bad = np.isnan(value)
    if bad.any():
        where = "the batch" if step is None else f"the batch of step {step}"
        rows = np.unique(np.argwhere(bad.reshape(-1, *value.shape[2:]) if value.ndim > 1 else bad)[:, 0])[:5]
        raise InputError(
            f"data: {where} holds NaN in {name or 'its array'}, rows {', '.join(map(str, rows))} of this "
            "process; clean the data set (nothing was changed by this batch)"
        )


def on_mesh(
    batch: Any,
    sharding: jax.sharding.Sharding,
    lead: tuple[int, ...],
    whole: tuple[int, ...],
    step: int | None = None,
) -> Any:
    """A process's rows as arrays over the mesh.

    Args:
      lead: what its rows become of the arrays' first dimension.
      whole: the same of the rows of all processes.
      step: for messages.

    Raises:
      InputError: NaN in the data, or numbers that do not fit the device's type.
    """

    def put(path: Any, value: Any) -> jax.Array:
        name = path_name(path)
        # A copy: on a CPU the device array may share the host array's memory.
        value = narrow(name, np.array(value)).reshape(*lead, *np.shape(value)[1:])
        refuse_nan(name, value, step)
        return jax.make_array_from_process_local_data(sharding, value, (*whole, *value.shape[len(lead) :]))

    return jax.tree_util.tree_map_with_path(put, batch)


def warned_if_alike(
    batches: Iterator[Any], are_alike: Callable[[Any], bool], say: Callable[[str], None]
) -> Iterator[Any]:
    """The batches; warns if every process brings the same rows where each should bring its own."""
    first = next(batches, None)
    if first is None:
        return batches
    if are_alike(first):
        say(
            "WARNING: all processes bring the same rows, so each counts several times; give every process "
            "its own (trainer.rows tells which)"
        )
    return itertools.chain([first], batches)

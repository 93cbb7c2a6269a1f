"""Products of two arrays that the compiler cuts over devices although it cannot look into them."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.mesh.layout import axes_of_entry

Product = Callable[..., jax.Array]


@cache
def cut_product(
    product: Product, contracted: int, sources: tuple[ModuleType, ...], **settings: Any
) -> Product:
    """A product that each device makes of its own parts, summed over the axes that cut what is contracted.

    Not for the body of a shard_map: the compiler does not tell names of axes there.

    Args:
      product: ``product(a [*rows, *k], b [*k, *columns], *scalars, **settings) -> [*rows, *columns]``, a sum over k.
      contracted: dimensions of k.
      sources: the modules that it is written in.
    """
    mark = np.int32(_mark(product, contracted, sources, settings))

    def function(a: jax.Array, b: jax.Array, _: jax.Array, *scalars: jax.Array) -> jax.Array:
        return product(a, b, *scalars, **settings)

    def partition(mesh: Any, operands: Any, result: Any) -> Any:
        places = [operand.sharding for operand in operands]
        if not all(isinstance(place, NamedSharding) for place in places):
            raise ValueError(f"a product is cut over a mesh of named axes; got {places}")
        left, right = (_entries(operand) for operand in operands[:2])
        rows, k, columns = _apart(left[: len(left) - contracted], left[-contracted:], right[contracted:])
        axes = tuple(axis for entry in k for axis in axes_of_entry(entry))

        def local(*arrays: jax.Array) -> jax.Array:
            made = function(*arrays)
            return lax.psum(made, axes) if axes else made

        whole = [NamedSharding(mesh, P()) for _ in operands[2:]]
        given = (NamedSharding(mesh, P(*rows, *k)), NamedSharding(mesh, P(*k, *columns)), *whole)
        return mesh, local, NamedSharding(mesh, P(*rows, *columns)), given

    cut = custom_partitioning(function)
    cut.def_partition(partition, sharding_rule=lambda mesh, operands, _: _rule(operands, contracted))
    batched = jax.custom_batching.custom_vmap(lambda *arrays: cut(*arrays))

    @batched.def_vmap
    def several(size: int, over: Any, *arrays: jax.Array) -> tuple[jax.Array, bool]:
        # Of many products at once nobody says how they are cut: the compiler sees what they are made of.
        return jax.vmap(function, [0 if one else None for one in over])(*arrays), True

    return lambda a, b, *scalars: batched(a, b, mark, *scalars)


def _mark(
    product: Product, contracted: int, sources: tuple[ModuleType, ...], settings: dict[str, Any]
) -> int:
    """A number that tells products apart: of this one the program to be compiled says nothing else that lasts.

    Without it a compiled program could be taken from the cache that multiplies otherwise.
    """
    written = [inspect.getsource(module) for module in sources]
    told = repr((product.__qualname__, contracted, sorted(settings.items()), written))
    return int.from_bytes(hashlib.blake2b(told.encode(), digest_size=4).digest(), "little", signed=True)


def _entries(operand: Any) -> list[Any]:
    """What cuts each dimension."""
    spec = operand.sharding.spec
    return [*spec, *[None] * (len(operand.shape) - len(spec))]


def _apart(rows: Any, k: Any, columns: Any) -> list[list[Any]]:
    """The same with each mesh axis in one place: columns keep theirs, then what is contracted, then rows."""
    used: set[str] = set()
    kept = []
    for entries in (columns, k, rows):
        fresh = []
        for entry in entries:
            axes = tuple(axis for axis in axes_of_entry(entry) if axis not in used)
            used.update(axes)
            fresh.append(axes or None)
        kept.append(fresh)
    return kept[::-1]


def _rule(operands: Any, contracted: int) -> Any:
    """Which dimensions belong together, as Shardy wants to be told."""
    a, b, *scalars = (operand.shape for operand in operands)
    rows = [f"r{i}" for i in range(len(a) - contracted)]
    k = [f"k{i}" for i in range(contracted)]
    columns = [f"c{i}" for i in range(len(b) - contracted)]
    given = ", ".join([" ".join(rows + k), " ".join(k + columns), *("" for _ in scalars)])
    return f"{given} -> {' '.join(rows + columns)}", {"reduction_factors": tuple(k)}

"""What differs between jax 0.10.2 and 0.12, and nothing else."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import jax


def shape_like(shape: tuple[int, ...], dtype: Any, *inputs: jax.Array) -> jax.ShapeDtypeStruct:
    """A kernel's output for `pallas_call`, varying over the mesh axes over which any input does (in shard_map)."""
    varying = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in inputs))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.sharding.ManualAxisType(varying=varying))


def vary(tree: Any, like: Any) -> Any:
    """Arrays that vary over all mesh axes over which any of others does; outside of shard_map, as they are."""
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(like)))

    def cast(x: jax.Array) -> jax.Array:
        more = tuple(axes - jax.typeof(x).manual_axis_type.varying)
        return jax.lax.pcast(x, more, to="varying") if more else x

    return jax.tree.map(cast, tree)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Mosaic GPU kernels that are traced within run on whatever device there is, slowly."""
    plgpu = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    if not hasattr(plgpu, "InterpretGPUParams"):
        plgpu = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.params")
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        yield

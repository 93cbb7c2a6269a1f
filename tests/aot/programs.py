"""A program whose collectives, loops and branches are known by hand, and the place of its compiled texts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

FIXTURES = Path(__file__).parent / "fixtures"
SHAPE = {"data": 2, "tensor": 4}
ROWS, WIDTH = 8, 64  # of x on one device; w is [WIDTH, WIDTH / 4] there
OUTER, INNER = 5, 3  # trips of the loops
ARRAY = ROWS * WIDTH * 4  # bytes of x on one device, fp32


def mesh_of(devices: list[Any]) -> Mesh:
    """Two nodes of four: `data` between them, `tensor` inside."""
    return jax.make_mesh((2, 4), ("data", "tensor"), (AxisType.Auto,) * 2, devices=devices[:8])


def known(mesh: Mesh) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    """The function and its abstract arguments.

    Fifteen times an all-gather over tensor, five times an all-reduce over data; a branch that all
    devices take alike with an all-to-all over data, one decided by the place on data with an all-reduce
    over tensor, one decided by what lies in x with an all-reduce over tensor; a permute over tensor, a
    reduce-scatter over tensor, and a loop of unknown length with an all-reduce over both axes.
    """

    def layer(w: jax.Array, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        def inner(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return lax.all_gather(jnp.tanh(x @ w), "tensor", axis=1, tiled=True), None

        x, _ = lax.scan(inner, x, None, length=INNER)
        return lax.psum(x, "data") * 0.25, None

    def exchange(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, "data", split_axis=0, concat_axis=0, tiled=True)

    def add_over_tensor(x: jax.Array) -> jax.Array:
        return x + lax.psum(x * 2, "tensor")

    @partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data"), P(None, "tensor")), out_specs=P("data", "tensor"),
        check_vma=False,
    )  # fmt: skip
    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        x, _ = lax.scan(partial(layer, w), x, None, length=OUTER)
        total = lax.psum(jnp.sum(x), ("data", "tensor"))
        x = lax.cond(total > 0.5, exchange, lambda x: x * 3, x)
        x = lax.cond(lax.axis_index("data") == 1, add_over_tensor, lambda x: x - 1, x)
        x = lax.cond(x[0, 0] > 0, add_over_tensor, lambda x: x + 5, x)
        x = lax.ppermute(x, "tensor", [(i, (i + 1) % 4) for i in range(4)])
        x = lax.while_loop(
            lambda x: lax.pmax(jnp.max(x), ("data", "tensor")) < 100,
            lambda x: x * 2 + lax.psum(x, ("data", "tensor")),
            x,
        )
        return lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True)

    arguments = [
        jax.ShapeDtypeStruct((2 * ROWS, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P("data"))),
        jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P(None, "tensor"))),
    ]
    return jax.jit(body), arguments

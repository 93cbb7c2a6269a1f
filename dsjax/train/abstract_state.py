"""The state before it is made: shapes, types and places of its arrays."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.errors import ConfigError
from dsjax.grad_sync import Exchange, residual_specs
from dsjax.grad_sync.residuals import shapes as residual_shapes
from dsjax.mesh import Layout, named_leaves, path_name
from dsjax.models.adapters import is_adapter
from dsjax.models.variables import Given
from dsjax.train.optimizers import optimizer_shardings
from dsjax.train.state import UNSCALED, Numbers, State, first_state


def abstract_state(
    layout: Layout,
    optimizer: optax.GradientTransformation,
    exchange: Exchange | None,
    params: nnx.State,
    model_state: nnx.State,
    apart: bool = False,
    numbers: Numbers = UNSCALED,
) -> State:
    """The state of abstract parameters and other variables, with the places of all arrays on the mesh.

    Args:
      apart: replicas train apart and each has parameters and an optimizer of its own.
      numbers: what keeps them in range, as far as it has a state.
    """
    mesh = layout.mesh
    replicated, fallback = NamedSharding(mesh, P()), Layout(mesh)
    opt_state = jax.eval_shape(optimizer.init, params)
    residuals = residual_shapes(exchange) if exchange is not None else {}
    replicas = exchange.route.replicas if exchange is not None and apart else None
    shapes = jax.eval_shape(
        partial(first_state, replicas=replicas, numbers=numbers), params, model_state, opt_state, residuals
    )
    places = layout.param_shardings(params)

    def other(shape: tuple[int, ...]) -> NamedSharding:
        return NamedSharding(mesh, fallback.param_spec("", shape))

    def frozen(path: Any, leaf: Any) -> NamedSharding:
        # Frozen parameters lie as trainable ones do; statistics and random streams are small.
        if not isinstance(_variable_at(model_state, path), nnx.Param):
            return replicated
        return NamedSharding(mesh, layout.param_spec(path_name(path), leaf.shape))

    opt_places = optimizer_shardings(opt_state, params, places, other)
    workers = {}
    if replicas is not None:
        opt_places, own = (jax.tree.map(_of_each, tree) for tree in (opt_places, places))
        workers = {"params": own, "momentum": places}
    shardings = replace(
        jax.tree.map(lambda _: replicated, shapes),
        params=places,
        model_state=jax.tree_util.tree_map_with_path(frozen, model_state),
        opt_state=opt_places,
        residuals={
            name: {path: NamedSharding(mesh, spec) for path, spec in part.items()}
            for name, part in residual_specs(exchange).items()
        },
        workers=workers,
    )
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        shapes, shardings,
    )  # fmt: skip


def _of_each(place: NamedSharding) -> NamedSharding:
    """Where an array of which every replica has its own lies."""
    return NamedSharding(place.mesh, P("data", *place.spec))


def declared_axes(model: nnx.Module) -> dict[str, Any]:
    """Logical names that parameters carry themselves, as Flax's partitioning metadata.

    What layers are told (`Given`) is whole on every device.
    """
    declared: dict[str, Any] = {
        "/".join(map(str, path)): (None,) * jax.tree.leaves(variable)[0].ndim
        for path, variable in nnx.state(model, Given).flat_state()
    }
    for path, variable in nnx.state(model, nnx.Param).flat_state():
        metadata = variable.get_metadata()
        for key in ("sharding_names", "out_sharding", "sharding"):
            names = metadata.get(key)
            if isinstance(names, tuple) and all(n is None or isinstance(n, str) for n in names):
                declared["/".join(map(str, path))] = names
    return declared


def trainable_filter(patterns: tuple[str, ...], params: nnx.State, adapted: bool = False) -> Any:
    """Which of a model's variables train: parameters that patterns mean, and adapters; without either all.

    Raises:
      ConfigError: a pattern that means no parameter.
    """
    if not patterns and not adapted:
        return nnx.Param
    paths = list(named_leaves(params))
    idle = [pattern for pattern in patterns if not fnmatch.filter(paths, pattern)]
    if idle:
        raise ConfigError(f"optimizer.trainable: no parameter matches {', '.join(idle)}")

    def matches(path: tuple[Any, ...], value: Any) -> bool:
        name = "/".join(map(str, path))
        return (adapted and is_adapter(name)) or any(fnmatch.fnmatchcase(name, p) for p in patterns)

    return nnx.All(nnx.Param, matches)


def trained_notes(in_order: Callable[[Any], Any], state: State, rank: int) -> list[str]:
    """For people: how many of a model's parameters train, where some are frozen.

    Args:
      in_order: a tree as the pipeline stores it -> one with each layer once.
      rank: of the adapters; 0: there are none.
    """
    frozen = state.model_state.filter(nnx.Param)
    if not jax.tree.leaves(frozen):
        return []
    sizes = [
        sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(in_order, t)))
        for t in (state.params, frozen)
    ]
    adapters = f" (adapters of rank {rank})" if rank else ""
    return [f"trains {sizes[0]:,} of {sum(sizes):,} parameters{adapters}"]


def _variable_at(state: nnx.State, path: tuple[Any, ...]) -> Any:
    node: Any = state
    for entry in path:
        if isinstance(node, nnx.Variable):
            return node
        node = node[getattr(entry, "key", getattr(entry, "idx", entry))]
    return node

"""Residuals of error feedback as state: their shapes, parts of them, and what they are on another mesh.

A residual lies as the exchange needs it: [replicas, axes that cut the parameter..., numbers]. What it means does not
depend on that: `meaning` gives it as numbers of its parameter, from which any other exchange makes its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from dsjax.config.exchange import GradSyncConfig
from dsjax.grad_sync.codecs import make_codec
from dsjax.grad_sync.exchange import Exchange, Residuals, Tensor
from dsjax.grad_sync.route import Route
from dsjax.mesh.layout import axes_of_entry


def shapes(exchange: Exchange) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """The residuals that an exchange keeps, abstract; zeros before the first step."""

    def one(name: str, tensor: Tensor) -> jax.ShapeDtypeStruct:
        cut = (size for _, size in tensor.axes)
        numbers = sum(exchange.kept(name, tensor))
        return jax.ShapeDtypeStruct((exchange.route.replicas, *cut, numbers), jnp.float32)

    coded = {path: tensor for path, tensor in exchange.tensors.items() if tensor.coded}
    return {name: {path: one(name, tensor) for path, tensor in coded.items()} for name in exchange.keeps}


def part(exchange: Exchange, residuals: Residuals, paths: Collection[str], window: int) -> Residuals:
    """The residuals of one window of some tensors."""
    found: Residuals = {}
    for name, held in residuals.items():
        found[name] = {}
        for path in held.keys() & set(paths):
            sizes = exchange.kept(name, exchange.tensors[path])
            start = sum(sizes[:window])
            found[name][path] = held[path][..., start : start + sizes[window]]
    return found


def meaning(exchange: Exchange, name: str, path: str, residual: jax.Array) -> jax.Array:
    """A residual as numbers of its parameter: [groups of near replicas, *shape] ("sent"), or [1, *shape]."""
    tensor, parts = exchange.tensors[path], exchange.route.parts
    pieces, count = exchange.pieces(tensor), exchange.route.outer if name == "sent" else 1
    outer, inner = parts[-1], parts[-2::-1]  # a replica's number, outermost digit first
    residual = residual.reshape(outer, *inner, *(size for _, size in tensor.axes), -1)
    near, cut = len(inner), len(tensor.axes)
    found, start = [], 0
    for rows, piece in zip(tensor.windows, pieces, strict=True):
        x = residual[..., start : start + count * piece]
        start += count * piece
        # Of what a device reduced, numbers lie by the inner digits (innermost first), the owner, the place.
        digits = list(range(near, 0, -1))
        if name == "sent":
            x = x.reshape(*x.shape[:-1], count, piece)
            x = jnp.transpose(
                x, [0, *range(near + 1, near + 1 + cut), *digits, near + cut + 1, near + cut + 2]
            )
        else:
            x = jnp.transpose(x, [*range(near + 1, near + 1 + cut), *digits, 0, near + cut + 1])[None]
        local = (rows, *tensor.local[1:]) if tensor.shape else ()
        x = x.reshape(*x.shape[: 1 + cut], -1)[..., : math.prod(local)]
        found.append(x.reshape(*x.shape[:-1], *local))
    x = jnp.concatenate(found, axis=1 + cut) if len(found) > 1 else found[0]
    return jnp.transpose(x, _interleaved(tensor)).reshape(-1, *tensor.shape)


def _interleaved(tensor: Tensor) -> list[int]:
    """The order of [group, axes..., local dimensions...] in which each axis stands before the dimension it cuts."""
    order, axis = [0], 1
    sizes = dict(tensor.axes)
    entries = (*tensor.spec, *(None,) * (len(tensor.shape) - len(tensor.spec)))
    for dimension, entry in enumerate(entries):
        for name in axes_of_entry(entry):
            if name in sizes:
                order.append(axis)
                axis += 1
        order.append(1 + len(tensor.axes) + dimension)
    return order


def laid(exchange: Exchange, name: str, path: str, numbers: jax.Array) -> jax.Array:
    """The opposite of `meaning`, for as many groups as there are (see `regrouped`)."""
    tensor, parts = exchange.tensors[path], exchange.route.parts
    pieces, count = exchange.pieces(tensor), exchange.route.outer if name == "sent" else 1
    outer, inner = parts[-1], parts[-2::-1]
    near, cut = len(inner), len(tensor.axes)
    order = _interleaved(tensor)
    extents = [0, *(size for _, size in tensor.axes), *tensor.local]
    x = numbers.reshape(-1, *(extents[i] for i in order[1:]))
    x = jnp.transpose(x, np.argsort(order).tolist())
    made, row = [], 0
    for rows, piece in zip(tensor.windows, pieces, strict=True):
        part = jax.lax.slice_in_dim(x, row, row + rows, axis=1 + cut) if tensor.shape else x
        row += rows
        part = part.reshape(*part.shape[: 1 + cut], -1)
        whole = piece * exchange.route.replicas
        part = jnp.pad(part, [(0, 0)] * (1 + cut) + [(0, whole - part.shape[-1])])
        part = part.reshape(*part.shape[:-1], *inner[::-1], outer, piece)
        digits = [1 + cut + near - 1 - i for i in range(near)]  # outermost of the inner ones first
        if name == "sent":
            part = jnp.transpose(part, [0, *digits, *range(1, 1 + cut), 1 + cut + near, 2 + cut + near])
        else:
            part = jnp.transpose(part[0], [cut + near, *(d - 1 for d in digits), *range(cut), cut + near + 1])
        made.append(part.reshape(exchange.route.replicas, *(s for _, s in tensor.axes), count * piece))
    return jnp.concatenate(made, axis=-1)


def regrouped(numbers: jax.Array, groups: int) -> jax.Array:
    """Residuals of another number of groups: each has an equal share, so that what is owed stays the same."""
    if numbers.shape[0] == groups:
        return numbers
    return jnp.broadcast_to(jnp.sum(numbers, axis=0, keepdims=True) / groups, (groups, *numbers.shape[1:]))


def facts_of(exchange: Exchange | None) -> dict[str, Any] | None:
    """What a checkpoint says of how its residuals lie, as JSON; None where it has none."""
    if exchange is None or not exchange.keeps:
        return None
    return {
        "settings": exchange.settings.model_dump(mode="json", exclude={"topology"}),
        "parts": list(exchange.route.parts),
        "tensors": {
            path: {
                "shape": list(t.shape),
                "spec": [list(axes_of_entry(entry)) for entry in t.spec],
                "axes": [list(axis) for axis in t.axes],
                "windows": list(t.windows),
            }
            for path, t in exchange.tensors.items()
            if t.coded
        },
    }


def exchange_of(facts: Mapping[str, Any]) -> Exchange:
    """The exchange that residuals were made by."""
    settings = GradSyncConfig(**facts["settings"])
    tensors = {
        path: Tensor(
            tuple(t["shape"]),
            P(*(tuple(entry) or None for entry in t["spec"])),
            tuple((name, size) for name, size in t["axes"]),
            tuple(t["windows"]),
            True,
        )
        for path, t in facts["tensors"].items()
    }
    return Exchange(Route("", tuple(facts["parts"])), make_codec(settings), tensors, settings)

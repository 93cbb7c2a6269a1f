"""Optimizers and learning-rate schedules, by name, on optax."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dsjax.config.schema import OptimizerConfig, ScheduleConfig
from dsjax.mesh import is_matrix, map_named, named_leaves
from dsjax.precision.small_state import small_state

Schedule = Callable[[Any], Any]


def make_schedule(config: ScheduleConfig, peak: float, steps: int) -> Schedule:
    """Learning rate by number of updates made so far.

    Update u (from 0) of the warm-up has ``peak * (u + 1) / warmup_steps``: the first is not wasted
    on a rate of 0, and update `warmup_steps - 1` is the first at the peak.  cosine:
    Loshchilov & Hutter 2016 without restarts; wsd (warm-up, stable, decay): Hu et al. 2024, with a
    linear decay.
    """
    warmup, floor = config.warmup_steps, peak * config.min_lr_ratio

    def warm(update: jax.Array) -> jax.Array:
        return peak * (update + 1) / warmup

    def body(update: jax.Array) -> jax.Array:
        if config.kind == "constant":
            return jnp.full_like(update, peak, dtype=jnp.float32)
        if config.kind == "wsd":
            decay = config.decay_steps or max(1, steps // 10)
            done = (update - (steps - decay)) / decay
        else:
            decay = config.decay_steps or max(1, steps - warmup)
            done = (update - warmup) / decay
        done = jnp.clip(done, 0.0, 1.0)
        shape = 0.5 * (1 + jnp.cos(math.pi * done)) if config.kind == "cosine" else 1.0 - done
        return floor + (peak - floor) * shape

    def schedule(update: Any) -> jax.Array:
        update = jnp.asarray(update, jnp.float32)
        value = body(update)
        if warmup:
            value = jnp.where(update < warmup, warm(update), value)
        return value.astype(jnp.float32)

    return schedule


def make_optimizer(
    config: OptimizerConfig, learning_rate: float | Schedule, names_of: Callable[[str], Any]
) -> optax.GradientTransformation:
    """The optimizer that a config names; clipping is the step's own, not the optimizer's.

    Args:
      config: kind and its constants.
      learning_rate: a number or a schedule over the number of updates.
      names_of: path of a parameter -> logical names of its dimensions, or None. Weight decay (and
        muon's orthogonalisation) acts on matrices only, which stacked vectors are not.
    """

    made = _by_kind(config, learning_rate, names_of)
    return made if config.state_dtype == "float32" else small_state(made, config.state_dtype)


def _by_kind(
    config: OptimizerConfig, learning_rate: float | Schedule, names_of: Callable[[str], Any]
) -> optax.GradientTransformation:
    def matrices(params: Any) -> Any:
        return map_named(lambda path, leaf: is_matrix(names_of(path), leaf.ndim), params)

    decay, b1, b2 = config.weight_decay, config.beta1, config.beta2
    if config.kind == "adamw":
        return optax.adamw(learning_rate, b1, b2, config.eps, weight_decay=decay, mask=matrices)
    if config.kind == "lion":
        return optax.lion(learning_rate, b1, b2, weight_decay=decay, mask=matrices)
    if config.kind == "adafactor":
        # optax.adafactor adds its decay after the learning rate; here it is decoupled as in the others.
        return optax.chain(
            optax.scale_by_factored_rms(decay_rate=0.8, min_dim_size_to_factor=128),
            optax.clip_by_block_rms(1.0),
            optax.add_decayed_weights(decay, matrices),
            optax.scale_by_learning_rate(learning_rate),
        )
    if config.kind == "sgd":
        return optax.chain(
            optax.trace(b1) if b1 else optax.identity(),
            optax.add_decayed_weights(decay, matrices),
            optax.scale_by_learning_rate(learning_rate),
        )
    return _muon(config, learning_rate, names_of)


def _muon(
    config: OptimizerConfig, learning_rate: float | Schedule, names_of: Callable[[str], Any]
) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) on hidden matrices, AdamW on the rest (embedding, head, vectors).

    `consistent_rms` 0.2 lets both share one learning rate and decay (Liu et al. 2025).
    """

    def hidden(path: str, leaf: Any) -> bool:
        names = names_of(path)
        return is_matrix(names, leaf.ndim) and "vocab" not in (names or ())

    def dimensions(params: Any) -> Any:
        return map_named(lambda path, leaf: _muon_dimensions(names_of(path), leaf.ndim), params)

    def matrices(params: Any) -> Any:
        return map_named(lambda path, leaf: is_matrix(names_of(path), leaf.ndim), params)

    b1, b2, decay = config.beta1, config.beta2, config.weight_decay
    return optax.partition(
        {
            "muon": optax.contrib.muon(
                learning_rate,
                beta=b1,
                eps=config.eps,
                weight_decay=decay,
                muon_weight_dimension_numbers=dimensions,
                consistent_rms=0.2,
            ),
            "adamw": optax.adamw(learning_rate, b1, b2, config.eps, weight_decay=decay, mask=matrices),
        },
        lambda params: map_named(lambda p, leaf: "muon" if hidden(p, leaf) else "adamw", params),
    )


def _muon_dimensions(names: Sequence[str | None] | None, ndim: int) -> Any:
    """Which dimensions are rows and which are columns of the matrix; others are batch (layers)."""
    numbers = optax.contrib.MuonDimensionNumbers
    if names is None or len(names) != ndim:
        return numbers((ndim - 2,), (ndim - 1,))
    # An adapter's matrices have their rank on one side.
    side = "rank" if "rank" in names else "embed"
    embed = tuple(i for i, name in enumerate(names) if name == side)
    rest = tuple(i for i, name in enumerate(names) if name not in (side, "layers", "expert"))
    if not embed or not rest:
        return numbers((ndim - 2,), (ndim - 1,))
    return numbers(embed, rest) if embed < rest else numbers(rest, embed)


def _of_blocks(shape: tuple[int, ...], owner: tuple[int, ...], place: Any) -> bool:
    """Whether an array has a number for each block of the last dimension, and can be cut as its parameter is."""
    if len(shape) != len(owner) or shape[:-1] != owner[:-1] or owner[-1] % shape[-1]:
        return False
    cuts = place.spec[-1] if len(place.spec) == len(owner) else None
    names = (cuts,) if isinstance(cuts, str) else (cuts or ())
    return shape[-1] % math.prod(place.mesh.shape[name] for name in names) == 0


def optimizer_shardings(opt_state: Any, params: Any, shardings: Any, other: Callable[[Any], Any]) -> Any:
    """Shardings of an (abstract) optimizer state: a moment lies where its parameter lies.

    A moment is known by its name, which ends with its parameter's: true of every optax state that
    maps over the parameters, however deep in chains, masks and partitions.

    Args:
      shardings: the parameters' shardings.
      other: shape -> sharding for leaves shaped unlike their parameter (factored moments, counts).
    """
    places = named_leaves(shardings)
    shapes = {name: leaf.shape for name, leaf in named_leaves(params).items()}

    def place(name: str, leaf: Any) -> Any:
        parts = name.split("/")
        owner = next((end for i in range(len(parts)) if (end := "/".join(parts[i:])) in shapes), None)
        if owner and (shapes[owner] == leaf.shape or _of_blocks(leaf.shape, shapes[owner], places[owner])):
            return places[owner]
        return other(leaf.shape)

    return map_named(place, opt_state)

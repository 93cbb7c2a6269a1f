"""Losses: each returns sums and weights, which are added over everything and divided once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from dsjax.errors import ConfigError
from dsjax.mesh import constrain, current_layout, zigzag_order
from dsjax.models.cross_entropy import linear_cross_entropy
from dsjax.models.decoder import Decoder
from dsjax.models.spec import Stages, Tally, Trunk
from dsjax.models.stack import run_stacked
from dsjax.train.randomness import sequence_positions

# Names of a line of metrics.jsonl.
RESERVED = {
    "step", "loss", "tokens", "tokens_seen", "grad_norm", "learning_rate", "loss_scale", "overflows", "step_seconds",
    "tokens_per_second", "tokens_per_second_per_device", "input_wait_seconds", "mfu", "peak_memory_bytes",
    "time", "eval", "perplexity",
}  # fmt: skip
Extras = dict[str, tuple[jax.Array, jax.Array]]


def language_model_loss(chunk: int) -> Callable[[Any, Mapping[str, jax.Array]], Any]:
    """Next-token cross-entropy, summed, with the weight of the tokens that count.

    Args:
      chunk: tokens of each device whose logits exist at a time.

    Returns:
      ``loss(model, batch) -> (sum, weight)``, or with extras where the layers of a `Decoder` add to the loss, for
      batches of int32 [B, S] `tokens`, `targets`,
      `positions`, `segment_ids` (0: padding) and float32 [B, S] `weights`.
    """

    def loss(model: Any, batch: Mapping[str, jax.Array]) -> Any:
        ours = isinstance(model, Decoder)
        batch, order, zigzag = _in_order(batch, model.frame.trunk.ahead if ours else 0)
        where = {"positions_bs": batch["positions"], "segment_ids_bs": batch["segment_ids"], "zigzag": zigzag}
        with sequence_positions(order):
            if not ours:
                return _of_hidden(model, model.hidden(batch["tokens"], **where), batch, chunk)
            hidden, added, extras = model.outputs(batch["tokens"], **where)
            given = model.frame.where(*where.values())
            total, weight, *more = _of_hidden(model, hidden, batch, chunk, given)
        extras = merged(extras, *more)
        return (total if added is None else total + added, weight, *([extras] if extras else []))

    return loss


def language_model_stages(trunk: Trunk, chunk: int, remat: str = "none") -> Stages:
    """`language_model_loss` of a model whose layers are shared out over a pipeline."""

    def prepare(batch: Mapping[str, jax.Array]) -> dict[str, Any]:
        batch, order, zigzag = _in_order(batch, trunk.ahead)
        return {
            **batch,
            "order": order,
            "where": trunk.where(batch["positions"], batch["segment_ids"], zigzag),
        }

    def embed(model: Any, batch: Mapping[str, Any]) -> Any:
        with sequence_positions(batch["order"]):
            return trunk.embed(model, batch["tokens"], batch["where"])

    def layer(layer: Any, x: Any, batch: Mapping[str, Any]) -> Any:
        with sequence_positions(batch["order"]):
            return trunk.layer(layer, x, batch["where"])

    def head(model: Any, x: Any, batch: Mapping[str, Any]) -> Any:
        with sequence_positions(batch["order"]):
            return _of_hidden(model, trunk.norm(model, x), batch, chunk, batch["where"])

    return Stages(
        embed=embed,
        layer=layer,
        head=head,
        prepare=prepare,
        remat=remat,
        gathers=True,
    )


def _in_order(
    batch: Mapping[str, jax.Array], ahead: int = 0
) -> tuple[dict[str, jax.Array], np.ndarray, bool]:
    """The batch as the devices along `context` share it, each slot's place in the sequence, and whether zigzag.

    Args:
      ahead: further tokens to be predicted: `ahead_targets` and `ahead_weights` [b, s, 1 + ahead], those of the next
        token first.
    """
    if ahead:
        batch = {**batch, **_further(batch, ahead)}
    layout = current_layout()
    ranks = layout.axis_size("context") if layout is not None else 1
    length = batch["tokens"].shape[1]
    order = zigzag_order(length, ranks) if ranks > 1 else np.arange(length, dtype=np.int32)
    if ranks > 1:
        # Token numbers are small; putting them in order here keeps the loader free of the mesh.
        batch = {name: value[:, order] for name, value in batch.items()}
    placed = {n: constrain(v, "batch", "sequence", *(None,) * (v.ndim - 2)) for n, v in batch.items()}
    return placed, order, ranks > 1


def _further(batch: Mapping[str, jax.Array], ahead: int) -> dict[str, jax.Array]:
    """Targets further ahead, and their weights: 0 where that token is of another document."""
    segments = batch["segment_ids"]
    same = jnp.pad(segments[:, 1:] == segments[:, :-1], ((0, 0), (0, 1)))
    targets, weights = [batch["targets"]], [batch["weights"]]
    for _ in range(ahead):
        targets.append(jnp.pad(targets[-1][:, 1:], ((0, 0), (0, 1))))
        weights.append(jnp.pad(weights[-1][:, 1:], ((0, 0), (0, 1))) * same)
    return {"ahead_targets": jnp.stack(targets, -1), "ahead_weights": jnp.stack(weights, -1)}


def _of_hidden(
    model: Any, hidden: Any, batch: Mapping[str, Any], chunk: int, where: Any = None
) -> tuple[Any, ...]:
    """(sum, weight) of the next token, and in training of those further ahead: (sum, weight, extras).

    The mean of those is over the tokens of the main loss, as in the paper, so one division serves both.
    """

    def summed(hidden: Any, targets: jax.Array, weights: jax.Array) -> jax.Array:
        return linear_cross_entropy(
            hidden, model.unembedding(), targets, weights, vocab_size=model.vocab_size,
            dtype=model.head_dtype or hidden.dtype, chunk=chunk, cap=getattr(model, "logit_cap", None),
        )  # fmt: skip

    total, weight = summed(hidden, batch["targets"], batch["weights"]), jnp.sum(batch["weights"])
    if "ahead_targets" not in batch or model.deterministic:
        return total, weight
    targets, weights, ahead = batch["ahead_targets"], batch["ahead_weights"], model.frame.ahead
    states, added, extras = model.further(hidden, targets[..., :-1], where)
    further = sum(summed(states[k], targets[..., k + 1], weights[..., k + 1]) for k in range(ahead.count))
    extras = {**extras, "ahead_loss": (further, jnp.sum(weights[..., 1:]))}
    return total + added + ahead.weight / ahead.count * further, weight, extras


def loss_of_stages(stages: Stages) -> Callable[[Any, Any], tuple[jax.Array, jax.Array, Extras]]:
    """The loss of a model that is declared in stages, run as one."""

    def loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array, Extras]:
        batch = stages.prepare(batch)
        x = stages.embed(model, batch)
        x, added, extras = through_layers(stages, stack_of(model, stages), x, batch)
        total, weight, more = normalised(stages.head(model, x, batch))
        return total + added, weight, merged(extras, more)

    return loss


def through_layers(
    stages: Stages, module: Any, x: Any, batch: Any, source: tuple[Any, int] | None = None
) -> tuple[Any, jax.Array, Extras]:
    """(x, what the layers add to the loss, extras) after a stack of layers.

    Args:
      batch: as `stages.prepare` returns it.
      source: as `run_stacked` takes it.
    """

    def call(layer: Any, carry: Any) -> Any:
        y, more, named = layer_result(stages.layer(layer, carry[0], batch))
        return y, carry[1] + more, jax.tree.map(jnp.add, carry[2], named)

    graph, variables = nnx.split(module)

    def first(variables: Any, x: Any) -> Extras:
        one = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], variables), copy=True)
        return layer_result(stages.layer(one, x, batch))[2]

    named = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(first, variables, x))
    start = (x, jnp.zeros(()), named)
    return run_stacked(module, start, call, prefix=stages.layers, remat=stages.remat, source=source)


def split_stack(stages: Stages, state: nnx.State) -> tuple[nnx.State, nnx.State]:
    """A model's state as (the stack's own variables, the rest)."""
    names = tuple(stages.layers.split("/"))
    stacked, rest = nnx.split_state(state, lambda path, _: tuple(map(str, path[: len(names)])) == names, ...)  # type: ignore[misc]
    for name in names:
        stacked = stacked[name] if name in stacked else nnx.State({})
    return stacked, rest


def whole_stack(stages: Stages, stacked: nnx.State, rest: nnx.State) -> nnx.State:
    """The opposite of `split_stack`."""
    for name in reversed(stages.layers.split("/")):
        stacked = nnx.State({name: stacked})
    return nnx.merge_state(stacked, rest)


def stack_of(model: Any, stages: Stages) -> Any:
    """The module of a model's stacked layers.

    Raises:
      ConfigError: there is none at the path that the stages name.
    """
    module = model
    for name in stages.layers.split("/"):
        module = getattr(module, name, None)
        if module is None:
            raise ConfigError(
                f"stages.layers: {type(model).__name__} has no {stages.layers}; name the attribute that holds the "
                "layers made with dsjax.stacked"
            )
    return module


def layer_result(result: Any) -> tuple[Any, jax.Array, Extras]:
    """What a layer returned as (x, what it adds to the loss, extras).

    Raises:
      ConfigError: it returned something else.
    """
    if not isinstance(result, tuple):
        return result, jnp.zeros(()), {}
    if len(result) not in (2, 3) or [jnp.shape(leaf) for leaf in jax.tree.leaves(result[1])] != [()]:
        raise ConfigError(
            "stages.layer: returns x, (x, loss) or (x, loss, extras) with a scalar for the loss, got "
            f"{_kind(result)}; several arrays that pass from layer to layer go into a dictionary"
        )
    _, _, extras = normalised((result[1], jnp.zeros(()), *result[2:]))
    return result[0], jnp.asarray(result[1], jnp.float32), extras


def merged(first: Extras, second: Extras | None = None) -> Extras:
    """Extras of two parts of a model together; those of one name are added."""
    second = second or {}
    both = {name: jax.tree.map(jnp.add, first[name], second[name]) for name in first.keys() & second.keys()}
    return {**first, **second, **both}


def normalised(result: Any) -> tuple[jax.Array, jax.Array, Extras]:
    """A loss function's result as (sum, weight, extras), in fp32.

    Raises:
      ConfigError: the loss returned something else than (sum, weight) or (sum, weight, extras).
    """
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise ConfigError(
            "a loss returns (sum of losses, weight) or (sum, weight, {name: (sum, weight)}), "
            f"got {_kind(result)}: return the sum over examples and their number, not a mean"
        )
    extras = dict(result[2]) if len(result) == 3 else {}
    taken = sorted(RESERVED & set(extras))
    if taken:
        raise ConfigError(f"the loss's metrics {', '.join(taken)}: these names are taken; choose others")
    for name, value in [("the loss", result[:2]), *extras.items()]:
        if not isinstance(value, tuple) or len(value) != 2:
            raise ConfigError(f"{name}: takes (sum, weight), got {_kind(value)}")
        for part in value[1:] if isinstance(value, Tally) else value:
            if jnp.shape(part) != ():
                raise ConfigError(f"{name}: sum and weight are scalars, got shape {jnp.shape(part)}")

    def scalar(value: Any) -> jax.Array:
        return jnp.asarray(value, jnp.float32)

    return (
        scalar(result[0]),
        scalar(result[1]),
        {name: jax.tree.map(scalar, value) for name, value in extras.items()},
    )


def _kind(value: Any) -> str:
    if isinstance(value, jax.Array):
        return f"one array of shape {value.shape}"
    return f"{len(value)} values" if isinstance(value, tuple) else type(value).__name__


def logits_loss(model: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Next-token cross-entropy of a model that maps tokens [B, S] to logits [B, S, V]; summed."""
    logits = model(batch["tokens"]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])

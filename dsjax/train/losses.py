"""Losses: each returns sums and weights, which are added over everything and divided once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dsjax.errors import ConfigError
from dsjax.mesh import constrain, current_layout, zigzag_order
from dsjax.models.cross_entropy import linear_cross_entropy
from dsjax.train.randomness import sequence_positions

# Names of a line of metrics.jsonl.
RESERVED = {
    "step", "loss", "tokens", "tokens_seen", "grad_norm", "learning_rate", "loss_scale", "step_seconds",
    "tokens_per_second", "tokens_per_second_per_device", "input_wait_seconds", "mfu", "peak_memory_bytes",
    "time", "eval", "perplexity",
}  # fmt: skip
Extras = dict[str, tuple[jax.Array, jax.Array]]


def language_model_loss(chunk: int) -> Callable[[Any, Mapping[str, jax.Array]], tuple[jax.Array, jax.Array]]:
    """Next-token cross-entropy, summed, with the weight of the tokens that count.

    Args:
      chunk: tokens of each device whose logits exist at a time.

    Returns:
      ``loss(model, batch) -> (sum, weight)`` for batches of int32 [B, S] `tokens`, `targets`,
      `positions`, `segment_ids` (0: padding) and float32 [B, S] `weights`.
    """

    def loss(model: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        layout = current_layout()
        ranks = layout.axis_size("context") if layout is not None else 1
        length = batch["tokens"].shape[1]
        order = zigzag_order(length, ranks) if ranks > 1 else np.arange(length, dtype=np.int32)
        if ranks > 1:
            # Token numbers are small; putting them in order here keeps the loader free of the mesh.
            batch = {name: value[:, order] for name, value in batch.items()}
        batch = {name: constrain(value, "batch", "sequence") for name, value in batch.items()}
        with sequence_positions(order):
            hidden = model.hidden(
                batch["tokens"],
                positions_bs=batch["positions"],
                segment_ids_bs=batch["segment_ids"],
                zigzag=ranks > 1,
            )
        total = linear_cross_entropy(
            hidden,
            model.unembedding(),
            batch["targets"],
            batch["weights"],
            vocab_size=model.vocab_size,
            dtype=hidden.dtype,
            chunk=chunk,
        )
        return total, jnp.sum(batch["weights"])

    return loss


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
        for part in value:
            if jnp.shape(part) != ():
                raise ConfigError(f"{name}: sum and weight are scalars, got shape {jnp.shape(part)}")

    def scalar(value: Any) -> jax.Array:
        return jnp.asarray(value, jnp.float32)

    return (
        scalar(result[0]),
        scalar(result[1]),
        {name: (scalar(s), scalar(w)) for name, (s, w) in extras.items()},
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

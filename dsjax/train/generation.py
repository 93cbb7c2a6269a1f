"""Sampling from a model, plainly: the whole sequence is computed again for every token.

One program of one length is compiled for a call; a causal model does not see what lies past the
last token, so the unused end of the buffer does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.errors import ConfigError
from dsjax.mesh import BATCH_AXES, batch_shards, make_mesh, use_layout
from dsjax.train.program import Program
from dsjax.train.state import State

# Lengths are rounded up to this, so that prompts of about the same length share a program.
_LENGTH_STEP = 64


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the model's logits.

    Attributes:
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: draw from the k likeliest; 0: from all.
      top_p: draw from the fewest likeliest tokens that together have at least this probability
        (Holtzman et al. 2020).
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0


def draw(logits: jax.Array, key: jax.Array, how: Sampling) -> jax.Array:
    """A token [] for float32 logits [V]."""
    if how.temperature == 0:
        return jnp.argmax(logits)
    logits = logits / how.temperature
    if how.top_k:
        kth = jax.lax.top_k(logits, min(how.top_k, logits.shape[-1]))[0][-1]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    if how.top_p < 1:
        ordered = jnp.sort(logits, descending=True)
        shares = jax.nn.softmax(ordered)
        # A token stays while the tokens before it have less than top_p; the likeliest always does.
        kept = (jnp.cumsum(shares) - shares) < how.top_p
        kept = kept.at[0].set(True)
        logits = jnp.where(logits < jnp.min(jnp.where(kept, ordered, jnp.inf)), -jnp.inf, logits)
    return jax.random.categorical(key, logits)


def next_logits(model: Any, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """Float32 logits [V] of the token after the first `length` tokens of the first row of [B, S]."""
    if not hasattr(model, "hidden"):
        return model(tokens)[0, length - 1].astype(jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden = model.hidden(tokens, positions_bs=positions, segment_ids_bs=jnp.ones_like(tokens))
    last = hidden[0, length - 1].astype(jnp.float32)
    logits = (last @ model.unembedding().astype(jnp.float32))[: model.vocab_size]
    cap = getattr(model, "logit_cap", None)
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def without_stages(program: Program, state: State) -> tuple[Program, State]:
    """The program and state of a pipeline as those of one stage: its devices hold shards of all layers instead.

    A token at a time would leave all stages but one idle. What trains no longer matters here, so the
    optimizer's state stays where it is.
    """
    if program.stacking is None:
        return program, state
    sizes = dict(program.mesh.shape)
    stages = sizes.pop("pipeline")
    devices = list(program.mesh.devices.flat)
    try:
        flat = replace(program, mesh=make_mesh({**sizes, "fsdp": sizes["fsdp"] * stages}, devices))
    except ConfigError:
        flat = replace(program, mesh=make_mesh({**sizes, "data": sizes["data"] * stages}, devices))
    places = flat.state_shardings
    move = jax.jit(program.in_order, out_shardings=(places.params, places.model_state))
    params, model_state = move((state.params, state.model_state))
    return flat, replace(state, params=params, model_state=model_state)


def tokens_after(
    program: Program,
    state: State,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    end: int | None = None,
) -> Iterator[int]:
    """Draws up to `max_tokens` tokens after a prompt, one at a time; stops before the token `end`.

    Args:
      prompt: token ids, at least one.
    """
    program, state = without_stages(program, state)
    multiple = _LENGTH_STEP * 2 * program.mesh.shape["context"]
    size = -(-(len(prompt) + max_tokens) // multiple) * multiple
    one = _compiled(program, sampling)
    buffer = np.zeros((batch_shards(program.mesh), size), np.int32)
    buffer[:, : len(prompt)] = prompt
    sharding = NamedSharding(program.mesh, P(BATCH_AXES))
    tokens: jax.Array = jax.make_array_from_callback(
        buffer.shape, sharding, lambda index: buffer[index].copy()
    )
    key = jax.random.key(seed)
    for length in range(len(prompt), len(prompt) + max_tokens):
        token, tokens = one(state.params, state.model_state, tokens, np.int32(length), key)
        number = int(token)
        if number == end:
            return
        yield number


def _compiled(program: Program, sampling: Sampling) -> Callable[..., tuple[jax.Array, jax.Array]]:
    def one(params: Any, model_state: Any, tokens: jax.Array, length: Any, key: jax.Array) -> Any:
        with use_layout(program.layout):
            model = nnx.merge(program.parts.graph, params, model_state, copy=True)
            model.eval()
            # Latent attention makes no keys and values of heads then: more arithmetic, less memory.
            model.set_attributes(absorbed=True, raise_if_not_found=False)
            logits = next_logits(model, tokens, length)
        token = draw(logits, jax.random.fold_in(key, length), sampling).astype(jnp.int32)
        return token, tokens.at[:, length].set(token, mode="drop")

    sharding = NamedSharding(program.mesh, P(BATCH_AXES))
    return jax.jit(one, donate_argnums=2, out_shardings=(program.replicated, sharding))

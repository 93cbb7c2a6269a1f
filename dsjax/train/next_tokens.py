"""The next tokens of some rows, in two ways: with caches of attention, and from the whole sequence.

Letters of shapes: b rows, s tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.backend.compiling import JittedAround
from dsjax.mesh import BATCH_AXES, batch_shards, constrain, use_layout
from dsjax.models import Decoder
from dsjax.models.decoding import attach, cache_shapes, written
from dsjax.models.moe import Mixture
from dsjax.precision import without_fp8
from dsjax.train.program import Program
from dsjax.train.sampling import Sampling, draw_rows

# Tokens of a prompt that go in at a time.
_CHUNK = 128
# Lengths are rounded up to a multiple of this at least, so that prompts of about the same length share a program.
_LENGTH_STEP = 64


@dataclass(frozen=True)
class Prompt:
    """What is to be gone on from.

    Attributes:
      ids: its tokens, at least one.
      room: tokens to add at most, at least one.
      names: numbers that tell its draws from all others': seed, prompt, sample.
    """

    ids: Sequence[int]
    room: int
    names: tuple[int, int, int] = (0, 0, 0)


class Way(Protocol):
    """How the next tokens of some rows come about; weights are parameters and other variables of the model."""

    def begin(self, weights: Any, prompts: Sequence[Prompt], rows: int) -> Any:
        """What the way carries along of the prompts, in so many rows."""

    def step(self, weights: Any, carry: Any) -> tuple[Any, jax.Array]:
        """The carry after it, and a token of each row, int32 [b] on every device; the one before is donated."""


class _Rows:
    """What both ways do with rows: onto the mesh, and their next tokens from logits."""

    def __init__(self, program: Program, sampling: Sampling, ends: Sequence[int]):
        self.program, self._sampling, self._ends = program, sampling, ends
        self.place = NamedSharding(program.mesh, P(BATCH_AXES))

    def put(self, array: np.ndarray) -> jax.Array:
        """[b, ...] over the mesh, from the same array on each process."""
        return jax.make_array_from_callback(array.shape, self.place, lambda index: array[index].copy())

    def begun(self, prompts: Sequence[Prompt], rows: int) -> dict[str, jax.Array]:
        """Of each row: the place of its next token, how many it has left (rows without a prompt: none), its names."""
        filler = [Prompt([0], 0)] * (rows - len(prompts))
        every = [*prompts, *filler]
        return {
            "places": self.put(np.array([len(p.ids) for p in every], np.int32)),
            "left": self.put(np.array([p.room for p in every], np.int32)),
            "names": self.put(np.array([p.names for p in every], np.uint32)),
        }

    def drawn(self, logits_bv: jax.Array, rows: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, Any]:
        """(tokens, whether a row still draws any, the rows after it); int32 [b], bool [b]."""
        logits_bv = constrain(logits_bv, "batch", None)
        tokens = draw_rows(logits_bv, rows["places"], rows["names"], self._sampling)
        active = rows["left"] > 0
        over = jnp.zeros_like(active)
        for end in self._ends:
            over |= tokens == end
        left = jnp.where(active & ~over, rows["left"] - 1, 0)
        return tokens, active, {**rows, "places": rows["places"] + active, "left": left}

    def jit(self, function: Any, out_shardings: Any, *donated: int) -> Any:
        """`function` traced under the program's layout and compiled with its options."""

        def under(*args: Any) -> Any:
            with use_layout(self.program.layout):
                return function(*args)

        options = self.program.compiler_options
        return JittedAround(under, options, out_shardings=out_shardings, donate_argnums=donated)


class Cached(_Rows):
    """With caches of attention: a token is one pass over one token."""

    def __init__(self, program: Program, model: Decoder, sampling: Sampling, ends: Sequence[int]):
        super().__init__(program, sampling, ends)
        self._abstract = model
        shapes = cache_shapes(model, batch_shards(program.mesh), 1, program.layout)
        caches = jax.tree.map(lambda leaf: leaf.sharding, shapes)
        self._prefill = self.jit(self._chunk, (caches, self.place), 1, 2)
        kept = {"caches": caches, "logits": self.place, "rows": self.place, "frequencies": self.place}
        self._next = self.jit(self._one, (kept, program.replicated), 1)

    def begin(self, weights: Any, prompts: Sequence[Prompt], rows: int) -> Any:
        """All prompts, chunk by chunk; the logits after the last token of each."""
        longest = max(len(p.ids) for p in prompts)
        chunk = min(_CHUNK, _power_of_two(longest))
        size = -(-longest // chunk) * chunk
        places = bucket(max(size, *(len(p.ids) + p.room for p in prompts)))
        tokens = np.zeros((rows, size), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt.ids)] = prompt.ids
        lengths = [len(p.ids) for p in prompts] + [0] * (rows - len(prompts))
        frequencies = self._frequencies(prompts, rows)
        shapes = cache_shapes(self._abstract, rows, places, self.program.layout)
        caches = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), shapes)
        logits = self.put(np.zeros((rows, self._abstract.vocab_size), np.float32))
        on_mesh = self.put(np.array(lengths, np.int32))
        for start in range(0, size, chunk):
            part = self.put(tokens[:, start : start + chunk])
            caches, logits = self._prefill(
                weights, caches, logits, part, on_mesh, np.int32(start), frequencies
            )  # fmt: skip
        begun = self.begun(prompts, rows)
        return {"caches": caches, "logits": logits, "rows": begun, "frequencies": frequencies}

    def step(self, weights: Any, carry: Any) -> tuple[Any, jax.Array]:
        """See `Way`."""
        return self._next(weights, carry)

    def _frequencies(self, prompts: Sequence[Prompt], rows: int) -> tuple[jax.Array, ...]:
        """Of each kind of rotary positions, [b, head_dim / 2], for as long as a row may become."""
        lengths = [len(p.ids) + p.room for p in prompts]
        lengths += [1] * (rows - len(lengths))
        return tuple(
            self.put(np.stack([rotary.frequencies(length)[0] for length in lengths]))
            for rotary in self._abstract.frame.rotary
        )

    def _chunk(
        self,
        weights: Any,
        caches: Any,
        logits: Any,
        tokens_bs: Any,
        length_b: Any,
        start: Any,
        frequencies: Any,
    ) -> tuple[Any, jax.Array]:
        places = start + jnp.arange(tokens_bs.shape[1])
        start_b = jnp.full_like(length_b, start)
        model = model_of(self.program, *weights)
        counts = places < length_b[:, None]
        hidden, caches = _passed(model, caches, tokens_bs, start_b, counts, frequencies)
        last = length_b - 1 - start
        here = (last >= 0) & (last < tokens_bs.shape[1])
        at = jnp.clip(last, 0, tokens_bs.shape[1] - 1)[:, None, None]
        found = model.logits(jnp.take_along_axis(constrain(hidden, "batch", None, "embed"), at, axis=1))[:, 0]
        return caches, jnp.where(here[:, None], constrain(found, "batch", None), logits)

    def _one(self, weights: Any, carry: Any) -> tuple[Any, jax.Array]:
        start_b = carry["rows"]["places"]
        tokens, active, rows = self.drawn(carry["logits"], carry["rows"])
        model = model_of(self.program, *weights)
        hidden, caches = _passed(
            model, carry["caches"], tokens[:, None], start_b, active[:, None], carry["frequencies"]
        )
        logits = constrain(model.logits(hidden)[:, 0], "batch", None)
        return {**carry, "caches": caches, "logits": logits, "rows": rows}, tokens


def _passed(
    model: Decoder,
    caches: Any,
    tokens_bs: jax.Array,
    start_b: jax.Array,
    counts_bs: jax.Array,
    frequencies: Any,
) -> tuple[jax.Array, Any]:
    """States of tokens after the first `start_b` of their rows, and the caches with them."""
    attach(model, caches)
    hidden = model.decoded(tokens_bs, start_b, counts_bs.astype(jnp.int32), frequencies)
    return hidden, written(model, caches, start_b)


class Whole(_Rows):
    """With the whole sequence for each token: a causal model does not see what lies past the last one."""

    def __init__(self, program: Program, sampling: Sampling, ends: Sequence[int]):
        super().__init__(program, sampling, ends)
        self._next = self.jit(self._one, ({"tokens": self.place, "rows": self.place}, program.replicated), 1)

    def begin(self, weights: Any, prompts: Sequence[Prompt], rows: int) -> Any:
        """The prompts in a buffer that has room for what is to come."""
        tokens = np.zeros((rows, bucket(max(len(p.ids) + p.room for p in prompts))), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt.ids)] = prompt.ids
        return {"tokens": self.put(tokens), "rows": self.begun(prompts, rows)}

    def step(self, weights: Any, carry: Any) -> tuple[Any, jax.Array]:
        """See `Way`."""
        return self._next(weights, carry)

    def _one(self, weights: Any, carry: Any) -> tuple[Any, jax.Array]:
        tokens_bs, place_b = carry["tokens"], carry["rows"]["places"]
        logits = next_logits(model_of(self.program, *weights), tokens_bs, place_b)
        tokens, active, rows = self.drawn(logits, carry["rows"])
        here = active[:, None] & (jnp.arange(tokens_bs.shape[1]) == place_b[:, None])
        return {"tokens": jnp.where(here, tokens[:, None], tokens_bs), "rows": rows}, tokens


def next_logits(model: Any, tokens_bs: jax.Array, length_b: jax.Array) -> jax.Array:
    """Float32 logits [b, V] of the token after the first `length_b` tokens of each row, from the whole sequence."""
    last = (length_b - 1)[:, None, None]
    if not all(hasattr(model, name) for name in ("hidden", "unembedding", "vocab_size")):
        return jnp.take_along_axis(model(tokens_bs), last, axis=1)[:, 0].astype(jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(tokens_bs.shape[1], dtype=jnp.int32), tokens_bs.shape)
    hidden = model.hidden(tokens_bs, positions_bs=positions, segment_ids_bs=jnp.ones_like(tokens_bs))
    hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0].astype(jnp.float32)
    logits = (hidden @ model.unembedding().astype(jnp.float32))[:, : model.vocab_size]
    cap = getattr(model, "logit_cap", None)
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def model_of(program: Program, params: Any, model_state: Any) -> Any:
    """The model as it answers: no dropout, no row too many for an expert, and none that others change by a scale."""
    model = nnx.merge(program.parts.graph, params, model_state, copy=True)
    model.eval()
    without_fp8(model)
    if isinstance(model, Decoder):
        model.unroll = False  # a loop over layers reads their caches where they lie
    for _, module in nnx.iter_graph(model):
        if isinstance(module, Mixture):
            module.take_all()
    return model


def bucket(length: int) -> int:
    """A length rounded up so that few different ones are left: by a quarter at most where it is not short."""
    step = max(_LENGTH_STEP, _power_of_two(length) // 8)
    return -(-length // step) * step


def _power_of_two(number: int) -> int:
    """The least that is not smaller."""
    return 1 << (number - 1).bit_length()

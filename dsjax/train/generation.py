"""Tokens drawn after prompts: several at once, each what it would be alone.

A model of ours keeps what its attention needs of earlier tokens, so a token costs one pass over one token. Prompts go
in by chunks of equal size, so two programs serve prompts of many lengths. Any other model computes the whole sequence
again for each token.

Letters of shapes: b rows, s tokens, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.errors import ConfigError, InputError
from dsjax.mesh import BATCH_AXES, batch_shards, constrain, make_mesh, use_layout
from dsjax.models import Decoder
from dsjax.models.decoding import attach, cache_shapes, written
from dsjax.models.moe import Mixture
from dsjax.precision import without_fp8
from dsjax.train.given import require_alive
from dsjax.train.program import Program
from dsjax.train.sampling import Sampling, draw_rows
from dsjax.train.state import State

# Tokens of a prompt that go in at a time.
_CHUNK = 128
# Lengths are rounded up to a multiple of this at least, so that prompts of about the same length share a program.
_LENGTH_STEP = 64
# Prompts at a time, unless it is said otherwise.
_AT_ONCE = 16


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


class _Way(Protocol):
    """How the next tokens of some rows come about; `begin` and `step` carry arrays of the way's own."""

    def begin(self, weights: Any, prompts: Sequence[Prompt], rows: int) -> Any: ...

    def step(self, weights: Any, carry: Any) -> tuple[Any, jax.Array]: ...


class Generator:
    """Draws tokens with a program's model; compiled functions are kept for the next call.

    Args:
      ends: tokens after which a row is over.

    Attributes:
      whole_because: why the whole sequence is computed for each token; None: it is not.
    """

    def __init__(self, program: Program, sampling: Sampling, ends: Sequence[int] = ()):
        self._program, self._flat = program, folded(program)
        self._ends = frozenset(ends)
        model = _model_of(self._flat, self._flat.abstract_state.params, self._flat.abstract_state.model_state)
        self.whole_because: str | None = None
        self._way: _Way
        if isinstance(model, Decoder):
            self._way = _Cached(self._flat, model, sampling, sorted(self._ends))
        else:
            self._way = _Whole(self._flat, sampling, sorted(self._ends))
            self.whole_because = (
                f"{type(model).__name__} is no model of dsjax's own families, so nothing is kept between tokens: "
                "each one computes the whole sequence again"
            )

    def __call__(
        self, state: State, prompts: Sequence[Sequence[int]], *, max_tokens: int = 128, seed: int = 0
    ) -> list[list[int]]:
        """The tokens drawn after each prompt, without those that end them.

        Args:
          prompts: token ids, at least one each.
          max_tokens: to be drawn for each at most.

        Raises:
          InputError: a prompt without tokens, or a state whose arrays are gone.
        """
        require_alive(state)
        empty = [number for number, ids in enumerate(prompts) if not len(ids)]
        if empty or max_tokens < 1:
            what = f"prompt {empty[0]} has no tokens" if empty else f"max_tokens is {max_tokens}"
            raise InputError(f"prompts: {what}; each needs one at least, and room for one more")
        asked = [Prompt(ids, max_tokens, (seed, number, 0)) for number, ids in enumerate(prompts)]
        found: list[list[int]] = [[] for _ in asked]
        for number, token in self.answers(state, asked) if asked else ():
            found[number] += [] if token is None else [token]
        return found

    def answers(
        self, state: State, prompts: Sequence[Prompt], at_once: int = _AT_ONCE
    ) -> Iterator[tuple[int, int | None]]:
        """(number of the prompt, its next token), in the order in which they are drawn; None: there is no more.

        A token is told when the next one is under way. A row's tokens do not depend on the other rows.

        Args:
          at_once: prompts at a time, rounded up to what the mesh divides.
        """
        weights = _moved(self._program, self._flat, state)
        shards = batch_shards(self._flat.mesh)
        rows = -(-min(at_once, len(prompts)) // shards) * shards
        for first in range(0, len(prompts), rows):
            for row, token in self._batch(weights, prompts[first : first + rows], rows):
                yield first + row, token

    def _batch(self, weights: Any, prompts: Sequence[Prompt], rows: int) -> Iterator[tuple[int, int | None]]:
        carry = self._way.begin(weights, prompts, rows)
        left = {row: prompt.room for row, prompt in enumerate(prompts)}
        drawn: deque[jax.Array] = deque()

        def told(tokens_b: jax.Array) -> Iterator[tuple[int, int | None]]:
            tokens = np.asarray(tokens_b)
            for row in list(left):
                token = int(tokens[row])
                left[row] -= 1
                if token not in self._ends:
                    yield row, token
                if token in self._ends or not left[row]:
                    del left[row]
                    yield row, None

        for _ in range(max(left.values())):
            carry, tokens_b = self._way.step(weights, carry)
            drawn.append(tokens_b)
            if len(drawn) > 1:
                yield from told(drawn.popleft())
            if not left:
                return
        while drawn:
            yield from told(drawn.popleft())


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

        options = dict(self.program.compiler_options)
        return jax.jit(under, out_shardings=out_shardings, donate_argnums=donated, compiler_options=options)


class _Cached(_Rows):
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
        """A token of each row, int32 [b] on every device; the carry is donated."""
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
        model = _model_of(self.program, *weights)
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
        model = _model_of(self.program, *weights)
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


class _Whole(_Rows):
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
        """A token of each row, int32 [b] on every device; the carry is donated."""
        return self._next(weights, carry)

    def _one(self, weights: Any, carry: Any) -> tuple[Any, jax.Array]:
        tokens_bs, place_b = carry["tokens"], carry["rows"]["places"]
        logits = next_logits(_model_of(self.program, *weights), tokens_bs, place_b)
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


def _model_of(program: Program, params: Any, model_state: Any) -> Any:
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


def folded(program: Program) -> Program:
    """The program without stages and without cut sequences: those devices hold shards of all layers instead.

    A token at a time would leave all stages but one idle, and all ranks of a sequence but one.
    """
    sizes = dict(program.mesh.shape)
    count = sizes.pop("pipeline") * sizes.pop("context")
    if count == 1:
        return program
    devices = list(program.mesh.devices.flat)
    for axis in ("fsdp", "data"):
        try:
            return replace(program, mesh=make_mesh({**sizes, axis: sizes[axis] * count}, devices))
        except ConfigError as error:
            fault = error
    raise fault


def _moved(program: Program, flat: Program, state: State) -> tuple[Any, Any]:
    """Parameters and other variables where the folded program has them; what trains stays where it is."""
    weights = (state.params, state.model_state)
    if flat is program:
        return weights
    places = flat.state_shardings
    return jax.jit(program.in_order, out_shardings=(places.params, places.model_state))(weights)

"""Tokens drawn after prompts: several at once, each what it would be alone.

A model of ours keeps what its attention needs of earlier tokens, so a token costs one pass over one token. Prompts go
in by chunks of equal size, so two programs serve prompts of many lengths. Any other model computes the whole sequence
again for each token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from dsjax.errors import ConfigError, InputError
from dsjax.mesh import batch_shards, make_mesh
from dsjax.models import Decoder
from dsjax.train.given import require_alive
from dsjax.train.next_tokens import Cached, Prompt, Way, Whole, model_of
from dsjax.train.program import Program
from dsjax.train.sampling import Sampling
from dsjax.train.state import State

# Prompts at a time, unless it is said otherwise.
_AT_ONCE = 16


class Generator:
    """Draws tokens with a program's model; compiled functions are kept for the next call.

    Args:
      ends: tokens after which a row is over.

    Attributes:
      whole_because: why the whole sequence is computed for each token; None: it is not.

    Raises (at construction):
      ConfigError: the model cannot be called.
    """

    def __init__(self, program: Program, sampling: Sampling, ends: Sequence[int] = ()):
        self._program, self._flat = program, folded(program)
        self._ends = frozenset(ends)
        model = model_of(self._flat, self._flat.abstract_state.params, self._flat.abstract_state.model_state)
        if not callable(model):
            raise ConfigError(
                f"model.kind: {type(model).__name__} has no __call__(tokens) -> logits, which drawing tokens needs"
            )
        self.whole_because: str | None = None
        self._way: Way
        if isinstance(model, Decoder):
            self._way = Cached(self._flat, model, sampling, sorted(self._ends))
        else:
            self._way = Whole(self._flat, sampling, sorted(self._ends))
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

"""Histories of delayed fp8 scaling, from a checkpoint that has others: those that are not as here begin anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.precision.delayed import Largest, Probe, is_history
from dsjax.train.program import Program
from dsjax.train.state import State


@dataclass(frozen=True)
class Histories:
    """The histories that a checkpoint holds, and what becomes of them.

    Attributes:
      told: path -> shape of those in the checkpoint.
    """

    program: Program
    told: Mapping[tuple[Any, ...], tuple[int, ...]]

    @staticmethod
    def of(program: Program, facts: Mapping[str, Any]) -> Histories:
        """Those of a checkpoint by its facts."""
        return Histories(program, {tuple(path): tuple(shape) for path, shape in facts.get("histories") or []})

    @staticmethod
    def without(state: State) -> State:
        """A state less its histories."""
        kept = {path: v for path, v in state.model_state.flat_state() if not is_history(v)}
        return replace(state, model_state=nnx.State.from_flat_path(kept))

    def stored(self, state: State) -> State:
        """An abstract state without histories, with those that the checkpoint holds."""

        def abstract(path: tuple[Any, ...], shape: tuple[int, ...]) -> nnx.Variable:
            kind = Probe if path[-1] == "probe" else Largest
            return kind(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self.program.replicated))

        return _with(state, {path: abstract(path, shape) for path, shape in self.told.items()})

    def carried(self, state: State, read: State) -> State:
        """A state without histories, with the program's own: as they were read, or empty."""
        given = dict(read.model_state.flat_state())

        def one(path: tuple[Any, ...], like: nnx.Variable) -> nnx.Variable:
            if self.told.get(path) == like.shape:
                return given[path]
            zeros = jax.jit(lambda: jnp.zeros(like.shape, jnp.float32), out_shardings=self.program.replicated)
            return like.replace(zeros())

        return _with(state, {path: one(path, like) for path, like in self._wanted.items()})

    @property
    def note(self) -> str:
        """For people; empty where all is as it was."""
        wanted = {path: like.shape for path, like in self._wanted.items()}
        if wanted == self.told:
            return ""
        if not wanted:
            return "the checkpoint's histories of fp8 scales are left out"
        return "histories of fp8 scales begin anew where the checkpoint holds none like them"

    @property
    def _wanted(self) -> dict[tuple[Any, ...], nnx.Variable]:
        flat = self.program.abstract_state.model_state.flat_state()
        return {path: variable for path, variable in flat if is_history(variable)}


def _with(state: State, more: Mapping[tuple[Any, ...], nnx.Variable]) -> State:
    kept = dict(state.model_state.flat_state())
    return replace(state, model_state=nnx.State.from_flat_path({**kept, **more}))

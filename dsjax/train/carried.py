"""Residuals of error feedback, from a checkpoint or from before layers moved, where they are held otherwise now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.grad_sync import Exchange
from dsjax.grad_sync.residuals import exchange_of, facts_of, laid, meaning, regrouped, shapes
from dsjax.mesh import AXES
from dsjax.pipelining.partition import restacked
from dsjax.train.program import Program
from dsjax.train.stacking import Held


@dataclass(frozen=True)
class Kept:
    """Residuals as a checkpoint holds them, and what becomes of them.

    Attributes:
      program: that is to take them over.
      old: the exchange that made them; None: there are none, or they are taken as they are.
      stored: abstract, to be read.
      layers: path of a stack whose layers lie in other slots, with the slots before and now.
      note: for people, where they are not taken as they are.
    """

    program: Program
    old: Exchange | None
    stored: dict[str, dict[str, Any]]
    layers: tuple[str, np.ndarray, np.ndarray] | None = None
    note: str = ""

    @staticmethod
    def of(program: Program, facts: Mapping[str, Any]) -> Kept:
        """Those of a checkpoint by its facts."""
        told, new = facts.get("residuals"), program.parts.exchange
        keeps = new is not None and bool(new.keeps)
        if told is None:
            return Kept(program, None, {}, note=_NONE if keeps else "")
        held = Held.of(program.stacking, facts)
        layers = None
        if held is not None:
            before, now = np.asarray(held.slots), program.slots(held.path)
            layers = None if np.array_equal(before, now) else (held.path, before, now)
        if told == facts_of(new) and layers is None:
            return Kept(program, None, program.abstract_state.residuals)
        old = exchange_of(told)
        stored = {
            name: {p: _spread(program, s) for p, s in part.items()} for name, part in shapes(old).items()
        }
        if not keeps:
            return Kept(program, None, stored, note=_LEFT_OUT)
        assert new is not None
        if _turned(old) != _turned(new):
            return Kept(program, None, stored, note=_TURNED)
        return Kept(program, old, stored, layers, note=_CARRIED)

    def carried(self, residuals: Any) -> Any:
        """The program's residuals, in their places."""
        wanted = self.program.abstract_state.residuals
        if not self.note:
            return residuals
        made: dict[str, dict[str, Any]] = {}
        for name, part in wanted.items():
            made[name] = {}
            for path, like in part.items():
                given = residuals.get(name, {}).get(path)
                if given is None or self.old is None:
                    zeros = partial(jnp.zeros, like.shape, like.dtype)
                    made[name][path] = jax.jit(zeros, out_shardings=like.sharding)()
                else:
                    convert = jax.jit(partial(self._converted, name, path), out_shardings=like.sharding)
                    made[name][path] = convert(given)
        return made

    def _converted(self, name: str, path: str, residual: jax.Array) -> jax.Array:
        """One residual from the old exchange's form in the new one's."""
        new = self.program.parts.exchange
        assert self.old is not None and new is not None
        numbers = meaning(self.old, name, path, residual)
        if self.layers is not None and path.startswith(f"{self.layers[0]}/"):
            _, before, now = self.layers
            numbers = jax.vmap(lambda x: restacked(x, before, now))(numbers)
        return laid(new, name, path, regrouped(numbers, new.route.outer if name == "sent" else 1))


_NONE = "the checkpoint holds no residuals of error feedback: they begin at 0"
_LEFT_OUT = "the checkpoint's residuals of error feedback are left out: nothing here keeps any"
_TURNED = "residuals of error feedback begin at 0: the checkpoint's are of blocks that were turned otherwise"
_CARRIED = "residuals of error feedback are taken over from another layout or codec"


def _turned(exchange: Exchange) -> int:
    """The block in which numbers are turned before they are coded; 0: they are not."""
    settings = exchange.settings
    return settings.block if settings.hadamard and settings.codec in ("int8", "int4", "e2m4") else 0


def _spread(program: Program, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Where an array of another mesh is read to: over all devices, if it divides."""
    divides = shape.shape[-1] % program.mesh.size == 0
    spec = P(*(None,) * (len(shape.shape) - 1), AXES) if divides else P()
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(program.mesh, spec))

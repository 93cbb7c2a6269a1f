"""Residuals of error feedback, from a checkpoint or from before layers moved, where they are held otherwise now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from dsjax.train.state import State, each_its_own


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


@dataclass(frozen=True)
class Workers:
    """The replicas that train apart in a checkpoint and in a program: each has an optimizer of its own.

    Attributes:
      before, now: how many; None: they do not train apart.
    """

    program: Program
    before: int | None
    now: int | None

    @staticmethod
    def of(program: Program, facts: Mapping[str, Any]) -> Workers:
        """Those of a checkpoint by its facts."""
        return Workers(program, facts.get("workers"), program.workers)

    def stored(self, abstract: State) -> State:
        """The abstract state as the checkpoint holds it."""
        if self.before == self.now:
            return abstract
        state = abstract
        if self.now is not None:
            one = partial(jax.tree.map, _one_of)
            state = replace(state, opt_state=one(state.opt_state), workers={})
        if self.before is not None:
            each = partial(jax.tree.map, partial(_many_of, self.before))
            momentum = jax.tree.map(
                lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=p.sharding), state.params
            )
            workers = {"params": each(state.params), "momentum": momentum}
            state = replace(state, opt_state=each(state.opt_state), workers=workers)
        return state

    def carried(self, state: State) -> State:
        """The state for as many workers as there are now: each begins with the mean of what they had."""
        if self.before == self.now:
            return state
        places = self.program.state_shardings
        momentum = state.workers.get("momentum")
        parted = (state.opt_state, state.params)
        if self.before is not None:
            parted = jax.tree.map(_mean_of, (state.opt_state, state.workers["params"]))
        if self.now is None:
            return replace(state, opt_state=jax.device_put(parted[0], places.opt_state), workers={})
        opt_state, own = each_its_own(parted, self.now)
        if momentum is None:
            momentum = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), state.params)
        workers = jax.device_put({"params": own, "momentum": momentum}, places.workers)
        return replace(state, opt_state=jax.device_put(opt_state, places.opt_state), workers=workers)


def _one_of(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """One replica's part of what each has."""
    place = NamedSharding(leaf.sharding.mesh, P(*leaf.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=place)


def _many_of(replicas: int, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    place = NamedSharding(leaf.sharding.mesh, P(None, *leaf.sharding.spec))
    return jax.ShapeDtypeStruct((replicas, *leaf.shape), leaf.dtype, sharding=place)


def _mean_of(leaf: jax.Array) -> jax.Array:
    return jnp.mean(leaf, axis=0).astype(leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf[0]

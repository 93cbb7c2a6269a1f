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
from dsjax.mesh import AXES, map_named, named_leaves
from dsjax.pipelining.partition import restacked
from dsjax.precision.small_state import SmallState, mean_of_workers
from dsjax.train.program import Program
from dsjax.train.stacking import Held
from dsjax.train.state import State, each_its_own, first_guards, guards_of


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
        # Of gradients, or of the moves of workers: other units.
        alike = (facts.get("workers") is None) == (program.workers is None)
        if told == facts_of(new) and layers is None and alike:
            return Kept(program, None, program.abstract_state.residuals)
        old = exchange_of(told)
        stored = {
            name: {p: _spread(program, s) for p, s in part.items()} for name, part in shapes(old).items()
        }
        if not keeps:
            return Kept(program, None, stored, note=_LEFT_OUT)
        if not alike:
            return Kept(program, None, stored, note=_OTHER_UNITS)
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
                # What sums owe that are made no longer is owed by those who send.
                names = [n for n in residuals if n == name or (name == "sent" and n not in wanted)]
                given = {n: residuals[n][path] for n in names if path in residuals[n]}
                if not given or self.old is None:
                    zeros = partial(jnp.zeros, like.shape, like.dtype)
                    made[name][path] = jax.jit(zeros, out_shardings=like.sharding)()
                else:
                    convert = jax.jit(partial(self._converted, name, path), out_shardings=like.sharding)
                    made[name][path] = convert(given)
        return made

    def _converted(self, name: str, path: str, residuals: Mapping[str, jax.Array]) -> jax.Array:
        """Residuals of a parameter from the old exchange's form in the new one's, as its residual `name`."""
        new = self.program.parts.exchange
        assert self.old is not None and new is not None
        groups, found = new.route.outer if name == "sent" else 1, []
        for kind, residual in residuals.items():
            numbers = self._in_slots(path, meaning(self.old, kind, path, residual))
            found.append(regrouped(numbers, groups))
        return laid(new, name, path, sum(found[1:], found[0]))

    def _in_slots(self, path: str, numbers: jax.Array) -> jax.Array:
        """[groups, *shape] of a parameter with its layers where they lie now."""
        if self.layers is None or not path.startswith(f"{self.layers[0]}/"):
            return numbers
        _, before, now = self.layers
        return jax.vmap(lambda x: restacked(x, before, now))(numbers)


@dataclass(frozen=True)
class Guards:
    """The guards of a checkpoint's numbers, and what becomes of them: those that are not as here begin anew.

    Attributes:
      told: name -> leaf -> [shape, type] of those that the checkpoint holds.
    """

    program: Program
    told: Mapping[str, Mapping[str, Any]]

    @staticmethod
    def of(program: Program, facts: Mapping[str, Any]) -> Guards:
        """Those of a checkpoint by its facts."""
        return Guards(program, facts.get("guards") or {})

    @property
    def stored(self) -> dict[str, dict[str, Any]]:
        """Abstract, to be read."""
        place = self.program.replicated
        return {
            name: {
                leaf: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=place)
                for leaf, (shape, dtype) in leaves.items()
            }
            for name, leaves in self.told.items()
        }

    @property
    def anew(self) -> list[str]:
        """Names of those that are wanted and not in the checkpoint as they are wanted."""
        wanted = guards_of(self.program.abstract_state.guards)
        return [name for name, leaves in wanted.items() if self.told.get(name) != leaves]

    def carried(self, read: Mapping[str, Any]) -> dict[str, Any]:
        """The program's guards, in their places."""
        abstract = self.program.abstract_state
        # Of parameters their names alone are looked at.
        first = partial(first_guards, self.program.numbers, abstract.params)
        guards = jax.jit(first, out_shardings=self.program.state_shardings.guards)()
        for name in guards.keys() - set(self.anew):
            leaves = named_leaves(read[name])
            guards[name] = map_named(lambda path, _, leaves=leaves: leaves[path], guards[name])
        return guards

    @property
    def notes(self) -> list[str]:
        """For people."""
        return [f"{_GUARDS[name]} begins anew: the checkpoint holds none like it" for name in self.anew]


_GUARDS = {
    "scaling": "the loss scale",
    "clipping": "the history that gradients are clipped by",
    "cooling": "the time of a lowered learning rate",
}
_NONE = "the checkpoint holds no residuals of error feedback: they begin at 0"
_LEFT_OUT = "the checkpoint's residuals of error feedback are left out: nothing here keeps any"
_TURNED = "residuals of error feedback begin at 0: the checkpoint's are of blocks that were turned otherwise"
_OTHER_UNITS = "residuals of error feedback begin at 0: those of gradients are not those of moves of workers"
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

    A state of another number of them is first made that of one, then that of as many as there are now.

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

    @property
    def note(self) -> str:
        """For people, where there is another number of them."""
        if self.before == self.now:
            return ""
        if self.before is None:
            return f"{self.now} workers begin to train apart, from what all had"
        means = f"the mean of the parameters and optimizers of the {self.before} workers that trained apart"
        if self.now is None:
            return f"goes on as one with {means}; their outer momentum is left out"
        return f"{self.now} workers begin with {means}"

    @property
    def one(self) -> State:
        """The program's abstract state, of one worker where the checkpoint has another number."""
        state = self.program.abstract_state
        if self.before == self.now or self.now is None:
            return state
        return replace(state, opt_state=jax.tree.map(_one_of, state.opt_state), workers={})

    def stored(self, state: State) -> State:
        """An abstract state of one as the checkpoint holds it."""
        if self.before == self.now or self.before is None:
            return state
        each = partial(jax.tree.map, partial(_many_of, self.before))
        momentum = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=p.sharding), state.params
        )
        workers = {"params": each(state.params), "momentum": momentum}
        return replace(state, opt_state=each(state.opt_state), workers=workers)

    def joined(self, state: State) -> State:
        """What was read as the state of one: the mean of what workers had.

        Those that are to part again begin with what they have learned since they met, and know where that was; one
        that goes on alone has learned all of it.
        """
        if self.before == self.now or self.before is None:
            return state
        params = state.params if self.now is not None else jax.tree.map(_mean_of, state.workers["params"])
        return replace(state, params=params, opt_state=_mean_state_of(state.opt_state), workers={})

    def parted(self, state: State, read: State) -> State:
        """The state of one as that of as many as there are now.

        Args:
          read: what was read, for the parameters that workers had and their momentum.
        """
        if self.before == self.now or self.now is None:
            return state
        own, momentum = state.params, read.workers.get("momentum")
        if self.before is not None:
            own = jax.tree.map(_mean_of, read.workers["params"])
        else:
            momentum = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), state.params)
        opt_state = jax.device_put(
            each_its_own(state.opt_state, self.now), self.program.state_shardings.opt_state
        )
        state = replace(state, opt_state=opt_state, workers={"momentum": momentum})
        return replace(state, workers=_begun(self.program, state, own))


def with_params(program: Program, state: State, params: Any) -> State:
    """A state that begins with these parameters, its workers too."""
    state = replace(state, params=params)
    return replace(state, workers=_begun(program, state, params)) if program.workers else state


def _begun(program: Program, state: State, params: Any) -> dict[str, Any]:
    """Workers that all have these parameters."""
    own = each_its_own(params, program.workers or 1)
    return jax.device_put({**state.workers, "params": own}, program.state_shardings.workers)


def _one_of(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """One replica's part of what each has."""
    place = NamedSharding(leaf.sharding.mesh, P(*leaf.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=place)


def _many_of(replicas: int, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    place = NamedSharding(leaf.sharding.mesh, P(None, *leaf.sharding.spec))
    return jax.ShapeDtypeStruct((replicas, *leaf.shape), leaf.dtype, sharding=place)


def _mean_of(leaf: jax.Array) -> jax.Array:
    return jnp.mean(leaf, axis=0).astype(leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf[0]


def _mean_state_of(opt_state: Any) -> Any:
    """The mean of the optimizers of workers; of codes of numbers that of the numbers."""
    small = lambda node: isinstance(node, SmallState)  # noqa: E731
    return jax.tree.map(lambda x: mean_of_workers(x) if small(x) else _mean_of(x), opt_state, is_leaf=small)

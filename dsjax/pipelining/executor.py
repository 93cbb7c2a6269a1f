"""A pipeline as one program: a loop over the ticks of a schedule, the same on every stage.

In a tick a stage takes the gradient that came in, runs at most one forward, at most one backward and at most
one weight gradient (each under a condition of its own), and hands its activation on.  The hand-overs stand
outside of all conditions: a permutation is one operation of all stages.  An activation travels while the
backward runs, a gradient while the next tick's forward does.

Runs in the body of a shard_map over `pipeline` and the batch's axes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsjax.errors import ConfigError
from dsjax.pipelining.residuals import LayerVjp
from dsjax.pipelining.schedule import Schedule
from dsjax.pipelining.slots import Slots

AXIS = "pipeline"
# Names that the parts of a tick have in the compiled program.
FORWARD, BACKWARD, WEIGHT = "stage_forward", "stage_backward", "stage_weight"
UNITS = (FORWARD, BACKWARD, WEIGHT)
FIRST, LAST = "first_stage", "last_stage"


@dataclass(frozen=True)
class Parts:
    """A model as functions of this device's arrays; `m` is the number of a microbatch.

    Attributes:
      embed: ``embed(rest, m) -> x``.
      layer: ``layer(own, state, x, m) -> ((x, loss), extras)``.
      head: ``head(rest, x, m) -> (loss, (weight, extras))``; sums, fp32.
    """

    embed: Callable[[Any, Any], Any]
    layer: Callable[[Any, Any, Any, Any], Any]
    head: Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class Work:
    """A schedule laid out for a model.

    Attributes:
      layers: slots for layers of a chunk on each stage.
      counts: layers of virtual stage chunk * stages + stage; fewer than `layers` where stages are uneven.
    """

    schedule: Schedule
    slots: Slots
    layers: int
    counts: tuple[int, ...]


@dataclass
class _Carry:
    """What passes from tick to tick on a stage."""

    sums: Any  # (loss, weight, extras)
    layer_grads: Any
    rest_grads: Any
    inputs: Any  # [slots, ...x]
    gradients: Any  # [slots, ...x]
    kept: Any  # residuals [slots, layers, ...]
    outputs: Any  # [slots, ...x], of the forwards whose residuals are kept
    crossing: Any  # [slots, layers, ...]
    sent: Any  # the gradient on its way to the stage before
    passed: Any  # the activation on its way to the next stage


jax.tree_util.register_dataclass(_Carry, [f.name for f in fields(_Carry)], [])


class Pipeline:
    """One call of the pipeline, while it is traced.

    Args:
      layers, states: this stage's layers [virtual * layers, ...]: parameters, other variables.
      rest: parameters before and after the layers, as `embed` and `head` use them.
      ordered: collectives run one after the other, as the devices of a CPU want it.
      seed: float32 [], what the gradient of a loss starts from; None: 1.
    """

    def __init__(
        self,
        parts: Parts,
        work: Work,
        layers: Any,
        states: Any,
        rest: Any,
        *,
        ordered: bool = False,
        seed: Any = None,
    ):
        self.parts, self.work, self.ordered = parts, work, ordered
        self.seed = jnp.ones(()) if seed is None else seed
        self.layers, self.states, self.rest = layers, states, rest
        self.stage = lax.axis_index(AXIS)
        self.recompute = work.slots.keep == "inputs"
        # Stages then do different things in a tick: one exchange, at its start, keeps them from waiting twice.
        self.one_a_tick = work.schedule.weight is not None
        number = jax.ShapeDtypeStruct((), jnp.int32)
        self.x = jax.eval_shape(parts.embed, rest, number)
        own, state = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), (layers, states)
        )
        (y, _), extras = jax.eval_shape(parts.layer, own, state, self.x, number)
        self._check_passed(y)
        self.vjp = LayerVjp(parts.layer, own, state, self.x, number)
        self.crossing: list[Any] = []
        if work.schedule.weight is not None:
            self.crossing = self.vjp.split(
                own, state, number, (self.x, jax.ShapeDtypeStruct((), jnp.float32))
            )
        total, (weight, more) = jax.eval_shape(parts.head, rest, self.x, number)
        self.layer_extras = _zeros(extras)
        self.sums = _zeros((total, weight, _merged(extras, more, lambda a, b: a)))

    def _check_passed(self, y: Any) -> None:
        """Refuses what cannot pass from stage to stage; y is what a layer makes of x."""
        if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(self.x)):
            raise ConfigError(
                f"stages.embed: gives {_told(self.x)}; what passes from stage to stage is of floating point, since "
                "gradients come back the same way (numbers and masks come from the batch, by prepare)"
            )
        got, want = jax.tree.map(lambda v: (v.shape, v.dtype), (y, self.x))
        if got != want:
            raise ConfigError(
                f"stages: embed gives {_told(self.x)} but a layer makes {_told(y)} of it; every stage takes what the "
                "one before gives, so both are alike"
            )

    # ---- the loop ------------------------------------------------------------------------------

    def gradients(self, sums: Any, layer_grads: Any, rest_grads: Any) -> tuple[Any, Any, Any]:
        """Adds one pass of all microbatches to the sums and gradients."""
        carry = self._start(sums, layer_grads, rest_grads)
        carry = self._ticks(self._tick, carry)
        return carry.sums, carry.layer_grads, carry.rest_grads

    def one_of_each(self, sums: Any, layer_grads: Any, rest_grads: Any) -> Any:
        """One forward and backward of each of this stage's chunks, of whatever input, without any exchange.

        Takes as long as a stage takes for a microbatch; what comes out means nothing.
        """
        shape = (self.work.schedule.virtual, self.work.schedule.stages)
        tables = {name: np.full(shape, -name.startswith("store"), np.int32) for name in self._tables()}
        units = np.arange(shape[0], dtype=np.int32)[:, None] * self.work.schedule.microbatches
        for name in tables.keys() & {"forward", "backward", "weight"}:
            tables[name] = np.broadcast_to(units, shape)
        carry = self._start(sums, layer_grads, rest_grads, 1)
        carry = self._ticks(partial(self._tick, alone=True), carry, tables)
        return carry.sums, carry.layer_grads, carry.rest_grads, carry.passed, carry.sent

    def _start(self, sums: Any, layer_grads: Any, rest_grads: Any, most: int | None = None) -> _Carry:
        """Empty buffers, of as many slots as the schedule wants or at most so many."""
        slots, depth = self.work.slots, self.work.layers

        def stash(count: int, shapes: Any, *lead: int) -> Any:
            count = max(1, count if most is None else min(most, count))
            return jax.tree.map(lambda s: jnp.zeros((count, *lead, *s.shape), s.dtype), shapes)

        return _Carry(
            sums=sums, layer_grads=layer_grads, rest_grads=rest_grads,
            inputs=stash(slots.inputs, self.x),
            gradients=stash(slots.gradients, self.x),
            # One slot where stages are computed again: the backward's own, made once and not in every tick.
            kept=stash(slots.residuals, self.vjp.kept, depth),
            outputs=stash(slots.residuals, self.x) if slots.residuals else None,
            crossing=stash(slots.crossings, self.crossing, depth),
            sent=_zeros(self.x),
            passed=_zeros(self.x),
        )  # fmt: skip

    def _ticks(self, tick: Callable[[Any, dict[str, jax.Array]], Any], carry: Any, tables: Any = None) -> Any:
        """Runs `tick(carry, this stage's row of the tables)` over all ticks; of the schedule's tables by default."""
        tables = self._tables() if tables is None else tables
        count = len(tables["forward"])
        tables = {name: jnp.asarray(table) for name, table in tables.items()}

        def one(t: Any, carry: Any) -> Any:
            return tick(carry, {name: table[t, self.stage] for name, table in tables.items()})

        # To XLA the number of ticks is unknown: it would write two of them out, and compile twice as much.
        first = lax.optimization_barrier(jnp.int32(0))
        return lax.fori_loop(first, count, one, carry)

    def _tables(self) -> dict[str, np.ndarray]:
        """The tables that say what is done and where things lie: [ticks, stages]."""
        schedule, slots = self.work.schedule, self.work.slots
        tables = {"forward": schedule.forward, "backward": schedule.backward}
        if schedule.weight is not None:
            tables["weight"] = schedule.weight
        for field in fields(slots):
            value = getattr(slots, field.name)
            if not isinstance(value, int | str):
                tables[field.name] = value
        if self.one_a_tick:
            tables["store_input"] = np.roll(tables["store_input"], 1, axis=0)
            tables["store_input"][0] = -1
        return tables

    def _tick(self, carry: _Carry, row: dict[str, jax.Array], alone: bool = False) -> _Carry:
        handed = (lambda x, by: x) if alone else self._handed
        came = handed(carry.sent, -1)
        if self.one_a_tick:
            carry.inputs = _put_if(
                carry.inputs, handed(self._after(came, carry.passed), 1), row["store_input"]
            )
        # Of the stash the forward gets its input alone: what passes through nested loops is copied.
        x = _at(carry.inputs, jnp.maximum(row["read_input"], 0))
        made = (x, carry.kept, carry.outputs, carry.sums, carry.passed)
        row["forward"] = self._after(came, row["forward"])
        with jax.named_scope(FORWARD):
            made = _when(row["forward"] >= 0, lambda made, row: self._forward(row, made), made, row)
        # The gradient is looked at only now, so that it may travel until now.
        came, made = lax.optimization_barrier((came, made))
        x, carry.kept, carry.outputs, carry.sums, carry.passed = made
        carry.gradients = _put_if(carry.gradients, came, row["store_gradient"])
        embedded = (row["forward"] >= 0) & self._unit(row["forward"])[3]
        carry.inputs = _put_if(carry.inputs, x, jnp.where(embedded, row["read_input"], -1))
        arrived = None if self.one_a_tick else handed(carry.passed, 1)
        row["backward"] = self._after(arrived, row["backward"])
        with jax.named_scope(BACKWARD):
            carry = _when(row["backward"] >= 0, lambda carry, row: self._backward(row, carry), carry, row)
        if self.one_a_tick:
            with jax.named_scope(WEIGHT):
                carry = _when(row["weight"] >= 0, lambda carry, row: self._weight(row, carry), carry, row)
        else:
            carry.inputs = _put_if(carry.inputs, arrived, row["store_input"])
        return carry

    def _after(self, came: Any, values: Any) -> Any:
        """The values; on a CPU they are known only once what a neighbour sent is there.

        The devices of a CPU share its threads: one that waits for a neighbour and one that waits for its shards'
        collectives could take them all, so every device goes through its collectives in the same order.
        """
        if came is None or not self.ordered:
            return values
        first = jax.tree.leaves(came)[0].ravel()[0]
        return jax.tree.map(lambda v: jnp.where(self.stage < 0, first.astype(v.dtype), v), values)

    def _handed(self, x: Any, by: int) -> Any:
        """Each stage's x to the next one (by=1) or the one before (by=-1), round in a ring."""
        stages = self.work.schedule.stages
        return lax.ppermute(x, AXIS, [(s, (s + by) % stages) for s in range(stages)])

    # ---- a unit --------------------------------------------------------------------------------

    def _unit(self, unit: jax.Array) -> tuple[jax.Array, jax.Array, Any, jax.Array, jax.Array]:
        """(microbatch, first slot of its layers, number of layers, on the first virtual stage, on the last)."""
        schedule = self.work.schedule
        chunk, m = unit // schedule.microbatches, unit % schedule.microbatches
        counts = self.work.counts
        count: Any = self.work.layers
        if any(n != count for n in counts):
            count = jnp.asarray(counts, jnp.int32)[chunk * schedule.stages + self.stage]
        first = (self.stage == 0) & (chunk == 0)
        last = (self.stage == schedule.stages - 1) & (chunk == schedule.virtual - 1)
        return m, chunk * self.work.layers, count, first, last

    def _layer(self, index: jax.Array) -> tuple[Any, Any]:
        return _at(self.layers, index), _at(self.states, index)

    def _forward(self, row: Any, made: Any) -> Any:
        x, kept, outputs, sums, _ = made
        m, base, count, first, last = self._unit(row["forward"])
        x = _when(first, lambda _, m: self.parts.embed(self.rest, m), x, m, scope=FIRST)
        if self.recompute:
            # Nobody but its own backward, which computes it again, needs the last stage's output.
            return x, kept, outputs, sums, _when(~last, lambda y: self._through(y, m, base, count), x)
        slot = row["write_residual"]
        kept, y, loss, extras = self._through_keeping(x, m, base, count, kept, slot)
        sums = _added(sums, (loss, jnp.zeros(()), extras))
        return x, kept, _put(outputs, y, slot), sums, y

    def _through(self, x: Any, m: Any, base: Any, count: Any) -> Any:
        """x through the layers of a chunk."""

        def one(i: Any, x: Any) -> Any:
            (y, _), _ = self.parts.layer(*self._layer(base + i), x, m)
            return y

        return lax.fori_loop(0, count, one, x)

    def _through_keeping(
        self, x: Any, m: Any, base: Any, count: Any, kept: Any, slot: Any
    ) -> tuple[Any, ...]:
        """x through the layers of a chunk; what their backwards need is put into kept[slot, layer]."""

        def one(i: Any, carry: Any) -> Any:
            x, kept, loss, extras = carry
            (y, more), named, residuals = self.vjp.forward(*self._layer(base + i), x, m)
            return y, _put(kept, residuals, slot, i), loss + more, jax.tree.map(jnp.add, extras, named)

        start = (x, kept, jnp.zeros(()), self.layer_extras)
        y, kept, loss, extras = lax.fori_loop(0, count, one, start)
        return kept, y, loss, extras

    def _backward(self, row: Any, carry: _Carry) -> _Carry:
        m, base, count, first, last = self._unit(row["backward"])
        slot: Any = row["read_residual"]
        if self.recompute:
            slot = 0
            x = _at(carry.inputs, row["backward_input"])
            carry.kept, y, loss, extras = self._through_keeping(x, m, base, count, carry.kept, slot)
            carry.sums = _added(carry.sums, (loss, jnp.zeros(()), extras))
        else:
            y = _at(carry.outputs, slot)
        came = _at(carry.gradients, jnp.maximum(row["read_gradient"], 0))
        gradient, carry.sums, carry.rest_grads = _when(
            last, self._head, (came, carry.sums, carry.rest_grads), y, m, scope=LAST
        )
        one = self._one_backward if self.work.schedule.weight is None else self._one_input_gradient
        left = carry.layer_grads if self.work.schedule.weight is None else carry.crossing

        def turn(i: Any, both: tuple[Any, Any]) -> tuple[Any, Any]:
            layer = count - 1 - i
            return one(row, base, layer, m, _at(carry.kept, slot, layer), *both)

        gradient, left = lax.fori_loop(0, count, turn, (gradient, left))
        if self.work.schedule.weight is None:
            carry.layer_grads = left
        else:
            carry.crossing = left
        carry.rest_grads = _when(first, self._embedding, carry.rest_grads, gradient, m, scope=FIRST)
        carry.sent = gradient
        return carry

    def _head(self, made: Any, y: Any, m: Any) -> tuple[Any, Any, Any]:
        _, sums, grads = made
        loss, pull, (weight, extras) = jax.vjp(
            lambda rest, y: self.parts.head(rest, y, m), self.rest, y, has_aux=True
        )
        more, gradient = pull(self.seed.astype(loss.dtype))
        return gradient, _added(sums, (loss, weight, extras)), _summed(grads, more)

    def _embedding(self, grads: Any, gradient: Any, m: Any) -> Any:
        _, pull = jax.vjp(lambda rest: self.parts.embed(rest, m), self.rest)
        return _summed(grads, pull(gradient)[0])

    def _one_backward(
        self, row: Any, base: Any, layer: Any, m: Any, kept: Any, gradient: Any, grads: Any
    ) -> Any:
        more, dx = self.vjp.backward(*self._layer(base + layer), m, kept, (gradient, self.seed))
        return dx, _add_at(grads, more, base + layer)

    def _one_input_gradient(
        self, row: Any, base: Any, layer: Any, m: Any, kept: Any, gradient: Any, crossing: Any
    ) -> Any:
        left, dx = self.vjp.backward_input(*self._layer(base + layer), m, kept, (gradient, self.seed))
        return dx, _put(crossing, left, row["write_crossing"], layer)

    def _weight(self, row: Any, carry: _Carry) -> _Carry:
        """Gradients of a unit's weights from what its forward kept and its backward left."""
        m, base, count, _, _ = self._unit(row["weight"])

        def one(i: Any, grads: Any) -> Any:
            kept, left = (
                _at(carry.kept, row["weight_residual"], i),
                _at(carry.crossing, row["read_crossing"], i),
            )
            more = self.vjp.backward_weight(*self._layer(base + i), m, kept, left)
            return _add_at(grads, more, base + i)

        carry.layer_grads = lax.fori_loop(0, count, one, carry.layer_grads)
        return carry

    # ---- forward only --------------------------------------------------------------------------

    def evaluation(self) -> Any:
        """(loss, weight, extras) of all microbatches, without gradients."""

        def tick(carry: Any, row: dict[str, jax.Array]) -> Any:
            with jax.named_scope(FORWARD):
                inputs, sums, y = _when(
                    row["forward"] >= 0, lambda carry, row: self._evaluate(row, carry), carry, row
                )
            return _put_if(inputs, self._handed(y, 1), row["store_input"]), sums, y

        inputs = jax.tree.map(lambda s: jnp.zeros((self.work.slots.inputs, *s.shape), s.dtype), self.x)
        return self._ticks(tick, (inputs, self.sums, _zeros(self.x)))[1]

    def _evaluate(self, row: Any, carry: Any) -> Any:
        inputs, sums, _ = carry
        m, base, count, first, last = self._unit(row["forward"])
        x = _when(
            first, lambda _, m: self.parts.embed(self.rest, m), _at(inputs, row["read_input"]), m, scope=FIRST
        )

        def one(i: Any, carry: Any) -> Any:
            (y, more), named = self.parts.layer(*self._layer(base + i), carry[0], m)
            return y, carry[1] + more, jax.tree.map(jnp.add, carry[2], named)

        y, loss, extras = lax.fori_loop(0, count, one, (x, jnp.zeros(()), self.layer_extras))

        def head(sums: Any, y: Any, m: Any) -> Any:
            loss, (weight, extras) = self.parts.head(self.rest, y, m)
            return _added(sums, (loss, weight, extras))

        sums = _when(last, head, _added(sums, (loss, jnp.zeros(()), extras)), y, m, scope=LAST)
        return inputs, sums, y


def _when(
    condition: jax.Array, function: Callable[..., Any], carry: Any, *given: Any, scope: str = ""
) -> Any:
    """function(carry, *given) under a condition, else the carry as it is.

    A loop of one turn or none: its carry stays in its place, where a conditional would copy it, gradients and
    stashes and all.  What does not change in a loop XLA computes before it, whether there is a turn or not; tied
    to the number of the turn, all that the function reads seems to change.
    """

    def turn(i: Any, carry: Any) -> Any:
        _, carry, given_ = lax.optimization_barrier((i, carry, given))
        return function(carry, *given_)

    with jax.named_scope(scope) if scope else nullcontext():
        return lax.fori_loop(0, condition.astype(jnp.int32), turn, carry)


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def _at(tree: Any, *index: Any) -> Any:
    """tree[index] of every leaf."""

    def one(leaf: jax.Array) -> jax.Array:
        start = (*index, *(0,) * (leaf.ndim - len(index)))
        sizes = (*(1,) * len(index), *leaf.shape[len(index) :])
        return lax.dynamic_slice(leaf, start, sizes).reshape(leaf.shape[len(index) :])

    return jax.tree.map(one, tree)


def _put(tree: Any, value: Any, *index: Any) -> Any:
    """The tree with tree[index] = value in every leaf."""

    def one(leaf: jax.Array, new: jax.Array) -> jax.Array:
        start = (*index, *(0,) * (leaf.ndim - len(index)))
        return lax.dynamic_update_slice(
            leaf, new.astype(leaf.dtype).reshape(*(1,) * len(index), *new.shape), start
        )

    return jax.tree.map(one, tree, value)


def _put_if(tree: Any, value: Any, slot: jax.Array) -> Any:
    """`_put` where the slot is not -1."""
    at = jnp.maximum(slot, 0)
    kept = jax.tree.map(lambda new, old: jnp.where(slot >= 0, new, old), value, _at(tree, at))
    return _put(tree, kept, at)


def _add_at(tree: Any, value: Any, index: Any) -> Any:
    return _put(
        tree, jax.tree.map(lambda old, new: old + new.astype(old.dtype), _at(tree, index), value), index
    )


def _summed(total: Any, more: Any) -> Any:
    return jax.tree.map(lambda t, m: t + m.astype(t.dtype), total, more)


def _merged(first: Any, second: Any, join: Callable[[Any, Any], Any]) -> Any:
    both = {name: jax.tree.map(join, first[name], second[name]) for name in first.keys() & second.keys()}
    return {**first, **second, **both}


def _added(sums: Any, more: Any) -> Any:
    """Sums (loss, weight, extras) with those of a part of the model, which may know fewer extras."""
    loss, weight, extras = more
    named = {
        **sums[2],
        **{name: jax.tree.map(jnp.add, sums[2][name], value) for name, value in extras.items()},
    }
    return sums[0] + loss, sums[1] + weight, named


def _told(x: Any) -> str:
    return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(x))

"""The whole state of a run as one tree: what is not in it is lost at a restart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.config.precision import LossScaleConfig, StabilityConfig
from dsjax.faults import Wrong
from dsjax.mesh import named_leaves
from dsjax.models.variables import Given
from dsjax.precision.delayed import is_history
from dsjax.precision.loss_scale import first_scale
from dsjax.stability.clip import first_history, parts_of


@dataclass(frozen=True)
class Numbers:
    """How numbers are kept, and kept in range.

    Attributes:
      params: type of matrices between steps.
      gradients: type of the sums of their gradients.
      loss_scale: of fp16; None: gradients need none.
      clip: by the median of late norms; None: by a fixed norm, or not at all.
      cooled: factor of the learning rate after a rollback; None: it stays.
      recompute: a step that is not finite is computed again in fp32.
      wrong: faults that are asked for.
    """

    params: Any = jnp.float32
    gradients: Any = jnp.float32
    loss_scale: LossScaleConfig | None = None
    clip: StabilityConfig | None = None
    cooled: float | None = None
    recompute: bool = False
    wrong: tuple[Wrong, ...] = ()


UNSCALED = Numbers()
_NO_STATISTICS = (nnx.RngState, nnx.Param, Given)


@flax.struct.dataclass
class State:
    """Everything that a training step reads and writes.

    Attributes:
      step: int32 [], steps taken (the next step's number is this plus one).
      updates: int32 [], steps that changed the parameters: where the schedule stands.
      skipped: int32 [], steps skipped in a row up to now.
      data_step: int32 [], the next batch's number; differs from `step` only after a rollback.
      tokens_seen: float32 [2], weight of all steps taken: a sum and what its rounding lost.
      params: trainable parameters.
      model_state: the model's other variables: frozen parameters, BatchNorm statistics, random
        streams.
      opt_state: the optimizer's state.
      residuals: what codecs of the gradient exchange lost and error feedback will add: kind -> path -> float32
        [replicas, axes that cut the parameter..., numbers].
      workers: with local steps (`diloco`), the parameters of each replica [replicas, ...] and the outer momentum;
        `params` are those that they last met at, and `opt_state` is each replica's own [replicas, ...].
      guards: what keeps numbers in range, as far as it is in use: "scaling" (`LossScale`), "clipping" (`History`),
        "cooling" (`Cooling`).
    """

    step: jax.Array
    updates: jax.Array
    skipped: jax.Array
    data_step: jax.Array
    tokens_seen: jax.Array
    params: nnx.State
    model_state: nnx.State
    opt_state: Any
    residuals: dict[str, dict[str, jax.Array]]
    workers: dict[str, Any]
    guards: dict[str, Any] = field(default_factory=dict)


def guards_of(guards: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What guards are, for a checkpoint's facts: name -> leaf -> [shape, type]."""
    return {
        name: {leaf: [list(x.shape), str(x.dtype)] for leaf, x in named_leaves(guard).items()}
        for name, guard in guards.items()
    }


@flax.struct.dataclass
class Cooling:
    """For how long the learning rate is lowered: until so many updates (int32 [])."""

    until: jax.Array


def first_guards(numbers: Numbers, params: nnx.State) -> dict[str, Any]:
    """The guards of a state before its first step."""
    made: dict[str, Any] = {}
    if numbers.loss_scale is not None:
        made["scaling"] = first_scale(numbers.loss_scale)
    if numbers.clip is not None:
        made["clipping"] = first_history(numbers.clip, parts_of(params))
    if numbers.cooled is not None:
        made["cooling"] = Cooling(jnp.zeros((), jnp.int32))
    return made


def first_state(
    params: nnx.State,
    model_state: nnx.State,
    opt_state: Any,
    residuals: Any,
    replicas: int | None = None,
    numbers: Numbers = UNSCALED,
) -> State:
    """The state before the first step; with `replicas` that train apart each has its own."""

    def zero() -> jax.Array:
        return jnp.zeros((), jnp.int32)

    seen, apart = jnp.zeros((2,), jnp.float32), {}
    if replicas is not None:
        momentum = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        apart = {"params": each_its_own(params, replicas), "momentum": momentum}
        opt_state = each_its_own(opt_state, replicas)
    return State(
        zero(), zero(), zero(), zero(), seen, params, model_state, opt_state, residuals, apart,
        guards=first_guards(numbers, params),
    )  # fmt: skip


def each_its_own(tree: Any, replicas: int) -> Any:
    """A tree of which every replica has its own: a leading dimension of `replicas`."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (replicas, *leaf.shape)), tree)


def statistics(model_state: nnx.State) -> list[nnx.Variable]:
    """What a model gathers from the examples it sees (BatchNorm's averages).

    Not parameters, not random streams, not what layers are told.
    """
    return [v for _, v in model_state.flat_state() if not isinstance(v, _NO_STATISTICS)]


def means(model_state: nnx.State) -> list[nnx.Variable]:
    """Those of the statistics that are means over examples."""
    return [variable for variable in statistics(model_state) if not is_history(variable)]


def with_statistics(
    model_state: nnx.State,
    mean: Callable[[jax.Array], jax.Array],
    largest: Callable[[jax.Array], jax.Array],
) -> nnx.State:
    """The model's other variables with a mean taken of the statistics that are no counts, or the largest."""

    def one(variable: Any) -> Any:
        if isinstance(variable, _NO_STATISTICS) or not jnp.issubdtype(variable[...].dtype, jnp.inexact):
            return variable
        return variable.replace((largest if is_history(variable) else mean)(variable[...]))

    return jax.tree.map(one, model_state, is_leaf=lambda x: isinstance(x, nnx.Variable))


def add_exactly(total: jax.Array, value: jax.Array) -> jax.Array:
    """Adds to a float32 [2] sum without losing small addends (Neumaier's compensated sum)."""
    high = total[0] + value
    larger = jnp.where(total[0] >= value, total[0], value)
    smaller = jnp.where(total[0] >= value, value, total[0])
    return jnp.stack([high, total[1] + ((larger - high) + smaller)])

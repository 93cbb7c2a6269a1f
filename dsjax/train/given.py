"""What a script hands to a trainer, checked before anything is made of it."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import jax
import optax
from flax import nnx

from dsjax.errors import ConfigError, InputError
from dsjax.mesh import named_leaves
from dsjax.models import Stages
from dsjax.train.losses import loss_of_stages
from dsjax.train.optimizers import Schedule
from dsjax.train.state import State

# The settings that a trainer of a script has; its model, data and optimizer are the script's own.
SCRIPTS_OWN = {
    "run": True, "runtime": True, "mesh": True, "pipeline": True, "eval": True, "precision": True, "stability": True,
    "checkpoint": True, "observe": True, "grad_sync": True, "diloco": True, "lora": True,
    "train": {"steps", "gradient_accumulation_steps", "remat", "fsdp_gather"},
}  # fmt: skip

Init = Callable[[nnx.Rngs], nnx.Module]
Optimizer: TypeAlias = optax.GradientTransformation | Callable[[Any], optax.GradientTransformation]


def require_alive(state: State) -> None:
    """Refuses a state whose arrays are gone.

    Raises:
      InputError: it was given to a step, which works in its memory.
    """
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        raise InputError(
            "state: its arrays were donated to an earlier step; use the state that the step returned "
            "(state, metrics = trainer.step(state, batch))"
        )


def as_loss(loss: Any, stages: Stages | None, remat: str) -> tuple[Any, Stages | None]:
    """The loss, and the stages with the recomputation that is asked for.

    Raises:
      ConfigError: neither was given, or something else than stages.
    """
    if stages is None:
        if not callable(loss):
            raise ConfigError(f"loss: takes a function loss(model, batch) -> (sum, weight), got {loss!r}")
        return loss, None
    if not isinstance(stages, Stages):
        raise ConfigError(f"stages: takes a dsjax.Stages(embed, layer, head), got {type(stages).__name__}")
    if loss is not None:
        raise ConfigError(
            "loss: stages say how the loss is made; give one of the two, so that they cannot differ"
        )
    stages = replace(stages, remat=remat)
    return loss_of_stages(stages), stages


def as_schedule(learning_rate: float | Schedule | None) -> Schedule | None:
    """A learning rate as a function of the number of updates; None where it is not known."""
    if learning_rate is None or callable(learning_rate):
        return learning_rate
    return lambda update: learning_rate


def as_optimizer(optimizer: Optimizer | None, learning_rate: Any) -> optax.GradientTransformation:
    """The optax transformation that was given, or that the given function makes.

    Raises:
      ConfigError: it is neither, or the function lacks a learning rate.
    """
    if isinstance(optimizer, optax.GradientTransformation | optax.GradientTransformationExtraArgs):
        return optimizer
    if not callable(optimizer):
        raise ConfigError(
            f"optimizer: takes an optax transformation or a function of the learning rate, got {optimizer!r}"
        )
    if learning_rate is None:
        raise ConfigError("learning_rate: optimizer is a function of it, so give a number or a schedule")
    return optimizer(learning_rate)


def check_init(init: Init) -> None:
    """Refuses an `init` that cannot be called with the random streams alone."""
    if isinstance(init, type) and issubclass(init, nnx.Module):
        # Flax gives all its modules one signature; the constructor's own tells.
        signature = inspect.signature(init.__init__)
        arguments: tuple[Any, ...] = (None, nnx.Rngs)
    else:
        signature, arguments = inspect.signature(init), (nnx.Rngs,)
    try:
        signature.bind(*arguments)
    except TypeError:
        name = getattr(init, "__name__", "init")
        raise ConfigError(
            f"init: is called as init(rngs), which {name}{signature} does not take; write "
            f"init=lambda rngs: {name}(rngs=rngs)"
        ) from None


def check_patterns(param_axes: Mapping[str, Any], params: Any) -> None:
    """Refuses names of dimensions that are given for no parameter."""
    paths = list(named_leaves(params))
    faults = []
    for pattern in param_axes:
        if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
            near = difflib.get_close_matches(pattern, paths, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(paths[:6])}"
            faults.append(f"param_axes: no parameter matches {pattern}{hint}")
    if faults:
        raise ConfigError(faults)

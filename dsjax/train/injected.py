"""Faults of numbers inside a model: what a module gives is multiplied while a step is traced (`dsjax.faults`)."""

from __future__ import annotations

import contextlib
import fnmatch
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from dsjax.errors import ConfigError
from dsjax.faults import VARIABLE, Wrong
from dsjax.mesh import BATCH_AXES, Layout, batch_shards, devices_by_shard
from dsjax.models.calls import LOSS, Call, intercepted, module_paths, opened
from dsjax.train.randomness import current_examples

# Kinds of operators: pattern of a module's own name, or of its class's, in lower case.
_OPERATORS = {
    "attention": re.compile(r"(attn|attention)(?!.*norm)"),
    "ffn": re.compile(r"mlp(?!.*norm)|ffn|feed_?forward|swiglu"),
    "norm": re.compile(r"norm|^ln(_|\d|$)"),
}


@dataclass(frozen=True)
class Injected:
    """A fault and where it acts.

    Attributes:
      paths: of the modules; None: whatever is called first in the layer.
      shard: only rows of this shard of the batch; None: all.
      shards: of the batch.
      modules: path -> module, of the whole model.
      struck: paths of the modules at which it was compiled in.
    """

    wrong: Wrong
    paths: frozenset[str] | None
    shard: int | None
    shards: int
    modules: Mapping[str, Any] = field(compare=False)
    struck: set[str] = field(default_factory=set, compare=False)

    def at(self, call: Call) -> bool:
        """Whether it may act on what a call gives."""
        layer, wanted = call.layer, self.wrong.layer
        if self.paths is None and not call.outermost:
            return False
        if self.paths is not None and call.path not in self.paths:
            return False
        if wanted is None:
            return True
        if call.depth is not None:
            return wanted < call.depth
        return layer is not None and wanted == layer

    def acted(self, call: Call, batch: Any, rows: int, value: Any) -> Any:
        """What a call gives, with the fault in the batches that it is asked for in.

        Args:
          batch: int32 [], the batch's number.
          rows: of a microbatch, over all shards.
        """
        self.struck.add(call.path)
        strikes = (batch >= self.wrong.first) & (batch <= self.wrong.last)
        if self.wrong.layer is not None and call.depth is not None:
            strikes &= call.layer == self.wrong.layer
        if self.shard is not None:
            places = current_examples()
            assert places is not None
            strikes &= places % rows // (rows // self.shards) == self.shard
        factor = jnp.where(strikes, self.wrong.factor, 1.0)

        def one(leaf: Any) -> Any:
            if not isinstance(leaf, jax.Array) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
                return leaf
            each = self._by_row(call, factor, leaf).astype(leaf.dtype)
            return _turned(leaf, each) if self.wrong.backward else leaf * each

        return jax.tree.map(one, value)

    def _by_row(self, call: Call, factor: jax.Array, leaf: jax.Array) -> jax.Array:
        if not factor.ndim:
            return factor
        count = factor.shape[0]
        if not leaf.ndim or leaf.shape[0] % count:
            raise ConfigError(
                f"{VARIABLE}: {self.wrong.text!r}: {call.path} gives {leaf.shape}, in which no example has a row "
                "of its own; leave out device"
            )
        each = jnp.repeat(factor, leaf.shape[0] // count)
        return each.reshape(-1, *(1,) * (leaf.ndim - 1))


@jax.custom_vjp
def _turned(value: jax.Array, factor: jax.Array) -> jax.Array:
    """The value as it is; the gradient with respect to it is multiplied by a factor."""
    return value


_turned.defvjp(lambda value, factor: (value, factor), lambda factor, g: (g * factor, jnp.zeros_like(factor)))


def with_faults(
    wrongs: Sequence[Wrong], model: nnx.Module, mesh: Mesh
) -> tuple[nnx.Module, tuple[Injected, ...]]:
    """The model, open if there are faults that are of something inside it, and those faults.

    Raises:
      ConfigError: no module is meant, naming those that there are, or there is no such device.
    """
    wanted = [wrong for wrong in wrongs if wrong.inside]
    if not wanted:
        return model, ()
    modules = module_paths(model)
    return opened(model), tuple(_injection(wrong, modules, mesh) for wrong in wanted)


def _injection(wrong: Wrong, modules: Mapping[str, Any], mesh: Mesh) -> Injected:
    paths = None if wrong.op is None else frozenset(_meant(wrong.op, modules))
    if paths is not None and not paths:
        raise ConfigError(_nothing(wrong, modules))
    shard = None
    if wrong.device is not None:
        ids = np.vectorize(lambda device: device.id, otypes=[int])(devices_by_shard(mesh))
        found = np.argwhere(ids == wrong.device)
        if not len(found):
            raise ConfigError(
                f"{VARIABLE}: {wrong.text!r}: the mesh has no device {wrong.device}; it has "
                f"{', '.join(map(str, sorted(ids.ravel())))}"
            )
        shard = int(found[0][0])
    return Injected(wrong, paths, shard, batch_shards(mesh), modules)


def _meant(op: str, modules: Mapping[str, Any]) -> list[str]:
    """Paths of the modules that an operator's name or pattern means."""
    if op == LOSS:
        return [LOSS]
    if op not in _OPERATORS:
        return [p for p in modules if fnmatch.fnmatchcase(p, op) or fnmatch.fnmatchcase(p, f"*/{op}")]

    def of_kind(path: str) -> bool:
        names = (path.rpartition("/")[2], type(modules[path]).__name__)
        return bool(path) and any(_OPERATORS[op].search(name.lower()) for name in names)

    found = [path for path in modules if of_kind(path)]
    return [p for p in found if not any(p.startswith(f"{other}/") for other in found)]


def _nothing(wrong: Wrong, modules: Mapping[str, Any]) -> str:
    kinds = [op for op in _OPERATORS if _meant(op, modules)]
    layer = "" if wrong.layer is None else f" in layer {wrong.layer}"
    count = "" if wrong.layer is None else " (layers count from 0; does the model have so many?)"
    there = dict.fromkeys([*kinds, LOSS, *(p for p in modules if p)])
    return f"{VARIABLE}: {wrong.text!r} means no module that is called{layer}; there are {', '.join(there)}{count}"


def refuse_idle(injected: Sequence[Injected]) -> None:
    """Refuses faults that a step, once it is traced, turns out not to contain.

    Raises:
      ConfigError: naming the modules that there are.
    """
    idle = [_nothing(one.wrong, one.modules) for one in injected if not one.struck]
    if idle:
        raise ConfigError(idle)


@contextlib.contextmanager
def injecting(injected: Sequence[Injected], layout: Layout, batch: Any, rows: int) -> Iterator[None]:
    """Model code that is traced inside has the faults.

    Args:
      batch: int32 [], the batch's number.
      rows: of a microbatch here; in the body of a shard_map over axes of the batch, those of its shard.
    """
    if not injected:
        yield
        return
    rows *= math.prod(layout.axis_size(axis) for axis in BATCH_AXES if axis in layout.local)

    def intercept(call: Call, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        value = run(*args, **kwargs)
        for one in injected:
            if one.at(call):
                value = one.acted(call, batch, rows, value)
        return value

    with intercepted(intercept):
        yield

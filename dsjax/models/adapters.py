"""Low-rank adapters (LoRA, Hu et al. 2021), set on a model from outside.

A layer that multiplies by a kernel [*inputs, *outputs] gets two parameters beside it, A [*inputs, rank] and B
[rank, *outputs], and a class of its own, derived from the one that it has, which adds scale * dropout(x) A B to
what the layer gives.  Paths of what was there stay as they are.  Stacked layers have their leading dimensions in A
and B too.  B begins as zeros, so a model with fresh adapters computes what it did before.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.config.lora import LoraConfig
from dsjax.errors import ConfigError
from dsjax.models.layers import Embedding, Linear, Matrix, product

A, B = "lora_a", "lora_b"
"""Names of an adapter's parameters."""
RANK = "rank"
"""Name of the dimension that they share."""
# Apart from all other numbers that are folded into a run's key.
_OF_ADAPTERS = 0x5EED_0003


def is_adapter(path: str) -> bool:
    """Whether a parameter is of an adapter."""
    return path.rpartition("/")[2] in (A, B)


def adapt(model: nnx.Module, config: LoraConfig, key: jax.Array) -> None:
    """Gives a model's layers the adapters that a config asks for, in place.

    They are drawn apart from the model, which is what it would be without. A is drawn as the PEFT library draws it:
    uniform within 1 / sqrt(inputs), as He et al. 2015 have it for a slope of sqrt(5).

    Raises:
      ConfigError: patterns that mean no layer, or one that cannot have an adapter.
    """
    if not config.rank:
        return
    modules, rngs = _modules(model), nnx.Rngs(jax.random.fold_in(key, _OF_ADAPTERS))
    for path in _chosen(modules, config.targets):
        module: Any = modules[path]
        axes, own = _product_of(module)
        shape = module.kernel.shape
        stack, inputs, outputs = _parts(shape, len(shape) - own, len(axes))
        limit = 1 / math.sqrt(math.prod(inputs))
        drawn = jax.random.uniform(rngs.params(), (*stack, *inputs, config.rank), jnp.float32, -limit, limit)
        kind: type = type(module)
        object.__setattr__(module, "__class__", _adapted_class(kind))
        module.lora_a = nnx.Param(drawn)
        module.lora_b = nnx.Param(jnp.zeros((*stack, config.rank, *outputs), jnp.float32))
        module.lora_dropout = _dropout(config.dropout, stack, rngs) if config.dropout else None
        module.lora_scale, module.lora_axes = config.scale, axes


def adapter_axes(
    model: nnx.Module, names_of: Callable[[str], Sequence[str | None] | None]
) -> dict[str, tuple[str | None, ...]]:
    """Logical names of the dimensions of a model's adapters: those of the kernels that they stand beside.

    Args:
      names_of: path of a kernel -> names of its dimensions; None where they are not known.
    """
    found: dict[str, tuple[str | None, ...]] = {}
    for path, module in _modules(model).items():
        names = names_of(f"{path}/kernel".lstrip("/"))
        if not hasattr(module, A) or names is None or len(names) != len(module.kernel.shape):
            continue
        lead, inputs, outputs = _parts(tuple(names), *split_of(module.kernel, module.lora_a, module.lora_b))
        found[f"{path}/{A}".lstrip("/")] = (*lead, *inputs, RANK)
        found[f"{path}/{B}".lstrip("/")] = (*lead, RANK, *outputs)
    return found


def merged(kernel: Any, a: Any, b: Any, scale: float) -> Any:
    """kernel + scale * A B; arrays of numpy or JAX, stacked or not, or boxes of them that belong together."""
    stack, _ = split_of(kernel, a, b)
    lead, rank = kernel.shape[:stack], a.shape[-1]
    added = a.reshape(*lead, -1, rank) @ b.reshape(*lead, rank, -1)
    return kernel + scale * added.reshape(kernel.shape)


def split_of(kernel: Any, a: Any, b: Any) -> tuple[int, int]:
    """(leading dimensions of a stack, dimensions of inputs) of a kernel by its adapter's."""
    stack = a.ndim + b.ndim - kernel.ndim - 2
    return stack, a.ndim - stack - 1


def _parts(whole: Any, stack: int, inputs: int) -> tuple[Any, Any, Any]:
    """What is of the stack, of inputs and of outputs."""
    return whole[:stack], whole[stack : stack + inputs], whole[stack + inputs :]


# ---- which layers --------------------------------------------------------------------------------


def _modules(model: nnx.Module) -> dict[str, Any]:
    """Path -> module."""
    return {"/".join(map(str, path)): m for path, m in nnx.iter_graph(model) if isinstance(m, nnx.Module)}


def _product_of(module: Any) -> tuple[tuple[int, ...], int]:
    """(dimensions of its input that a layer contracts, dimensions of its kernel); no dimensions: it is no such layer.

    One whose class computes otherwise than ours or Flax's is none: what is added would not be of its product.
    """
    call: Any = type(module).__call__
    if call is Linear.__call__:
        return tuple(range(-module.contracted, 0)), module.dimensions
    if call is nnx.Linear.__call__:
        return (-1,), 2
    if call is nnx.LinearGeneral.__call__ and not module.batch_axis:
        return tuple(module.axis), len(module.axis) + len(module.out_features)
    return (), 0


def _chosen(modules: Mapping[str, Any], targets: Sequence[str]) -> list[str]:
    """Paths of the layers that patterns mean; without any, of all that can have an adapter."""
    able = [path for path, module in modules.items() if _product_of(module)[0]]
    if not able:
        raise ConfigError(
            "lora.rank: the model has no layer that an adapter could stand beside: an nnx.Linear, an "
            "nnx.LinearGeneral without batch dimensions or a Linear of dsjax.models.layers; set it to 0"
        )
    if not targets:
        return able
    chosen, faults = set[str](), []
    for pattern in targets:
        meant = [path for path in modules if _means(pattern, path)]
        chosen.update(path for path in meant if path in able)
        if not any(path in able for path in meant):
            faults.append(_meaningless(pattern, {path: modules[path] for path in meant}, able))
    if faults:
        raise ConfigError(faults)
    return [path for path in able if path in chosen]


def _means(pattern: str, path: str) -> bool:
    pattern = pattern.removesuffix("/kernel")
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, f"*/{pattern}")


def _meaningless(pattern: str, meant: Mapping[str, Any], able: Sequence[str]) -> str:
    for path, module in meant.items():
        if isinstance(module, Matrix) or hasattr(module, "kernel") or hasattr(module, "embedding"):
            return f"lora.targets: {path} can have no adapter: {_reason(module)}; leave out {pattern!r}"
    ends = {path.rpartition("/")[2] for path in able}
    near = difflib.get_close_matches(pattern, sorted({*able, *ends}, key=len), 1)
    hint = (
        f"did you mean {near[0]}?"
        if near
        else f"there are {', '.join(able[:6])}{' ...' if len(able) > 6 else ''}"
    )
    return f"lora.targets: no layer is meant by {pattern!r}: {hint}"


def _reason(module: Any) -> str:
    if isinstance(module, Embedding | nnx.Embed):
        return "it is a table that is looked up in"
    if isinstance(module, Matrix):
        return "others multiply by its matrix (a head: the loss; experts: blocks of sorted rows)"
    return (
        f"{type(module).__name__} is no nnx.Linear, nnx.LinearGeneral without batch dimensions or Linear of "
        "dsjax.models.layers, or computes in a way of its own"
    )


# ---- what they add -------------------------------------------------------------------------------


@functools.cache
def _adapted_class(kind: Any) -> Any:
    def call(self: Any, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        y = kind.__call__(self, x, *args, **kwargs)  # type: ignore[operator]
        return y + _added(self, x, y.dtype)

    def matrix(self: Any) -> jax.Array:
        """The kernel with what the adapter adds to it."""
        return merged(self.kernel[...], self.lora_a[...], self.lora_b[...], self.lora_scale)

    names = {"__call__": functools.wraps(kind.__call__)(call), "matrix": matrix}  # type: ignore[operator]
    told = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind)(kind.__name__, (kind,), {**told, **names})


def _added(layer: Any, x: jax.Array, dtype: Any) -> jax.Array:
    """scale * dropout(x) A B, computed in the type of the layer's own product."""
    x = x if layer.lora_dropout is None else layer.lora_dropout(x)
    count, axes = len(layer.lora_axes), sorted(axis % x.ndim for axis in layer.lora_axes)
    x = jnp.moveaxis(x, axes, range(-count, 0)).astype(dtype)
    narrow = product(jax.lax.dot_general, x, layer.lora_a[...].astype(dtype), count)
    return product(jax.lax.dot_general, narrow * layer.lora_scale, layer.lora_b[...].astype(dtype), 1)


def _dropout(rate: float, stack: Sequence[int], rngs: nnx.Rngs) -> nnx.Dropout:
    """A dropout layer, with random streams of its own for each layer of a stack."""

    def make(rngs: nnx.Rngs) -> nnx.Dropout:
        return nnx.Dropout(rate, rngs=rngs)

    for _ in stack:
        make = nnx.vmap(make, in_axes=(0,), out_axes=0)
    for depth in stack:
        make = nnx.split_rngs(splits=depth)(make)
    return make(rngs)

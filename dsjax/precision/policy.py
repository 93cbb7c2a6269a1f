"""Number formats of a model's layers, set from outside the model.

Parameters keep their own type.  Layers whose work is a matrix product or a lookup compute in the
policy's type, if their author left their `dtype` open; normalisations, softmax and losses keep
fp32, as they always compute in fp32 inside.  A layer whose products can be given from outside (`dot_general`)
multiplies in fp8 where the policy says so.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax

from dsjax.config.precision import Fp8Config, PrecisionConfig
from dsjax.errors import ConfigError
from dsjax.precision.delayed import DelayedDot
from dsjax.precision.fp8 import Fp8Dot

POLICIES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16, "fp8": jnp.bfloat16}
"""Name -> type of what is not rounded further."""
_NORMS = (nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm, nnx.BatchNorm)
KINDS = ("matmul", "embedding", "norm")


def compute_dtype(policy: str, platform: str) -> Any:
    """The type of matrix products under a policy ("auto": bf16 on GPU and TPU, fp32 on CPU); bf16 for fp8."""
    if policy == "auto":
        policy = "fp32" if platform == "cpu" else "bf16"
    return POLICIES[policy]


@dataclass(frozen=True)
class Layer:
    """A layer of a model that has a type of its own to compute in."""

    path: str
    module: Any

    @property
    def kind(self) -> str:
        """One of `KINDS`: what the layer says by an attribute `operator`, or Flax's own layers are."""
        known = "norm" if isinstance(self.module, _NORMS) else "matmul"
        return getattr(self.module, "operator", "embedding" if isinstance(self.module, nnx.Embed) else known)

    @property
    def takes_fp8(self) -> bool:
        """Whether its products can be given from outside, and its author gave none."""
        given = getattr(self.module, "dot_general", ...)
        ours = isinstance(given, Fp8Dot | DelayedDot)
        return self.kind == "matmul" and (ours or given in (None, lax.dot_general))

    @property
    def is_open(self) -> bool:
        """Whether its author left its type open; Flax's lookup then has that of its parameters."""
        flax_own = isinstance(self.module, nnx.Embed) and self.module.dtype == self.module.param_dtype
        return self.module.dtype is None or flax_own

    @property
    def at_the_top(self) -> bool:
        """Whether it is an attribute of the model itself, or an entry of a list that is."""
        return sum(not part.isdigit() for part in self.path.split("/")) == 1

    def named(self, pattern: str) -> bool:
        """Whether its kind, its path or, unless it is a norm, the path of what it is part of is meant."""
        within = self.kind != "norm" and fnmatch.fnmatchcase(self.path, f"{pattern}/*")
        return pattern == self.kind or within or fnmatch.fnmatchcase(self.path, pattern)

    @property
    def stack(self) -> tuple[int, ...]:
        """Leading dimensions of its parameters beyond those of one layer."""
        kernel, module = self.module.kernel, self.module
        if isinstance(module, nnx.LinearGeneral):
            own = len(module.axis) + len(module.out_features) + len(module.batch_axis)
        else:
            own = getattr(module, "dimensions", 2)
        return tuple(kernel.shape[: len(kernel.shape) - own])


def layers_of(model: nnx.Module) -> list[Layer]:
    """The layers of a model that have a type to compute in, in the order in which they are attributes."""
    found, seen = [], set()

    def look(path: str, node: Any) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        if isinstance(node, nnx.Module) and hasattr(node, "dtype"):
            found.append(Layer(path, node))
        for name, child in _children(node):
            look(f"{path}/{name}" if path else name, child)

    look("", model)
    return found


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, list | tuple):
        yield from ((str(i), child) for i, child in enumerate(node))
    elif isinstance(node, Mapping):
        yield from ((str(name), child) for name, child in node.items())
    elif isinstance(node, nnx.Module):
        yield from vars(node).items()


@dataclass(frozen=True)
class Policy:
    """Which layer computes in which format.

    Attributes:
      dtype: of products and lookups.
      fp8: how products are scaled; None: they are in `dtype`.
      table: (kind or path, format), the last that fits counts.
      exactly: all in fp32; what delayed scaling keeps is there, and unused.
    """

    dtype: Any = jnp.float32
    fp8: Fp8Config | None = None
    table: tuple[tuple[str, str], ...] = ()
    exactly: bool = False

    @staticmethod
    def of(config: PrecisionConfig, platform: str) -> Policy:
        """That of a config on a platform."""
        everywhere = config.policy == "fp8"
        fp8 = config.fp8 if everywhere or "fp8" in config.table.values() else None
        table = (("matmul", "fp8"),) if everywhere else ()
        return Policy(compute_dtype(config.policy, platform), fp8, (*table, *config.table.items()))

    @property
    def exact(self) -> Policy:
        """The same in fp32."""
        return replace(self, dtype=jnp.dtype(jnp.float32), exactly=True)

    @property
    def is_exact(self) -> bool:
        """Whether all is fp32."""
        return self.exactly or (self.dtype == jnp.float32 and {name for _, name in self.table} <= {"fp32"})

    def kept_apart(self, model: nnx.Module) -> frozenset[str]:
        """Paths of the layers that compute in another type than others."""
        formats = self.formats(model).items()
        return frozenset(path for path, name in formats if POLICIES[name] != self.dtype)

    @property
    def has_fp16(self) -> bool:
        """Whether gradients of something are in fp16, and so need a scale."""
        return self.dtype == jnp.float16 or "fp16" in dict(self.table).values()

    def formats(self, model: nnx.Module) -> dict[str, str]:
        """Path -> format of the layers that the table speaks of.

        Raises:
          ConfigError: an entry that means no layer, or one that cannot have its format.
        """
        layers, chosen, faults = layers_of(model), {}, []
        for pattern, name in self.table:
            meant = [layer for layer in layers if layer.named(pattern)]
            whole = pattern in KINDS
            if not meant and not whole:
                faults.append(_means_nothing(pattern, layers))
            elif name == "fp8":
                able = [layer for layer in meant if layer.takes_fp8]
                meant = _less_the_ends(able) if whole else able
                if not meant:
                    unable = ", ".join(layer.path for layer in layers if layer.named(pattern))
                    faults.append(_NOTHING_IN_FP8 if whole else _NO_FP8.format(pattern, unable))
            chosen.update({layer.path: name for layer in meant})
        if faults:
            raise ConfigError(faults)
        return chosen

    def applied(self, model: nnx.Module, params: Any = jnp.float32) -> nnx.Module:
        """Sets the formats on a model's layers; returns it.

        Args:
          params: the type of the parameters: where it is the policy's too there is nothing to set.

        A layer of the user's own takes part by having a `dtype` attribute; one whose `dtype` is
        already set, and every normalisation, stays as it is but for what the table says.
        """
        layers, formats = layers_of(model), self.formats(model)
        for layer in layers:
            name, module = formats.get(layer.path), layer.module
            if name == "fp8":
                self._multiplies_in_fp8(layer)
            if name in ("fp32", "bf16", "fp16") and not self.exactly:
                module.dtype = POLICIES[name]
            elif layer.is_open and layer.kind != "norm" and not self.dtype == params == jnp.float32:
                module.dtype = self.dtype
        return model

    def _multiplies_in_fp8(self, layer: Layer) -> None:
        assert self.fp8 is not None
        scaling = self.fp8.scaling
        if scaling == "delayed":
            made = DelayedDot(layer.stack, self.fp8.history, not self.exactly)
            layer.module.dot_general = nnx.data(made)
        elif not self.exactly:
            layer.module.dot_general = Fp8Dot(scaling)

    def notes(self, model: nnx.Module) -> list[str]:
        """For people: what is in fp8 and what is not."""
        formats = self.formats(model)
        if self.fp8 is None or self.exactly:
            return []
        able = [layer.path for layer in layers_of(model) if layer.takes_fp8]
        kept = [path for path in able if formats.get(path) != "fp8"]
        but = f"; not in {', '.join(kept[:6])}{' ...' if len(kept) > 6 else ''}" if kept else ""
        inside = len(able) - len(kept)
        return [f"precision: products of {inside} layers in fp8, scaling {self.fp8.scaling}{but}"]


def _less_the_ends(layers: list[Layer]) -> list[Layer]:
    """Those but the model's own first and last layer: what they round, all others or the result depend on."""
    ends = [layer for layer in (layers[:1] + layers[-1:]) if layer.at_the_top and not layer.stack]
    return [layer for layer in layers if layer not in ends]


def _means_nothing(pattern: str, layers: list[Layer]) -> str:
    paths = [layer.path for layer in layers]
    near = difflib.get_close_matches(pattern, [*paths, *KINDS], 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(paths[:6])}, and {', '.join(KINDS)}"
    return f"precision.table: no layer is meant by {pattern!r}: {hint}"


_NO_FP8 = (
    "precision.table: {!r} asks for fp8, and {} cannot multiply in it: a layer can that has an attribute "
    "`dot_general`, called in place of jax.lax.dot_general; give it one, or ask for bf16"
)
_NOTHING_IN_FP8 = (
    "precision: nothing is left that could multiply in fp8: the model's layers have no attribute `dot_general`, or are "
    "its first and last, which keep bf16; name the layers in precision.table, or set precision.policy to bf16"
)

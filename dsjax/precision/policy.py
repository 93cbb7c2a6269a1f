"""Number formats of a model's layers, set from outside the model.

Parameters keep their own type.  Layers whose work is a matrix product or a lookup compute in the
policy's type, if their author left their `dtype` open; normalisations, softmax and losses keep
fp32, as they always compute in fp32 inside.  A layer whose products can be given from outside (`dot_general`)
multiplies in fp8 where the policy says so.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterator, Mapping
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
        """Whether its products can be given from outside, and its author gave none; none of batches of matrices."""
        module = self.module
        own = getattr(module, "dot_general_cls", None) or getattr(module, "batch_axis", None)
        given = getattr(module, "dot_general", ...) in (None, lax.dot_general)
        return self.kind == "matmul" and given and not own

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
        """Leading dimensions of its kernel beyond those of one layer."""
        kernel, module = getattr(self.module, "kernel", None), self.module
        if kernel is None:
            return ()
        if isinstance(module, nnx.LinearGeneral):
            own = len(module.axis) + len(module.out_features)
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
class Applied:
    """What a policy has set on a model.

    Attributes:
      narrow: paths of the layers that compute in the policy's type.
      in_fp8: paths of those that multiply in fp8, in the model's order.
      could_be: paths of those that could and do not.
      momentary: of those in fp8, paths of those that keep no history where the others do.
    """

    narrow: frozenset[str] = frozenset()
    in_fp8: tuple[str, ...] = ()
    could_be: tuple[str, ...] = ()
    momentary: tuple[str, ...] = ()


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
        table = (_OF_FP8,) if everywhere else ()
        return Policy(compute_dtype(config.policy, platform), fp8, (*table, *config.table.items()))

    @property
    def exact(self) -> Policy:
        """The same in fp32."""
        return replace(self, dtype=jnp.dtype(jnp.float32), exactly=True)

    @property
    def is_exact(self) -> bool:
        """Whether all is fp32."""
        return self.exactly or (self.dtype == jnp.float32 and {name for _, name in self.table} <= {"fp32"})

    @property
    def has_fp16(self) -> bool:
        """Whether gradients of something are in fp16, and so need a scale."""
        return self.dtype == jnp.float16 or "fp16" in dict(self.table).values()

    def chosen(self, layers: list[Layer]) -> dict[str, str]:
        """Path -> format of the layers that the table speaks of.

        Raises:
          ConfigError: an entry that means no layer, or one that cannot have its format.
        """
        chosen: dict[str, str] = {}
        faults = []
        for pattern, name in self.table:
            meant = [layer for layer in layers if layer.named(pattern)]
            whole = pattern in KINDS
            policys = whole and (pattern, name) == _OF_FP8
            if not meant and not policys:
                faults.append(_means_nothing(pattern, layers))
            elif name == "fp8":
                able = [layer for layer in meant if layer.takes_fp8]
                meant = _less_the_ends(able) if whole else able
                if not meant:
                    unable = ", ".join(layer.path for layer in layers if layer.named(pattern))
                    faults.append(_NOTHING_IN_FP8 if policys else _NO_FP8.format(pattern, unable))
            chosen.update({layer.path: name for layer in meant})
        if faults:
            raise ConfigError(faults)
        return chosen

    def apply(self, model: nnx.Module, params: Any = jnp.float32) -> Applied:
        """Sets the formats on a model's layers; what was set.

        A layer of the user's own takes part by having a `dtype` attribute; one whose `dtype` is
        already set, and every normalisation, stays as it is but for what the table says.

        Args:
          params: the type of the parameters: where it is the policy's too there is nothing to set.

        Raises:
          ConfigError: a table that does nothing.
        """
        layers = layers_of(model)
        chosen = self.chosen(layers)
        able = [layer.path for layer in layers if layer.takes_fp8]
        narrow = []
        for layer in layers:
            name, module = chosen.get(layer.path), layer.module
            if name == "fp8":
                self._multiplies_in_fp8(layer)
            if name in ("fp32", "bf16", "fp16") and not self.exactly:
                module.dtype = POLICIES[name]
            elif layer.is_open and layer.kind != "norm" and not self.dtype == params == jnp.float32:
                module.dtype = self.dtype
            if module.dtype == self.dtype and layer.kind != "norm":
                narrow.append(layer.path)
        in_fp8 = [layer for layer in layers if chosen.get(layer.path) == "fp8"]
        delayed = self.fp8 is not None and self.fp8.scaling == "delayed"
        return Applied(
            frozenset(narrow),
            tuple(layer.path for layer in in_fp8),
            tuple(path for path in able if chosen.get(path) != "fp8"),
            tuple(layer.path for layer in in_fp8 if delayed and _is_momentary(layer)),
        )

    def _multiplies_in_fp8(self, layer: Layer) -> None:
        assert self.fp8 is not None
        scaling = self.fp8.scaling
        if scaling == "delayed" and _is_momentary(layer):
            scaling = "tensor"
        if scaling == "delayed":
            made = DelayedDot(layer.stack, self.fp8.history, not self.exactly)
            layer.module.dot_general = nnx.data(made)
        elif not self.exactly:
            layer.module.dot_general = Fp8Dot(scaling)

    def notes(self, applied: Applied, left: Collection[str] = ()) -> list[str]:
        """For people: what is in fp8 and what is not, and where nothing is as it was asked for.

        Args:
          left: mesh axes of several devices that are left to the compiler inside of a shard_map.
        """
        if not self.is_exact and not applied.narrow and not self.table:
            name = jnp.dtype(self.dtype).name
            return [
                f"precision: no layer of this model leaves its type open, so none is computed in {name}: a layer takes "
                "part by an attribute `dtype` that is None; a Linen module is given its dtype by its author"
            ]
        if self.fp8 is None or self.exactly:
            return []
        kept = applied.could_be
        but = f"; not in {', '.join(kept[:6])}{' ...' if len(kept) > 6 else ''}" if kept else ""
        how: str = self.fp8.scaling
        if applied.momentary:
            how = f"delayed ({', '.join(applied.momentary)}: by tensor, as a history is of one product)"
        note = [f"precision: products of {len(applied.in_fp8)} layers in fp8, scaling {how}{but}"]
        if self.fp8.scaling == "block" and left:
            note.append(
                "precision.fp8.scaling: inside the exchange between replicas and in a pipeline no kernel by blocks can "
                f"be cut over {', '.join(sorted(left))}: the same rounded numbers are multiplied in TF32; tensor "
                "multiplies in fp8 there"
            )
        return note


def without_fp8(model: nnx.Module) -> None:
    """Has all products made in the layers' own types: a scale of a whole batch makes its rows depend on each other."""
    for layer in layers_of(model):
        if isinstance(getattr(layer.module, "dot_general", None), Fp8Dot | DelayedDot):
            layer.module.dot_general = nnx.static(lax.dot_general)


def _is_momentary(layer: Layer) -> bool:
    """Whether a layer makes several products, or one several times, so that a history of scales is of none of them."""
    return bool(getattr(layer.module, "momentary", False))


def _less_the_ends(layers: list[Layer]) -> list[Layer]:
    """Those but the model's own first and last layer: what they round, all others or the result depend on."""
    ends = [layer for layer in (layers[:1] + layers[-1:]) if layer.at_the_top and not layer.stack]
    return [layer for layer in layers if layer not in ends]


def _means_nothing(pattern: str, layers: list[Layer]) -> str:
    paths = [layer.path for layer in layers]
    if pattern in KINDS:
        there = dict.fromkeys(layer.kind for layer in layers)
        return f"precision.table: the model has no layer of kind {pattern}; it has {', '.join(there)}"
    tied = " (a head that is tied to the embedding is of its format)" if pattern == "head" else ""
    # What layers are part of, too: `layers/mlp` means all in it.
    parts = {"/".join(path.split("/")[:i]) for path in paths for i in range(1, path.count("/") + 1)}
    near = difflib.get_close_matches(pattern, sorted({*paths, *parts, *KINDS}, key=len), 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(paths[:6])}, and {', '.join(KINDS)}"
    return f"precision.table: no layer is meant by {pattern!r}{tied}: {hint}"


# The policy fp8, as an entry of the table.
_OF_FP8 = ("matmul", "fp8")
_NO_FP8 = (
    "precision.table: {!r} asks for fp8, and {} cannot multiply in it: a layer can that has an attribute "
    "`dot_general`, called in place of jax.lax.dot_general; give it one, or ask for bf16"
)
_NOTHING_IN_FP8 = (
    "precision: nothing is left that could multiply in fp8: the model's layers have no attribute `dot_general`, or are "
    "its first and last, which keep bf16; name the layers in precision.table, or set precision.policy to bf16"
)

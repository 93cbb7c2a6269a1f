"""Where every parameter and activation lives: logical axis names to mesh axes.

Two tables, one for parameters and one for activations; ZeRO-3 is that the two differ.  A model
names the dimensions of its parameters in a table beside its code (path pattern -> logical names);
a parameter without an entry is cut over `fsdp` along its largest dimension that divides.
"""

from __future__ import annotations

import contextlib
import contextvars
import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.errors import ConfigError
from dsjax.mesh.axes import AXES, BATCH_AXES, SHARD_AXES, divisors
from dsjax.mesh.paths import map_named, named_leaves

Names = Sequence[str | None]

# The mesh axis, and the name of a parameter's dimension, of experts.
_EXPERT = "expert"
# Matrices: inputs along one of these, outputs along the other (rows vanish where `tensor` is one number).
_BOTH = ("tensor", "tensor_rows")

PARAM_RULES: Mapping[str, tuple[str, ...]] = {
    "layers": (), "embed": ("tensor_rows", *SHARD_AXES), "mlp": ("tensor",), "heads": ("tensor",),
    "kv_heads": ("tensor",), "head_dim": (), "vocab": ("tensor",), "expert": ("expert",), "rank": (),
}  # fmt: skip
ACTIVATION_RULES: Mapping[str, tuple[str, ...]] = {
    "batch": BATCH_AXES, "sequence": ("context",), "residual": ("context", "tensor"),
    "embed": ("tensor_rows",), "mlp": _BOTH, "heads": _BOTH, "kv_heads": _BOTH, "head_dim": (),
    "vocab": _BOTH, "columns": ("tensor",), "expert": ("expert",), "layers": (),
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """A mesh and the tables that say how a model lies on it.

    Attributes:
      mesh: the device mesh, with all axes.
      param_axes: path pattern (fnmatch) -> logical names, one a dimension.
      fsdp_gather: "layer" (gather as layers run) or "step" (once, before the first layer).
      gather_dtype: type in which named matrices are gathered and their gradients scattered: the one they
        are used in; None: their own.
      gather_narrow: paths of the layers that are used in that type; others' are gathered as they are kept.
      stacked: path of the stack of layers whose leading dimension is cut over `pipeline`; None: there is none.
      layers: path of the stack of layers, whether stages share it or not; None: it is not known.
      local: mesh axes that the code being traced is already inside of (the body of a shard_map over them); no
        spec names them then.
      places: with `local`, path -> where a parameter lies at rest.
    """

    mesh: Mesh
    param_axes: Mapping[str, Names] = field(default_factory=dict)
    fsdp_gather: str = "layer"
    gather_dtype: Any = None
    gather_narrow: frozenset[str] = frozenset()
    stacked: str | None = None
    layers: str | None = None
    local: tuple[str, ...] = ()
    places: Mapping[str, P] = field(default_factory=dict)
    param_rules: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: PARAM_RULES)
    activation_rules: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: ACTIVATION_RULES)

    @property
    def exact(self) -> Layout:
        """The same where parameters are gathered as they are stored."""
        return replace(self, gather_dtype=None)

    def gathered_as(self, path: str, dtype: Any) -> Any:
        """The type in which a matrix of a type is gathered."""
        narrow = self.gather_dtype is not None and path.rpartition("/")[0] in self.gather_narrow
        return self.gather_dtype if narrow else dtype

    def axis_size(self, axis: str) -> int:
        """Devices along a mesh axis."""
        return self.mesh.shape[axis]

    @property
    def on_cpu(self) -> bool:
        """Whether its devices are a CPU's; the mesh of a plan's formulas has none."""
        return isinstance(self.mesh, Mesh) and self.mesh.devices.flat[0].platform == "cpu"

    @property
    def alone(self) -> bool:
        """Whether no axis is left over which anything could be cut here."""
        return all(size == 1 or axis in self.local for axis, size in self.mesh.shape.items())

    def _cut(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Those of more than one device that are not left behind already."""
        return tuple(a for a in axes if self.mesh.shape[a] > 1 and a not in self.local)

    def active(self, name: str) -> tuple[str, ...]:
        """The mesh axes of more than one device over which an activation's axis is cut."""
        return self._cut(_axes_of(self.activation_rules, name))

    def fitting(self, name: str | None, extent: int) -> tuple[str, ...]:
        """The axes over which an activation's dimension of this extent is cut: the first that divide it."""
        axes = self.active(name) if name is not None else ()
        while extent % math.prod(self.mesh.shape[a] for a in axes):
            axes = axes[:-1]
        return axes

    def spec(self, names: Names) -> P:
        """PartitionSpec of an activation whose dimensions have these logical names."""
        return P(*(self._entry(self.activation_rules, name) for name in names))

    def sharding(self, *names: str | None) -> NamedSharding:
        """Sharding of an activation whose dimensions have these logical names."""
        return NamedSharding(self.mesh, self.spec(names))

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The mesh axes of more than one device over which parameters are gathered to be used."""
        return self._cut(SHARD_AXES)

    @property
    def gather_axes(self) -> tuple[str, ...]:
        """The mesh axes over which a parameter is still cut where a layer gets it."""
        axes = SHARD_AXES if self.fsdp_gather == "layer" else ()
        return tuple(a for a in axes if self.mesh.shape[a] > 1)

    def place(self, spec: P) -> NamedSharding:
        """A sharding over the mesh as it is seen from here."""
        return NamedSharding(jax.sharding.get_abstract_mesh() if self.local else self.mesh, spec)

    def shard_map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` over each device's own part of its arguments; itself on one device.

        Where no axis is left it is wrapped all the same: operations with a partitioning of their own (cuDNN's
        attention) do not compile in a shard_map that leaves axes to the compiler.
        """
        left = set(AXES) - set(self.local)
        if self.mesh.size == 1 or not left:
            return function
        return jax.shard_map(
            function,
            mesh=jax.sharding.get_abstract_mesh() if self.local else self.mesh,
            axis_names=left,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def _entry(
        self, rules: Mapping[str, tuple[str, ...]], name: str | None, without: Sequence[str] = ()
    ) -> tuple[str, ...] | str | None:
        axes = tuple(a for a in self._cut(_axes_of(rules, name)) if a not in without)
        return (axes[0] if len(axes) == 1 else axes) or None

    def names_of(self, path: str) -> Names | None:
        """Logical names of a parameter's dimensions; None where the model declares none."""
        if path in self.param_axes:
            return self.param_axes[path]
        for pattern, names in self.param_axes.items():
            if fnmatch.fnmatchcase(path, pattern):
                return names
        return None

    def optimizer_names(self, path: str) -> Names | None:
        """`names_of`, or ("layers",) where no more is known than that a parameter is of stacked layers."""
        names = self.names_of(path)
        in_stack = self.layers is not None and path.startswith(f"{self.layers}/")
        return ("layers",) if names is None and in_stack else names

    def param_spec(self, path: str, shape: Sequence[int]) -> P:
        """PartitionSpec of a parameter at rest (also of its gradient and optimizer state)."""
        names = self.names_of(path)
        if names is not None and len(names) != len(shape):
            names = None

        def cut(skip: int) -> P:
            return (
                self._largest_dimension(shape[skip:]) if names is None else self.param_entries(names[skip:])
            )

        if self.axis_size("pipeline") == 1:
            return cut(0)
        return P("pipeline", *cut(1)) if self.in_stack(path) else self._over_stages(cut(0), shape)

    def spec_here(self, path: str, shape: Sequence[int]) -> P:
        """`param_spec` as it is seen from here: of the axes that are not left behind, also of one layer's slice."""
        if not self.local:
            return self.param_spec(path, shape)
        entries = tuple(self.places.get(path, P()))[-len(shape) :] if shape else ()
        return P(*(self._cut(axes_of_entry(entry)) or None for entry in entries))

    def in_stack(self, path: str) -> bool:
        """Whether a variable is one of the stack of layers that the stages share."""
        return self.stacked is not None and f"{path}/".startswith(f"{self.stacked}/")

    def _over_stages(self, spec: P, shape: Sequence[int]) -> P:
        """The place of what all stages hold, cut over them too: along the largest dimension that divides.

        One that `tensor` cuts already is the last choice: XLA would gather the array whole over both.
        """
        entries = [axes_of_entry(entry) for entry in spec] + [()] * (len(shape) - len(spec))
        stages = self.axis_size("pipeline")

        def divides(i: int) -> bool:
            return shape[i] % (stages * math.prod(self.mesh.shape[a] for a in entries[i])) == 0

        fitting = [
            (not {"tensor", "tensor_rows"} & set(entries[i]), extent, -i)
            for i, extent in enumerate(shape)
            if extent and divides(i)
        ]
        if fitting:
            axes = entries[i := -max(fitting)[2]]
            # Before `context`, over which the compiler gathers later, inside the stages.
            at = axes.index("context") if "context" in axes else len(axes)
            entries[i] = (*axes[:at], "pipeline", *axes[at:])
        return P(*(axes[0] if len(axes) == 1 else axes or None for axes in entries))

    def param_entries(self, names: Names, without: Sequence[str] = ()) -> P:
        """PartitionSpec of a parameter whose dimensions have these names; without SHARD_AXES as it is used.

        A dimension of experts stays cut over `expert`, and no other of the same parameter is.
        """
        if _EXPERT not in names:
            return P(*(self._entry(self.param_rules, name, without) for name in names))
        kept, others = [a for a in without if a != _EXPERT], [*without, _EXPERT]
        return P(*(self._entry(self.param_rules, n, kept if n == _EXPERT else others) for n in names))

    def gathered_over(self, path: str) -> tuple[str, ...]:
        """The mesh axes over which a parameter is gathered to be used: not `expert` if it is of experts."""
        experts = _EXPERT in (self.names_of(path) or ())
        return tuple(axis for axis in SHARD_AXES if not (experts and axis == _EXPERT))

    def _largest_dimension(self, shape: Sequence[int]) -> P:
        for axes in dict.fromkeys((self.shard_axes, self.shard_axes[:1])):
            parts = math.prod(self.mesh.shape[a] for a in axes)
            fitting = [(extent, -i) for i, extent in enumerate(shape) if extent and extent % parts == 0]
            if axes and fitting:
                return P(*(None,) * -max(fitting)[1], axes if len(axes) > 1 else axes[0])
        return P()

    def param_shardings(self, params: Any) -> Any:
        """The tree's shardings at rest; `params` may be abstract."""
        return map_named(
            lambda path, leaf: NamedSharding(self.mesh, self.param_spec(path, leaf.shape)), params
        )

    def check(self, params: Any) -> None:
        """Refuses parameters that do not divide over the mesh.

        Raises:
          ConfigError: a line a fault, naming parameter, dimension, axis and what would work.
        """
        leaves = named_leaves(params)
        faults, indivisible = self._expert_faults(leaves), False
        for path, leaf in leaves.items():
            names = self.names_of(path)
            if names is not None and len(names) != len(leaf.shape):
                faults.append(
                    f"{path}: the sharding table names {len(names)} dimensions {tuple(names)} but the "
                    f"parameter has shape {tuple(leaf.shape)}"
                )
                continue
            for index, name in enumerate(names or ()):
                for axes in self._cuts_of(name, names or (), f"{path}: "):
                    parts = math.prod(self.mesh.shape[a] for a in axes)
                    if leaf.shape[index] % parts:
                        indivisible = True
                        cut = " x ".join(a.replace("_", " ") for a in axes if self.mesh.shape[a] > 1)
                        faults.append(
                            f"{path}: dimension {index} ({name}, {leaf.shape[index]}) does not divide over "
                            f"mesh.{cut} {parts}"
                        )
                        break
        if faults:
            shown = faults[:6] + ([f"... and {len(faults) - 6} more parameters"] if len(faults) > 6 else [])
            raise ConfigError([*shown, self._layout_that_works(leaves)] if indivisible else shown)

    def _expert_faults(self, leaves: Mapping[str, Any]) -> list[str]:
        """What is wrong with the number of shards of experts: there are none, or it does not divide them."""
        shards, experts = self.axis_size(_EXPERT), set()
        for path, leaf in leaves.items():
            names = list(self.names_of(path) or ())
            if _EXPERT in names and len(names) == len(leaf.shape):
                experts.add(leaf.shape[names.index(_EXPERT)])
        if shards > 1 and not experts:
            return [
                f"mesh.expert: {shards} shards of experts, but no parameter of this model is of experts (has a "
                "dimension named expert in its sharding table); set mesh.expert=1 and give the devices to mesh.fsdp "
                "or mesh.data"
            ]
        return [
            f"mesh.expert: {shards} shards do not divide {number} experts; use one of "
            f"{', '.join(map(str, divisors(number)))}"
            for number in sorted(experts)
            if number % shards
        ]

    def _cuts_of(self, name: str | None, names: Names, where: str = "") -> list[tuple[str, ...]]:
        """The axes that a dimension of this name is cut over, as a parameter's and as what comes of it.

        Args:
          names: those of all of the parameter's dimensions.
        """
        rules = (
            (self.param_rules, self.activation_rules)
            if name in self.activation_rules
            else (self.param_rules,)
        )
        found = (_axes_of(rule, name, where) for rule in rules)
        if _EXPERT in names and name != _EXPERT:
            found = (tuple(axis for axis in axes if axis != _EXPERT) for axes in found)
        return list(dict.fromkeys(axes for axes in found if axes))

    def _layout_that_works(self, leaves: Mapping[str, Any]) -> str:
        """The mesh nearest to this one, of as many devices, on which every parameter divides."""
        common: dict[tuple[str, ...], int] = {}
        for path, leaf in leaves.items():
            names = self.names_of(path) or ()
            for name, extent in zip(names, leaf.shape, strict=False):
                for axes in self._cuts_of(name, names):
                    common[axes] = math.gcd(common.get(axes, 0), extent)
        sizes = dict(self.mesh.shape)
        devices = math.prod(sizes.values())
        for axes, extent in common.items():
            for axis in axes:
                sizes[axis] = max(d for d in divisors(math.gcd(extent, devices)) if d <= sizes[axis])
                extent //= math.gcd(extent, sizes[axis])
        sizes["data"] = 1
        sizes["data"] = max(1, devices // math.prod(sizes.values()))
        if math.prod(sizes.values()) != devices:
            sizes = dict.fromkeys(sizes, 1) | {"data": devices}
        rows = sizes.pop("tensor_rows")
        shown: dict[str, Any] = sizes | ({"tensor": f"[{sizes['tensor']},{rows}]"} if rows > 1 else {})
        # A run without stages needs no word of them.
        unsaid = () if self.mesh.shape["pipeline"] > 1 else ("pipeline",)
        chosen = " ".join(f"mesh.{axis}={size}" for axis, size in shown.items() if axis not in unsaid)
        return f"a layout that divides: {chosen}"


def _axes_of(rules: Mapping[str, tuple[str, ...]], name: str | None, where: str = "") -> tuple[str, ...]:
    """The mesh axes of a logical name; a mesh axis's own name stands for itself."""
    if name is None:
        return ()
    if name in rules:
        return rules[name]
    if name in AXES:
        return (name,)
    raise ConfigError(
        f"{where}{name!r} names no axis; takes None, a logical name ({', '.join(rules)}) "
        f"or a mesh axis ({', '.join(AXES)})"
    )


_current: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("layout", default=None)


def current_layout() -> Layout | None:
    """The layout under which code is being traced; None outside any."""
    return _current.get()


@contextlib.contextmanager
def use_layout(layout: Layout | None) -> Iterator[Layout | None]:
    """Traces the code inside under a layout."""
    token = _current.set(layout)
    try:
        yield layout
    finally:
        _current.reset(token)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Pins an activation to its place by the logical names of its dimensions; a no-op without a mesh.

    A dimension that its axes do not divide is cut over the first of them that do.
    """
    layout = _current.get()
    if layout is None or layout.alone:
        return x
    spec = P(*(layout.fitting(name, extent) or None for name, extent in zip(names, x.shape, strict=True)))
    return jax.lax.with_sharding_constraint(x, layout.place(spec))


def axes_of_entry(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def manual(
    function: Callable[..., Any], in_names: Sequence[Names], out_names: Sequence[Names] | Names
) -> Callable[..., Any]:
    """`function` over each device's own part of its arguments (a shard_map over every mesh axis).

    Args:
      function: gets and returns local arrays; may use collectives over mesh axes.
      in_names: for each argument, the logical activation names of its dimensions.
      out_names: likewise for each result; for a single result its names alone, flat.

    Returns:
      The function of global arrays; `function` itself where there is one device or no layout.
    """
    layout = _current.get()
    if layout is None or layout.mesh.size == 1:
        return function
    single = all(name is None or isinstance(name, str) for name in out_names)
    out_specs: Any = (
        layout.spec(out_names) if single else tuple(layout.spec(names) for names in out_names)  # type: ignore[arg-type]
    )
    return layout.shard_map(function, tuple(layout.spec(names) for names in in_names), out_specs)

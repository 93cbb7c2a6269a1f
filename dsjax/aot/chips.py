"""What a chip can do: speed, memory, links, power, price; the table `chips.yaml` and files like it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dsjax.config.fields import Takes
from dsjax.config.messages import nearest, section_of, takes, unknown_key, walk
from dsjax.config.yaml_core import Leaf, Tree, YamlFault, parse, show
from dsjax.errors import ConfigError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Dtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "int8"]
_TYPES = get_args(Dtype)

# Where a chip has no unit for a type, products run in the next of these that it has.
_WIDER: Mapping[str, tuple[str, ...]] = {
    "fp8": ("bf16", "fp16", "fp32"), "int8": ("bf16", "fp16", "fp32"), "bf16": ("fp16", "tf32", "fp32"),
    "fp16": ("bf16", "tf32", "fp32"), "tf32": ("fp32", "bf16"), "fp32": ("tf32", "bf16"),
}  # fmt: skip


# XLA multiplies f32 in TF32 where a GPU can, unless a product asks for more than jax's default precision:
# the PTX of a default product for an H100 (jax 0.10.2) has tf32 in it, that of precision="highest" has not.
_HLO_NAMES = {"f32": "tf32", "f16": "fp16", "s8": "int8", "u8": "int8"}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Memory(_Section):
    """Device memory: bytes, and bytes/s."""

    bytes: Annotated[int, Field(gt=0)]
    bandwidth: Positive


class Link(_Section):
    """A link as one device sees it: bytes/s a direction, seconds a message."""

    name: str
    bandwidth: Positive
    latency: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class XlaDevice(_Section):
    """What XLA asks of a GPU that is not there."""

    description: str
    capability: Annotated[str, Field(pattern=r"^\d+\.\d+$"), Takes('a compute capability in quotes ("9.0")')]
    cores: Annotated[int, Field(gt=0)]
    fpus_per_core: Annotated[int, Field(gt=0)]
    clock_ghz: Positive
    l2_bytes: Annotated[int, Field(gt=0)]
    shared_bytes_per_core: Annotated[int, Field(gt=0)]
    shared_bytes_optin: Annotated[int, Field(gt=0)]
    threads_per_core: Annotated[int, Field(gt=0)]


class Chip(_Section):
    """One kind of device.

    Attributes:
      peak: type -> dense FLOP/s.
      node, network: the links inside a node and between nodes.
      devices: devices in a node; domain: devices that the node's link joins, None: those of a node.
      watts: board power; price: US dollars an hour of one device.
      xla: GPUs only.
    """

    name: str
    vendor: str
    kind: Literal["gpu", "tpu", "cpu"]
    peak: Annotated[
        dict[Dtype, Positive], Takes(f"types ({', '.join(_TYPES)}), each with its FLOP/s (a number > 0)")
    ]
    memory: Memory
    node: Link
    network: Link
    devices: Annotated[int, Field(gt=0)]
    domain: Annotated[int, Field(gt=0)] | None = None
    watts: Positive
    price: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    xla: XlaDevice | None = None

    def __hash__(self) -> int:
        return hash(self.name)

    def unit(self, dtype: str) -> str:
        """The type of `peak` in which products of a type run: its own, or the next wider one that there is.

        Args:
          dtype: as in `peak` (`bf16`, `fp32`, `fp8`) or as HLO writes it (`f32`, `f8e4m3fn`, `s8`). An `f32`
            is of jax's default precision, TF32 where the chip has it; an `fp32` is exact.
        """
        dtype = "fp8" if dtype.startswith("f8") else _HLO_NAMES.get(dtype, dtype)
        for name in (dtype, *_WIDER.get(dtype, ("fp32",))):
            if name in self.peak:
                return name
        return min(self.peak, key=lambda name: self.peak[name])

    def flops(self, dtype: str) -> float:
        """Dense FLOP/s of products of a type (see `unit`)."""
        return self.peak[self.unit(dtype)]  # type: ignore[index]


def load_chips(path: str | Path | None = None) -> dict[str, Chip]:
    """The chips of `chips.yaml`, changed and added to by a file of the same form.

    Args:
      path: a YAML file: chip name -> what differs from the chip of that name, or from the one that
        `extends` names.

    Raises:
      ConfigError: the file cannot be read or says what a chip cannot be, a line a fault.
    """
    entries = _entries(files("dsjax.aot").joinpath("chips.yaml").read_text(encoding="utf-8"), "chips.yaml")
    where = dict.fromkeys(entries, "chips.yaml")
    if path is not None:
        for name, entry in _entries(_text(path), str(path)).items():
            entries[name] = _merged(entries[name], entry) if name in entries else entry
            where[name] = str(path)
    chips: dict[str, Chip] = {}
    faults: list[str] = []
    for name, entry in entries.items():
        try:
            whole = _resolved(name, entries, ())
        except ConfigError as error:
            faults += [f"{line} [{where[name]}]" for line in error.faults]
            continue
        try:
            chips[name] = Chip.model_validate({"name": name, **_plain(whole)})
        except ValidationError as error:
            faults += _faults(error, name, entry, whole, where[name])
    if faults:
        raise ConfigError(faults)
    return chips


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: the file of chips cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: the file of chips is not UTF-8 text") from None


def _entries(text: str, where: str) -> dict[str, Tree]:
    try:
        tree = parse(text, lambda line: f"{where}:{line}")
    except YamlFault as fault:
        raise ConfigError(f"{where}:{fault.line}: is not YAML: {fault}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: takes chip names, each with a mapping of what differs")
    faults, entries = [], dict[str, Tree]()
    for name, entry in tree.items():
        if isinstance(entry, Leaf) and entry.value != {}:
            faults.append(
                f"{name}: a chip takes a mapping of what differs, got {entry.shown} [{entry.where}]"
            )
        entries[name] = entry if isinstance(entry, dict) else {}
        given = entries[name].get("name")
        if isinstance(given, Leaf):
            faults.append(_unknown(f"{name}.name", given.shown, Chip, name) + f" [{given.where}]")
    if faults:
        raise ConfigError(faults)
    return entries


def _plain(tree: Tree) -> dict[str, Any]:
    return {key: value.value if isinstance(value, Leaf) else _plain(value) for key, value in tree.items()}


def _merged(base: Tree, over: Tree) -> Tree:
    """`over` laid on `base`, mapping by mapping."""
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merged(out[key], value) if both else value
    return out


def _resolved(name: str, entries: Mapping[str, Tree], above: tuple[str, ...]) -> Tree:
    """An entry with what it extends filled in."""
    if name in above:
        raise ConfigError(f"{above[0]}: extends itself by way of {' and '.join(above[1:] or (name,))}")
    entry = dict(entries[name])
    base = entry.pop("extends", None)
    if base is None:
        return entry
    named = str(base.value) if isinstance(base, Leaf) else "a mapping"
    if named not in entries:
        known = {key: entry for key, entry in entries.items() if key != name}
        raise ConfigError(f"{name}.extends: {unknown_chip(named, known)}")
    return _merged(_resolved(named, entries, (*above, name)), entry)


# ---- faults ----------------------------------------------------------------------------------


def _faults(error: ValidationError, name: str, own: Tree, whole: Tree, where: str) -> list[str]:
    """A line for each thing that is wrong with a chip; what it inherits is told where it stands."""
    found = []
    for item in error.errors(include_url=False):
        loc = [str(part) for part in item["loc"] if part != "[key]"]
        leaf = _leaf(whole, loc)
        if _leaf(own, loc) is not leaf or (leaf is None and "extends" in own):
            continue
        key = ".".join([name, *loc])
        shown = leaf.shown if leaf is not None and leaf.value is item["input"] else show(item["input"])
        holder, wanted = _type_at(loc)
        if item["type"] == "missing":
            line = f"{key}: is missing; it takes {wanted}, or let the chip extend another (extends: H100)"
        elif item["type"] == "extra_forbidden" and holder is not None:
            line = _unknown(key, shown, holder, name)
        elif item["loc"][-1] == "[key]":
            line = unknown_key(key, leaf.shown if leaf is not None else shown, _TYPES)
        else:
            line = f"{key}: takes {wanted}, got {shown}"
        found.append(f"{line} [{leaf.where if leaf is not None else where}]")
    return found


def _unknown(key: str, shown: str, holder: type[BaseModel], chip: str) -> str:
    siblings = ["extends", *list(Chip.model_fields)[1:]] if holder is Chip else list(holder.model_fields)
    return unknown_key(key, shown, siblings, (other for other, _ in walk(Chip, f"{chip}.")))


def _leaf(tree: Tree, loc: Sequence[str]) -> Leaf | None:
    """What a file gives at a place, the first of several where it gives a mapping."""
    node: Tree | Leaf | None = tree
    for part in loc:
        if isinstance(node, Leaf):
            return node
        node = node.get(part) if node is not None else None
    while isinstance(node, dict):
        node = next(iter(node.values()), None)
    return node


def _type_at(loc: Sequence[str]) -> tuple[type[BaseModel] | None, str]:
    """The section that holds a place of a chip, and what the place takes, in words."""
    holder: type[BaseModel] | None = Chip
    wanted = ""
    for part in loc:
        if holder is None:
            return None, takes(Positive)  # of `peak`
        field = holder.model_fields.get(part)
        if field is None:
            return holder, ""
        wanted, last = takes(field.annotation, field.metadata), holder
        inner = (field.annotation, *get_args(field.annotation))
        holder = next((section for one in inner if (section := section_of(one))), None)
    return last, wanted


def unknown_chip(name: str, chips: Mapping[str, Any]) -> str:
    """The line for a chip that the table does not have."""
    lower = {known.lower(): known for known in chips}
    close = nearest(name.lower(), lower, 0.5)
    guess = f"did you mean {lower[close]}? " if close else ""
    return f"no chip is called {name}; {guess}known: {', '.join(chips)} (a file of your own can add more)"

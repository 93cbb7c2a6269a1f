"""What a chip can do: speed, memory, links, power, price; the table `chips.yaml` and files like it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dsjax.config.messages import nearest
from dsjax.config.yaml_core import Leaf, YamlFault, parse
from dsjax.errors import ConfigError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Dtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "int8"]

# Where a chip has no unit for a type, products run in the next of these that it has.
_WIDER: Mapping[str, tuple[str, ...]] = {
    "fp8": ("bf16", "fp16", "fp32"), "int8": ("bf16", "fp16", "fp32"), "bf16": ("fp16", "tf32", "fp32"),
    "fp16": ("bf16", "tf32", "fp32"), "tf32": ("fp32", "bf16"), "fp32": ("tf32", "bf16"),
}  # fmt: skip


_HLO_NAMES = {"f32": "fp32", "f16": "fp16", "s8": "int8", "u8": "int8"}


def type_name(dtype: str) -> str:
    """A type as `Chip.peak` names it, also of a name that HLO writes (`f32`, `f8e4m3fn`, `s8`)."""
    return "fp8" if dtype.startswith("f8") else _HLO_NAMES.get(dtype, dtype)


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
    capability: Annotated[str, Field(pattern=r"^\d+\.\d+$")]
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
    peak: dict[Dtype, Positive]
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

    def flops(self, dtype: str) -> float:
        """Dense FLOP/s in a type; in the next wider one where the chip has none for it.

        Args:
          dtype: as in `peak` (`bf16`, `fp32`, `fp8`) or as HLO writes it (`f32`, `f8e4m3fn`, `s8`).
        """
        dtype = type_name(dtype)
        for name in (dtype, *_WIDER.get(dtype, ("fp32",))):
            if name in self.peak:
                return self.peak[name]  # type: ignore[index]
        return min(self.peak.values())


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
    for name in entries:
        try:
            chips[name] = Chip(**_resolved(name, entries, ()), name=name)
        except ValidationError as error:
            faults += [_fault(where[name], name, item) for item in error.errors(include_url=False)]
        except ConfigError as error:
            faults += [f"{where[name]}: {line}" for line in error.faults]
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


def _entries(text: str, where: str) -> dict[str, dict[str, Any]]:
    try:
        tree = parse(text, lambda line: f"{where}:{line}")
    except YamlFault as fault:
        raise ConfigError(f"{where}:{fault.line}: is not YAML: {fault}") from None
    values = _plain(tree)
    if not isinstance(values, dict) or not all(isinstance(v, dict) for v in values.values()):
        raise ConfigError(f"{where}: takes chip names, each with a mapping of what differs")
    return values


def _plain(tree: Any) -> Any:
    if isinstance(tree, Leaf):
        return tree.value
    return {key: _plain(value) for key, value in (tree or {}).items()}


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, mapping by mapping."""
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merged(out[key], value) if both else value
    return out


def _resolved(name: str, entries: Mapping[str, Any], above: tuple[str, ...]) -> dict[str, Any]:
    """An entry with what it extends filled in."""
    if name in above:
        raise ConfigError(f"{above[0]}: extends itself by way of {' and '.join(above[1:] or (name,))}")
    entry = dict(entries[name])
    base = entry.pop("extends", None)
    if base is None:
        return entry
    if base not in entries:
        raise ConfigError(f"{name}.extends: {unknown_chip(str(base), entries)}")
    return _merged(_resolved(base, entries, (*above, name)), entry)


def _fault(where: str, name: str, item: Mapping[str, Any]) -> str:
    key = ".".join([name, *map(str, item["loc"])])
    if item["type"] == "missing":
        return f"{where}: {key}: is missing; give it, or let the chip extend another (extends: H100)"
    if item["type"] == "extra_forbidden":
        close = nearest(
            str(item["loc"][-1]), [*Chip.model_fields, *Link.model_fields, *XlaDevice.model_fields]
        )
        return f"{where}: {key}: unknown key{f'; did you mean {close}?' if close else ''}"
    return f"{where}: {key}: {item['msg'][:1].lower()}{item['msg'][1:]}, got {item['input']!r}"


def unknown_chip(name: str, chips: Mapping[str, Any]) -> str:
    """The line for a chip that the table does not have."""
    lower = {known.lower(): known for known in chips}
    close = nearest(name.lower(), lower, 0.5)
    guess = f"did you mean {lower[close]}? " if close else ""
    return f"no chip is called {name}; {guess}known: {', '.join(chips)} (a file of your own can add more)"

"""Adapters in the layout of the PEFT library: adapter_config.json and adapter_model.safetensors.

Its A is [rank, inputs], its B [outputs, rank], of a module in Hugging Face's names.  Where one of its modules is
several of our layers side by side (GPT-2's c_attn), theirs is one adapter of as many times the rank: A one below the
other, B along the diagonal.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from dsjax.config.lora import LoraConfig
from dsjax.errors import ConfigError, InputError
from dsjax.files import write_atomically
from dsjax.hf.save import DTYPES
from dsjax.hf.tensors import Tensors
from dsjax.models.adapters import RANK, A, B, is_adapter
from dsjax.models.weights import Box, Entry, Get, WeightMap

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class _Part:
    """The rows of a module's outputs that one of our layers is.

    Attributes:
      name: of the part, as of a module.
      start, extent: the first of its rows; of all of the module's.
    """

    name: str
    start: int
    extent: int


class Adapters:
    """The adapters of a model, as PEFT names and lays them out.

    Args:
      weights: the model's own map.
      shapes: path -> shape of the model's parameters, in its order of layers; others than adapters' are left out.

    Attributes:
      map: from our adapters to a pair of tensors for each of our layers.
      parts: module -> its parts, where our layers are parts of it.
      transposed: modules keep their matrices [inputs, outputs].

    Raises:
      ConfigError: an adapter beside a matrix that is no module of theirs.
    """

    def __init__(self, weights: WeightMap, shapes: Mapping[str, Sequence[int]]):
        own = {path: tuple(shape) for path, shape in shapes.items() if is_adapter(path)}
        self._modules = {name.removesuffix(".weight") for name in weights.tensors if name.endswith(".weight")}
        self.parts: dict[str, list[_Part]] = {}
        self.transposed = False
        entries: list[Entry] = []
        for layer in dict.fromkeys(path.rpartition("/")[0] for path in own):
            entries += self._entries(layer, weights, len(own[f"{layer}/{A}"]) - 1)
        self.map = WeightMap(entries, own, prefix=_PREFIX)
        for name in self.map.tensors:
            part = name.removeprefix(_PREFIX).rpartition(".lora_")[0]
            module, _, rows = part.partition("[")
            first, _, extent = rows.removesuffix("]").partition(" of ")
            held = self.parts.setdefault(module, [])
            if rows and part not in [one.name for one in held]:
                held.append(_Part(part, int(first), int(extent)))

    def _entries(self, layer: str, weights: WeightMap, ends: int) -> Iterator[Entry]:
        """Entries of a layer's adapter.

        Args:
          ends: dimensions of the stack and of inputs, together.
        """
        found = weights.entries(f"{layer}/kernel") if f"{layer}/kernel" in weights.shapes else []
        if len(found) != 1 or not found[0].tensor.endswith(".weight"):
            raise ConfigError(f"lora.targets: {layer} is no module of Hugging Face's model; leave it out")
        [entry] = found
        ours, _, theirs = (side.strip() for side in entry.pattern.partition("->"))
        count = ends - weights.stacked(f"{layer}/kernel")
        inputs, outputs = (" ".join(part) for part in (ours.split()[:count], ours.split()[count:]))
        groups = re.findall(r"\([^)]*\)|\S+", theirs or ours)
        of_inputs = [set(group.strip("()").split()) <= set(inputs.split()) for group in groups]
        if sorted(of_inputs) != [False, True]:
            raise ConfigError(
                f"lora.targets: {entry.tensor} mixes inputs and outputs of {layer}; leave it out"
            )
        self.transposed |= of_inputs[0]
        narrow, wide = groups[of_inputs.index(True)], groups[of_inputs.index(False)]
        module = entry.tensor.removesuffix(".weight")
        if entry.part is not None:
            dimension, start, extent = entry.part
            if of_inputs[dimension]:
                raise ConfigError(f"lora.targets: {layer} has a part of the inputs of {module}; leave it out")
            module += f"[{start} of {extent}]"
        of_a, of_b = f"{inputs} {RANK} -> {RANK} {narrow}", f"{RANK} {outputs} -> {wide} {RANK}"
        for name, tensor, pattern in ((A, "lora_A", of_a), (B, "lora_B", of_b)):
            yield Entry(
                f"{layer}/{name}",
                f"{_PREFIX}{module}.{tensor}.weight",
                pattern,
                entry.sizes,
                first=entry.first,
            )

    @cached_property
    def targets(self) -> list[str]:
        """The modules that have adapters: ends of their names where those mean no others, else whole names."""
        ends: dict[str, list[str]] = {}
        for module in self.parts:
            ends.setdefault(_end(module), []).append(module)
        all_of = {end: {m for m in self._modules if _end(m) == end} for end in ends}
        return [name for end, own in ends.items() for name in ([end] if all_of[end] == set(own) else own)]

    def refuse_of_experts(self) -> None:
        """Refuses to write adapters that PEFT would take for experts': with transformers 5 it goes by the end alone.

        Raises:
          ConfigError: naming them.
        """
        experts = {_end(module) for module in self._modules if ".experts." in module}
        meant = [module for module in self.parts if _end(module) in experts]
        if meant:
            raise ConfigError(
                f"hf export: --adapter: PEFT would take the adapters of {meant[0]} for those of experts, which have "
                "the same names; leave it out, which merges them, or train with lora.targets=[attention/*]"
            )

    def tensors(self, get: Get) -> dict[str, np.ndarray]:
        """All tensors, from boxes of our adapters' parameters."""
        found: dict[str, np.ndarray] = {}
        for module, parts in self.parts.items():
            names = [part.name for part in parts] or [module]
            a, b = (
                [self.map.tensor(f"{_PREFIX}{name}.{x}.weight", get) for name in names]
                for x in ("lora_A", "lora_B")
            )
            found[f"{_PREFIX}{module}.lora_A.weight"] = np.concatenate(a)
            found[f"{_PREFIX}{module}.lora_B.weight"] = _along_diagonal(parts, b) if parts else b[0]
        return {name: np.ascontiguousarray(tensor) for name, tensor in found.items()}

    def settings(self, lora: LoraConfig, base: str | None) -> dict[str, Any]:
        """What adapter_config.json says.

        Args:
          base: name or directory of the model that the adapters are for; None: it has none.
        """
        ranks, alphas = {}, {}
        for module, parts in self.parts.items():
            if len(parts) > 1:
                key = _end(module) if _end(module) in self.targets else module
                ranks[key] = lora.rank * len(parts)
                alphas[key] = lora.alpha * (
                    math.sqrt(len(parts)) if lora.rank_stabilized else float(len(parts))
                )
        name, _, revision = (base or "").removeprefix("hf://").partition("@")
        return {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": name or None,
            "revision": revision or None, "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout,
            "use_rslora": lora.rank_stabilized, "target_modules": self.targets, "bias": "none",
            "fan_in_fan_out": self.transposed, "rank_pattern": ranks, "alpha_pattern": alphas,
            "init_lora_weights": True, "inference_mode": True, "modules_to_save": None,
        }  # fmt: skip


def _end(module: str) -> str:
    return module.rpartition(".")[2]


def _along_diagonal(parts: Sequence[_Part], matrices: Sequence[np.ndarray]) -> np.ndarray:
    """B of a module from those of its parts, [rows, rank] each."""
    rank = matrices[0].shape[1]
    whole = np.zeros((parts[0].extent, rank * len(parts)), matrices[0].dtype)
    for i, (part, b) in enumerate(zip(parts, matrices, strict=True)):
        whole[part.start : part.start + len(b), i * rank : (i + 1) * rank] = b
    return whole


def save(directory: Path, adapters: Adapters, get: Get, settings: Mapping[str, Any], dtype: str) -> int:
    """Writes adapters into a directory that is empty or not there, in a type of `DTYPES`; how many tensors.

    Raises:
      InputError: the directory holds something.
    """
    if directory.exists() and any(directory.iterdir()):
        raise InputError(f"{directory} is not empty; give a directory that is, or is not there yet")
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.astype(DTYPES[dtype]) for name, tensor in adapters.tensors(get).items()}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    write_atomically(directory / CONFIG, (json.dumps(settings, indent=2) + "\n").encode())
    return len(tensors)


class Saved:
    """Adapters that PEFT saved, as tensors of the parts that our layers are; as `Tensors` for `dsjax.hf.load.loaded`.

    A module that is several of our layers may have one adapter for all of them (each part then gets A whole and its own
    rows of B), or one of as many times the rank that is theirs along the diagonal.

    Raises:
      InputError: it cannot be read, or computes otherwise than the settings here, a line each.
    """

    def __init__(self, directory: Path, adapters: Adapters, lora: LoraConfig):
        key = "lora.init_from"
        settings = _read_settings(directory, key)
        _refuse_others(settings, adapters)
        self._tensors = Tensors(directory, key)
        self._read: dict[str, tuple[str, tuple[slice, slice]]] = {}
        self.shapes = dict(self._tensors.shapes)
        faults = _unlike(settings, adapters, lora)
        for module, parts in adapters.parts.items():
            for x in ("lora_A", "lora_B") if parts else ():
                self._split(f"{_PREFIX}{module}.{x}.weight", x, parts, lora.rank, adapters.map.tensors)
            if parts and not self._is_diagonal(module, parts, lora.rank, adapters.map.tensors):
                faults.append(
                    f"{key}: {module} has an adapter whose parts are not of one matrix each; it cannot be read"
                )
        if faults:
            raise InputError(faults)

    def _split(
        self, whole: str, x: str, parts: Sequence[_Part], rank: int, shapes: Mapping[str, Sequence[int]]
    ) -> None:
        """Enters the parts of a tensor in its place, where its shape is one that can be split."""
        shape, wide = self.shapes.get(whole), len(parts) * rank
        if shape is None or len(shape) != 2 or shape[x == "lora_B"] not in (rank, wide):
            return
        del self.shapes[whole]
        for i, part in enumerate(parts):
            name = f"{_PREFIX}{part.name}.{x}.weight"
            first = i * rank if shape[x == "lora_B"] == wide else 0
            ranks, rows = slice(first, first + rank), slice(part.start, part.start + shapes[name][0])
            place = (ranks, slice(0, shape[1])) if x == "lora_A" else (rows, ranks)
            self._read[name] = whole, place
            self.shapes[name] = (
                (rank, shape[1]) if x == "lora_A" else (min(rows.stop, shape[0]) - rows.start, rank)
            )

    def _is_diagonal(
        self, module: str, parts: Sequence[_Part], rank: int, shapes: Mapping[str, Sequence[int]]
    ) -> bool:
        """Whether B is 0 outside of what the parts are."""
        name = f"{_PREFIX}{module}.lora_B.weight"
        if not any(f"{_PREFIX}{part.name}.lora_B.weight" in self._read for part in parts):
            return True
        whole = self._tensors.get(name, tuple((0, n) for n in self._tensors.shapes[name])).copy()
        for part in parts:
            _, place = self._read[f"{_PREFIX}{part.name}.lora_B.weight"]
            whole[place] = 0
        return not np.any(whole)

    def get(self, name: str, box: Box) -> np.ndarray:
        """A box of a tensor."""
        if name not in self._read:
            return self._tensors.get(name, box)
        whole, place = self._read[name]
        moved = tuple((a + s.start, b + s.start) for (a, b), s in zip(box, place, strict=True))
        return self._tensors.get(whole, moved)


def _read_settings(directory: Path, key: str) -> dict[str, Any]:
    try:
        settings = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except OSError:
        raise InputError(f"{key}: {directory} holds no {CONFIG}") from None
    except ValueError as error:
        raise InputError(f"{key}: {directory / CONFIG} cannot be read ({error})") from None
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        raise InputError(f"{key}: {directory / CONFIG} is not of peft_type LORA")
    return settings


def _refuse_others(settings: Mapping[str, Any], adapters: Adapters) -> None:
    """Refuses adapters beside other layers in one line: else each of their tensors would be missing.

    Raises:
      InputError: naming what to set.
    """
    theirs = settings.get("target_modules")
    if not isinstance(theirs, list):
        return  # a regular expression; the tensors tell
    here = set(adapters.parts)
    met = {
        name: {module for module in here if module == name or module.endswith(f".{name}")} for name in theirs
    }
    if all(met.values()) and here == set().union(*met.values()):
        return
    own = sorted({_end(module) for module in here})
    raise InputError(
        f"lora.init_from: its adapters are beside {', '.join(sorted(theirs))}, and here they are beside "
        f"{', '.join(own)}; set lora.targets to the same layers"
    )


def _unlike(settings: Mapping[str, Any], adapters: Adapters, lora: LoraConfig) -> list[str]:
    """What saved adapters compute otherwise than those here."""
    key = "lora.init_from"
    extra = [
        name for name in ("use_dora", "lora_bias", "modules_to_save", "use_qalora") if settings.get(name)
    ]
    extra += ["bias"] if settings.get("bias", "none") != "none" else []
    faults = [f"{key}: {name} is {settings[name]!r}, which adapters here do not have" for name in extra]
    for module in adapters.parts:
        rank = _of_module(settings.get("rank_pattern") or {}, module, settings.get("r", 8))
        alpha = _of_module(settings.get("alpha_pattern") or {}, module, settings.get("lora_alpha", 8))
        scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        of_ours = {lora.rank, lora.rank * max(1, len(adapters.parts[module]))}
        if not math.isclose(scale, lora.scale, rel_tol=1e-6) or rank not in of_ours:
            said = "lora.rank_stabilized=true " if settings.get("use_rslora") else ""
            return [
                *faults,
                f"lora.alpha: adapters of rank {lora.rank} are multiplied by {lora.scale:g}, in {key} those of "
                f"rank {rank} by {scale:g} ({module}); set {said}lora.rank={rank} lora.alpha={alpha:g}",
            ]
    return faults


def _of_module(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """PEFT's setting for a module: of the first pattern that its name ends with."""
    return next((v for p, v in patterns.items() if re.match(rf"(.*\.)?({p})$", module)), default)

"""A model's parameters as Hugging Face saves them: safetensors with an index, config.json and what stands beside."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from dsjax.errors import InputError
from dsjax.files import write_atomically
from dsjax.hf.hub import SETTINGS, TOKENIZER
from dsjax.hf.tensors import INDEX
from dsjax.models.weights import Get, WeightMap

DTYPES: Mapping[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}


@dataclass(frozen=True)
class Side:
    """What stands beside the weights.

    Attributes:
      config: of config.json.
      files: to be copied, their names unchanged.
      made: others, by name; they stand in for copied ones.
    """

    config: Mapping[str, Any]
    files: tuple[Path, ...] = ()
    made: Mapping[str, bytes] = field(default_factory=dict)

    @staticmethod
    def of(directory: Path) -> Side:
        """That of a saved model, or of a tokenizer's directory (without a config then)."""
        files = tuple(
            directory / name for name in (*SETTINGS[1:], *TOKENIZER) if (directory / name).is_file()
        )
        file = directory / SETTINGS[0]
        return Side(json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}, files)

    def keep(self, directory: Path) -> None:
        """Writes all of it into a directory."""
        directory.mkdir(parents=True, exist_ok=True)
        for file in self.files:
            shutil.copyfile(file, directory / file.name)
        for name, content in self.made.items():
            write_atomically(directory / name, content)
        if self.config:
            text = json.dumps(self.config, indent=2, ensure_ascii=False) + "\n"
            write_atomically(directory / SETTINGS[0], text.encode())


def save(
    directory: Path,
    weights: WeightMap,
    get: Get,
    side: Side,
    *,
    dtype: str,
    shard_bytes: int,
    exact: Sequence[str] = (),
    on_tensor: Callable[[], None] = lambda: None,
) -> list[Path]:
    """Writes a model into a directory that is empty or not there; the weights' files.

    No more than one file's tensors are in memory beside what `get` reads from. The index is written last.

    Args:
      get: a box of a parameter.
      dtype: of the tensors.
      exact: patterns of names of those that are float32 all the same.
      shard_bytes: size of a file, where a tensor is not larger.
      on_tensor: called after each.

    Raises:
      InputError: the directory holds something.
    """
    if directory.exists() and any(directory.iterdir()):
        raise InputError(f"{directory} is not empty; give a directory that is, or is not there yet")
    directory.mkdir(parents=True, exist_ok=True)
    parts: list[Path] = []
    where: dict[str, int] = {}
    total = 0

    def typed() -> Iterator[tuple[str, np.ndarray]]:
        for name in weights.tensors:
            own = np.float32 if any(fnmatchcase(name, pattern) for pattern in exact) else DTYPES[dtype]
            yield name, np.ascontiguousarray(weights.tensor(name, get).astype(own))
            on_tensor()

    for number, held in enumerate(_files(typed(), shard_bytes), 1):
        part = directory / f"part-{number}.safetensors"
        save_file(held, part, metadata={"format": "pt"})
        parts.append(part)
        where |= dict.fromkeys(held, number)
        total += sum(tensor.nbytes for tensor in held.values())
    count = len(parts)
    named = [
        directory / ("model.safetensors" if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors")
        for i in range(1, count + 1)
    ]
    for part, name in zip(parts, named, strict=True):
        part.rename(name)
    side.keep(directory)
    if count > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: named[number - 1].name for name, number in sorted(where.items())},
        }
        write_atomically(directory / INDEX, (json.dumps(index, indent=2) + "\n").encode())
    return named


def _files(tensors: Iterator[tuple[str, np.ndarray]], limit: int) -> Iterator[dict[str, np.ndarray]]:
    """The tensors in order, as many together as a file of that size holds, and one at least."""
    held: dict[str, np.ndarray] = {}
    size = 0
    for name, tensor in tensors:
        if held and size + tensor.nbytes > limit:
            yield held
            held, size = {}, 0
        held[name] = tensor
        size += tensor.nbytes
    yield held

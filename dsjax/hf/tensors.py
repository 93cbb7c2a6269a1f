"""Tensors of sharded safetensors files, read lazily: only the pages of what is asked for come from the disk.

Blocks of 8-bit floats (DeepSeek-V3) are multiplied by their scales as they are read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from dsjax.errors import InputError
from dsjax.models.weights import Box

_TYPES: Mapping[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
INDEX = "model.safetensors.index.json"
_SCALE = "_scale_inv"
_FLOAT8 = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    def array(self) -> np.ndarray:
        """It, mapped and not read."""
        if not math.prod(self.shape):
            return np.zeros(self.shape, self.dtype)
        return np.memmap(self.file, self.dtype, "r", self.offset, self.shape)


class Readable(Protocol):
    """Tensors of which boxes are read: their shapes by name, and a box of one."""

    shapes: dict[str, tuple[int, ...]]

    def get(self, name: str, box: Box) -> np.ndarray:
        """A box of a tensor."""


class Tensors:
    """The tensors of a saved model.

    Args:
      directory: has config.json and safetensors files.
      key: the setting that named it, for messages.

    Attributes:
      shapes: name -> shape. Scales of 8-bit blocks are no tensors of their own.
      read: bytes that were asked for up to now, as they are stored.

    Raises:
      InputError: no safetensors, files that the index names and that are not there, or broken ones.
    """

    def __init__(self, directory: Path, key: str = "weights"):
        self.directory, self._key, self.read = directory, key, 0
        self._stored: dict[str, _Stored] = {}
        for file in _files(directory, key):
            self._stored |= _header(file, key)
        scaled = {name for name in self._stored if f"{name}{_SCALE}" in self._stored}
        self._scales = {name: self._stored.pop(f"{name}{_SCALE}") for name in scaled}
        lacking = [n for n, one in self._stored.items() if one.dtype in _FLOAT8 and n not in self._scales]
        if lacking:
            raise InputError(
                f"{key}: {lacking[0]} is of {self._stored[lacking[0]].dtype} without {lacking[0]}{_SCALE}; "
                "8-bit weights are read where they have a scale for each block (DeepSeek-V3's form)"
            )
        self._block = _block(directory, key) if scaled else ()
        self.shapes = {name: one.shape for name, one in self._stored.items()}

    def get(self, name: str, box: Box) -> np.ndarray:
        """A box of a tensor; what is in 8 bits as float32, times its scales."""
        stored = self._stored[name]
        part = stored.array()[tuple(slice(*span) for span in box)]
        self.read += part.nbytes
        if name not in self._scales:
            return part
        scales = self._scales[name].array()
        self.read += scales.nbytes
        for dimension, ((start, stop), block) in enumerate(zip(box, self._block, strict=True)):
            scales = scales.take(np.arange(start, stop) // block, axis=dimension)
        return part.astype(np.float32) * scales

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors, as they are stored."""
        stored = (*self._stored.values(), *self._scales.values())
        return sum(math.prod(one.shape) * one.dtype.itemsize for one in stored)

    @property
    def dtypes(self) -> dict[str, np.dtype]:
        """Name -> type as it is stored."""
        return {name: one.dtype for name, one in self._stored.items()}


def _block(directory: Path, key: str) -> tuple[int, int]:
    """Rows and columns that have a scale together, by config.json."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        rows, columns = config["quantization_config"]["weight_block_size"]
        return int(rows), int(columns)
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"{key}: {directory} has 8-bit weights, but its config.json no quantization_config with "
            "weight_block_size, the rows and columns of a block"
        ) from None


def _files(directory: Path, key: str) -> Sequence[Path]:
    index = directory / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise InputError(f"{key}: {index} cannot be read ({error!r})") from None
        missing = [name for name in names if Path(name).name != name or not (directory / name).is_file()]
        if missing:
            raise InputError(f"{key}: {index} names {missing[0]}, which is not in {directory}")
        return [directory / name for name in names]
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        others = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern)]
        hint = f"; {others[0]} can hold code and is not read: save it as safetensors" if others else ""
        raise InputError(f"{key}: {directory} holds no *.safetensors{hint}")
    return found


def _header(file: Path, key: str) -> dict[str, _Stored]:
    """The tensors of a file; it begins with the length of a JSON object that describes them."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            size = file.stat().st_size
            if not 2 <= length <= size - 8:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            described = json.loads(opened.read(length))
        described.pop("__metadata__", None)
        found = {}
        for name, one in described.items():
            start, stop = one["data_offsets"]
            dtype, shape = np.dtype(_TYPES[one["dtype"]]), tuple(map(int, one["shape"]))
            if stop - start != math.prod(shape) * dtype.itemsize or 8 + length + stop > size:
                raise ValueError(f"{name} ends past the file or is of another size than its shape")
            found[name] = _Stored(file, dtype, shape, 8 + length + start)
    except KeyError as error:
        raise InputError(f"{key}: {file} has tensors of a type that is not known ({error})") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{key}: {file} is no whole safetensors file ({error})") from None
    return found

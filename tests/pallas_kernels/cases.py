"""What an operation gives to the tests of kernels: a file `OPERATION_cases.py` with CONFORMANCE and COMPILED."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np


def bit_equal(got: Any, want: Any) -> None:
    """Two trees have the same bits; any NaN equals any other."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype.kind not in "iub":
            np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
            a, b = (np.where(np.isnan(x), 0, x).astype(np.float64) for x in (a, b))
        np.testing.assert_array_equal(a, b)


@dataclass(frozen=True)
class Case:
    """A call whose every implementation must give what the reference gives.

    Attributes:
      function: called under jit with `arguments()`, once for each implementation.
      check: takes what an implementation gave and what the reference gave, and asserts.
      implementations: those that run on a CPU.
    """

    name: str
    function: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    check: Callable[[Any, Any], None] = bit_equal
    implementations: tuple[str, ...] = ("interpret",)


@dataclass(frozen=True)
class Compiled:
    """A call that must compile for a GPU that is not here.

    Attributes:
      shapes: a (shape, dtype) for each argument.
      kernels: how many of Pallas' kernels the program has.
      donated: arguments whose memory the results may take.
      implementation: what `hardware.use` is given; None where the chip itself must lead to the kernel.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[tuple[int, ...], Any], ...]
    kernels: int = 1
    donated: tuple[int, ...] = ()
    implementation: str | None = None


def collect(kind: str) -> list[Any]:
    """All of `CONFORMANCE` or `COMPILED` of the files `*_cases.py` in this folder."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*_cases.py"))
    return [case for name in names for case in getattr(importlib.import_module(name), kind)]

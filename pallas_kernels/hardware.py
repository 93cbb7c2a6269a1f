"""Which chip a function is traced for, and which implementation suits it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax

IMPLEMENTATIONS = ("reference", "triton", "mosaic", "interpret")

# Compute capability x 10 by name: a chip that is only compiled for has a name and nothing else.
_GENERATIONS = (
    (r"\bV100\b", 70),
    (r"\bT4\b|RTX 20", 75),
    (r"\bA100\b|\bA30\b|\bA800\b", 80),
    (r"\bA10G?\b|\bA40\b|\bA6000\b|RTX 30", 86),
    (r"\bL4\b|\bL40S?\b|RTX 40|RTX 6000 Ada", 89),
    (r"\bH100\b|\bH200\b|\bH800\b|\bH20\b|GH200", 90),
    (r"\bG?B[12]00\b", 100),
    (r"\bG?B300\b", 103),
    (r"RTX (PRO )?[56]0", 120),
)
_forced: ContextVar[str | None] = ContextVar("pallas_kernels_implementation", default=None)


@dataclass(frozen=True)
class Chip:
    """What is traced for.

    Attributes:
      platform: gpu, tpu or cpu.
      generation: ten times a GPU's compute capability (H100: 90); 0 where it is not known.
    """

    platform: str
    generation: int = 0


def chip() -> Chip:
    """The chip of the mesh that is set, which need not be here, or else jax's default device."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        return Chip(described.platform, _generation(described.device_kind))
    device: Any = jax.config.values["jax_default_device"]
    device = device if isinstance(device, jax.Device) else jax.devices(device)[0]
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        return Chip(device.platform, _generation(device.device_kind))
    return Chip(device.platform, round(10 * float(capability)))


def _generation(kind: str) -> int:
    return next((number for pattern, number in _GENERATIONS if re.search(pattern, kind)), 0)


def choose(kernels: Mapping[str, range]) -> str:
    """The implementation to take where this is called, which is when a function is traced.

    Args:
      kernels: implementation -> the generations of GPUs it is written for, the best first.

    Returns:
      What `use` forces; else the first of `kernels` for this chip; else "reference".

    Raises:
      ValueError: `use` forces a kernel that this operation has not.
    """
    forced = _forced.get()
    if forced is None:
        here = chip()
        suited = [name for name, generations in kernels.items() if here.generation in generations]
        return suited[0] if here.platform == "gpu" and suited else "reference"
    if forced not in ("reference", "interpret", *kernels):
        raise ValueError(f"use({forced!r}): this operation has {', '.join(('reference', *kernels))} only")
    return forced


@contextlib.contextmanager
def use(name: str) -> Iterator[None]:
    """Forces an implementation on all that is traced within; what was jitted and traced before stays as it is.

    Args:
      name: "reference"; "triton" or "mosaic", for the GPU that is compiled for; "interpret" to run an
        operation's first kernel on any device, slowly, as its test does.

    Raises:
      ValueError: no such implementation.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"use: expected one of {', '.join(IMPLEMENTATIONS)}; got {name!r}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)

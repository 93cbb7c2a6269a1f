"""What formulas say is sent: collectives by their kind, axes and bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from dsjax.aot import Target
from dsjax.aot.collectives import ring_bytes
from dsjax.mesh import AXES
from dsjax.plan.cost import link_seconds
from dsjax.plan.laid import Laid
from dsjax.plan.result import Traffic


def dtype_of(laid: Laid) -> str:
    """The type of most products, as HLO names it."""
    return {2: "bf16", 4: "f32"}[laid.item]


def sent(laid: Laid, kind: str, axes: tuple[str, ...], times: int, size: float, dtype: str = "") -> Traffic:
    """Collectives of a step.

    Args:
      size: bytes of the whole array each time (of a permute: what a device sends).
      dtype: by default that of products.
    """
    members = math.prod(laid.mesh[axis] for axis in axes)
    together = together_along(laid.target, laid.mesh, axes)
    crosses = together < members
    wire = ring_bytes(kind, members, int(size), int(size))
    chip = laid.target.chip
    return Traffic(
        kind=kind,
        axes=axes,
        link=(chip.network if crosses else chip.node).name,
        crosses=crosses,
        dtype=dtype or dtype_of(laid),
        sent=times * wire,
        times=times,
        loop=(),
        seconds=times * link_seconds(laid.target, kind, wire, members, together),
        hidden=0.0,
    )


def together_along(target: Target, mesh: Mapping[str, int], axes: tuple[str, ...]) -> int:
    """The most devices of a group along some axes that one node holds."""
    places = np.arange(target.size).reshape([mesh[a] for a in AXES])
    group = places[tuple(slice(None) if a in axes else 0 for a in AXES)].reshape(-1)
    return int(np.bincount(group // target.domain).max())

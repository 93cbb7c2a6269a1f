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


def waited_for(traffic: Traffic) -> bool:
    """Whether it stands between products that need it; everything else runs beside the layers."""
    return traffic.kind == "all-to-all" or bool({"tensor", "tensor_rows"} & set(traffic.axes))


def sent(laid: Laid, kind: str, axes: tuple[str, ...], times: int, size: float, dtype: str = "") -> Traffic:
    """Collectives of a step.

    Args:
      size: bytes of the whole array each time (of a permute: what a device sends).
      dtype: by default that of products.
    """
    members = math.prod(laid.mesh[axis] for axis in axes)
    together = together_along(laid.target, laid.mesh, axes)
    return _between(laid, kind, axes, times, size, dtype or laid.dtype, (members, together))


def _between(
    laid: Laid,
    kind: str,
    axes: tuple[str, ...],
    times: int,
    size: float,
    dtype: str,
    group: tuple[int, int],
    every: int = 1,
) -> Traffic:
    """The same for a group of so many members, of which so many are in one node; in one of `every` steps."""
    members, together = group
    crosses = together < members
    wire = ring_bytes(kind, members, int(size), int(size))
    chip = laid.target.chip
    return Traffic(
        kind=kind,
        axes=axes,
        link=(chip.network if crosses else chip.node).name,
        crosses=crosses,
        dtype=dtype,
        sent=times * wire / every,
        times=times,
        loop=(),
        seconds=times * link_seconds(laid.target, kind, wire, members, together) / every,
        hidden=0.0,
        every=every,
    )


def exchanged(laid: Laid) -> list[Traffic]:
    """The exchange of gradients over `data`, level by level of its route; of moves, where workers train apart.

    Those meet once in so many steps; near replicas, which train as one, add up their gradients at every step.
    """
    if laid.exchange is None:
        return []
    exchange, route, codec = laid.exchange, laid.exchange.route, laid.exchange.codec
    numbers = dict.fromkeys((True, False), 0)
    for tensor in exchange.tensors.values():
        numbers[tensor.coded] += sum(tensor.numbers)
    every = laid.config.diloco.inner_steps or 1
    found: list[tuple[str, float, str, tuple[int, int]]] = []
    at_every_step, inner = [], 1
    near = together_along(laid.target, laid.mesh, ("data",))
    total = sum(numbers.values())
    for index, size in enumerate(route.parts):
        group = (size, max(1, min(size, near // inner)))
        if index < len(route.parts) - 1:
            # There and back: the way back is coded where the codec was at work.
            at_every_step.append(("all-reduce", 4 * total, "f32", group))
            back = 4 * numbers[False] + (codec.bytes(numbers[True]) if codec is not None else 0)
            found.append(("reduce-scatter", 4 * total / inner, "f32", group))
            found.append(("all-gather", back / inner, "f32" if codec is None else "u8", group))
            inner *= size
            continue
        if numbers[False]:
            found.append(("all-reduce", 4 * numbers[False] / inner, "f32", group))
        if codec is not None and numbers[True]:
            coded = codec.bytes(numbers[True]) / inner
            if exchange.gathers:
                found.append(("all-gather", coded * size, "u8", group))
            else:
                found += [(kind, coded, "u8", group) for kind in ("all-to-all", "all-gather")]
    near_sums = at_every_step if laid.config.diloco.inner_steps else []
    return [
        _between(laid, kind, ("data",), 1, size, dtype, group, often)
        for which, often in ((near_sums, 1), (found, every))
        for kind, size, dtype, group in which
    ]


def together_along(target: Target, mesh: Mapping[str, int], axes: tuple[str, ...]) -> int:
    """The most devices of a group along some axes that one node holds."""
    places = np.arange(target.size).reshape([mesh[a] for a in AXES])
    group = places[tuple(slice(None) if a in axes else 0 for a in AXES)].reshape(-1)
    return int(np.bincount(group // target.domain).max())

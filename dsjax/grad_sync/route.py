"""Over which groups of replicas gradients travel: all at once, or near ones first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dsjax.grad_sync.codecs import Codec
from dsjax.mesh.topology import Link


@dataclass(frozen=True)
class Route:
    """How replicas exchange.

    Attributes:
      name: flat, hierarchical or tree.
      parts: sizes of the groups, innermost first; their product is the number of replicas. All but the last are
        reduced dense, between the last the codec is at work.
      seconds: predicted, for the bytes that it was chosen by.
    """

    name: str
    parts: tuple[int, ...]
    seconds: float = 0.0

    @property
    def inner(self) -> int:
        """Replicas that are reduced before the codec."""
        return math.prod(self.parts[:-1])

    @property
    def outer(self) -> int:
        """Replicas, or groups of them, between which the codec is at work."""
        return self.parts[-1]

    @property
    def replicas(self) -> int:
        return math.prod(self.parts)


def choose_route(levels: Sequence[tuple[int, Link]], numbers: int, codec: Codec | None, wanted: str) -> Route:
    """The route with the least predicted time, or the wanted one.

    Args:
      levels: (parts, link) of the data axis, innermost first (`mesh.topology.along`).
      numbers: of a device's gradient.
      wanted: auto, flat, hierarchical or tree.
    """
    sizes = [parts for parts, _ in levels]
    every = math.prod(sizes)
    found: dict[str, tuple[int, ...]] = {"flat": (every,)}
    if len(sizes) > 1:
        found["hierarchical"] = (sizes[0], every // sizes[0])
    if len(sizes) > 2:
        found["tree"] = tuple(sizes)
    routes = [Route(name, parts, _seconds(parts, levels, numbers, codec)) for name, parts in found.items()]
    if wanted != "auto":
        # Where there are not so many levels the next simpler route is all that there is.
        order = ["flat", "hierarchical", "tree"]
        return next(r for r in reversed(routes) if order.index(r.name) <= order.index(wanted))
    return min(routes, key=lambda route: route.seconds)


def _seconds(
    parts: Sequence[int], levels: Sequence[tuple[int, Link]], numbers: int, codec: Codec | None
) -> float:
    """Predicted time: what a device sends to its peers of each group, over the link that lies between them.

    A group reduces by pieces: a piece to each peer, and the sum of its own piece to each (a sparse codec sends all
    that it has to each, once).
    """
    total, inner, left = 0.0, 1, float(numbers)
    for index, size in enumerate(parts):
        coded = codec if index == len(parts) - 1 else None
        a_number = 4.0 if coded is None else coded.bytes(1 << 20) / (1 << 20)
        sparse = coded is not None and coded.sparse
        to_a_peer = a_number * (left if sparse else 2 * left / size)
        latency = 0.0
        for nearer, reach, link in _spanned(levels):
            peers = (min(reach, inner * size) - max(nearer, inner)) // inner
            if peers > 0:
                total += peers * to_a_peer / link.bandwidth
                latency = max(latency, link.latency)
        total += math.ceil(math.log2(size)) * (1 if sparse else 2) * latency
        inner, left = inner * size, left / size
    return total


def _spanned(levels: Sequence[tuple[int, Link]]) -> Iterator[tuple[int, int, Link]]:
    """(replicas that are nearer, replicas within reach, link) of each level."""
    nearer = 1
    for count, link in levels:
        yield nearer, nearer * count, link
        nearer *= count

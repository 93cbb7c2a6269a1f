"""The exchange: sums of gradients over the replicas of `data`, in a codec's form where links are slow.

    near replicas, dense:   reduce-scatter, level by level
    far ones, coded:        pieces to their owners (all-to-all), sums, coded again, to all (all-gather)
    near replicas, coded:   all-gather

Everything here runs on a device's own part of each gradient, whatever cuts it over other axes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from dsjax.config.exchange import GradSyncConfig
from dsjax.grad_sync.codecs import Codec
from dsjax.grad_sync.route import Route
from dsjax.mesh import Layout, map_named, named_leaves
from dsjax.mesh.inside import left_spec, only
from dsjax.mesh.layout import axes_of_entry
from dsjax.mesh.topology import groups

AXIS = "data"
Residuals = dict[str, dict[str, jax.Array]]


@dataclass(frozen=True)
class Tensor:
    """A gradient as the exchange sees it.

    Attributes:
      shape: of the whole parameter.
      spec: how it is cut at rest.
      axes: (mesh axis, size) of those that cut it, in the order of its dimensions.
      windows: rows of a device's part that are exchanged together, one group after the other; they add up to its
        first dimension. One of them: the whole.
      coded: it goes through the codec; else dense.
    """

    shape: tuple[int, ...]
    spec: P
    axes: tuple[tuple[str, int], ...]
    windows: tuple[int, ...]
    coded: bool

    @property
    def local(self) -> tuple[int, ...]:
        """Shape of a device's part."""
        sizes = dict(self.axes)
        entries = (*self.spec, *(None,) * (len(self.shape) - len(self.spec)))
        cuts = [math.prod(sizes[a] for a in axes_of_entry(entry) if a in sizes) for entry in entries]
        return tuple(extent // cut for extent, cut in zip(self.shape, cuts, strict=True))

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of a device, window by window."""
        each = math.prod(self.local[1:])
        return tuple(rows * each for rows in self.windows)


@dataclass(frozen=True)
class Exchange:
    """What is exchanged, how and by which way.

    Attributes:
      route: the groups.
      codec: of coded tensors; None: fp32.
      tensors: by path.
      settings: as in the config.
      both_ways: pairs send by a sum of words: the CPU's transport (gloo) gathers in one direction at a time, and sums
        in both.
      groups: layers of a stack that are exchanged together, the first ones first; None: all at once.
      warming: all goes dense for now; residuals stay as they are.
    """

    route: Route
    codec: Codec | None
    tensors: Mapping[str, Tensor]
    settings: GradSyncConfig = field(default_factory=GradSyncConfig)
    groups: tuple[int, ...] | None = None
    both_ways: bool = False
    warming: bool = False

    @property
    def keeps(self) -> tuple[str, ...]:
        """Names of the residuals that are kept: of what a group of near replicas sends, and of sums."""
        if self.codec is None or not self.codec.lossy or not self.settings.error_feedback:
            return ()
        return ("sent",) if self.gathers else ("sent", "summed")

    @property
    def gathers(self) -> bool:
        """Whether all that is coded goes to all, which add it up: the same bytes for two, and coded once only.

        Sparse sums would have more numbers than what they are made of.
        """
        return self.codec is not None and (self.codec.sparse or self.route.outer == 2)

    def pieces(self, tensor: Tensor) -> list[int]:
        """Numbers that one device adds up, window by window: padded, so that all have as many."""
        granule = self.codec.granule if self.codec is not None and tensor.coded else 1
        return [self._piece(n, granule) for n in tensor.numbers]

    def _piece(self, numbers: int, granule: int) -> int:
        return -(-numbers // (self.route.replicas * granule)) * granule

    def kept(self, name: str, tensor: Tensor) -> list[int]:
        """Numbers of a tensor's residual on a device, window by window."""
        parts = self.route.outer if name == "sent" else 1
        return [parts * piece for piece in self.pieces(tensor)]

    # ---- the exchange ------------------------------------------------------------------------------

    def __call__(self, layout: Layout, grads: Any, residuals: Residuals, seed: Any) -> tuple[Any, Residuals]:
        """Sums of gradients over the replicas, and the residuals after it.

        Called in the body of a shard_map over `data`.

        Args:
          layout: as it is seen there.
          grads: fp32, each replica's own; whole tensors or windows of them, of all or of some.
          residuals: those of the coded ones among them, as they lie in that body.
          seed: uint32, another at every step.
        """
        named = named_leaves(grads)
        specs = {path: left_spec(layout, path) for path in named}
        held = {
            name: {
                path: only(residual_spec(self.tensors[path]), lambda a: a not in layout.local)
                for path in part
            }
            for name, part in residuals.items()
        }
        local = layout.shard_map(self._local, (specs, held, P()), (specs, held))
        sums, residuals = local(named, residuals, seed)
        return map_named(lambda path, _: sums[path], grads), residuals

    def near_sum(self, x: jax.Array) -> jax.Array:
        """The sum of a number over near replicas: those that are reduced before the codec."""
        for level in range(len(self.route.parts) - 1):
            x = lax.psum(x, AXIS, axis_index_groups=self._groups(level))
        return x

    def near(self, layout: Layout, grads: Any) -> Any:
        """Sums of gradients over near replicas only."""
        if self.route.inner == 1:
            return grads
        specs = map_named(lambda path, _: left_spec(layout, path), grads)
        return layout.shard_map(lambda g: jax.tree.map(self.near_sum, g), (specs,), specs)(grads)

    def _local(
        self, grads: dict[str, jax.Array], residuals: Residuals, seed: Any
    ) -> tuple[dict[str, jax.Array], Residuals]:
        kept = {name: dict(part) for name, part in residuals.items()}
        sums: dict[str, jax.Array] = {}
        replica = lax.axis_index(AXIS).astype(jnp.uint32)
        for paths, coded in self._buckets(grads):
            flat = [grads[path].reshape(-1) for path in paths]
            if self.warming or not coded:
                sent = self._dense(flat)
            else:
                mine = {n: [kept[n][path] for path in paths] for n in kept}
                salt = jnp.uint32(zlib.crc32(paths[0].encode()))
                exchanged = self._gathered if self.gathers else self._owned
                sent, mine = exchanged(flat, mine, seed ^ salt ^ (replica * jnp.uint32(0x9E3779B9)))
                for name, new in mine.items():
                    kept[name] |= dict(zip(paths, new, strict=True))
            sums |= {p: s.reshape(grads[p].shape) for p, s in zip(paths, sent, strict=True)}
        return sums, kept

    def _buckets(self, grads: Mapping[str, jax.Array]) -> list[tuple[list[str], bool]]:
        """Tensors that are exchanged together, in order: small ones until a bucket is full."""
        made: list[tuple[list[str], bool]] = []
        for coded in (True, False):
            size = math.inf
            for path, grad in grads.items():
                if self.tensors[path].coded != coded:
                    continue
                if size + 4 * grad.size > self.settings.bucket_bytes:
                    made.append(([], coded))
                    size = 0
                made[-1][0].append(path)
                size += 4 * grad.size
        return made

    def _reduced(self, flat: Sequence[jax.Array], granule: int) -> tuple[jax.Array, list[int]]:
        """This device's share [outer, numbers] of the sums over near replicas, and the pieces it is made of."""
        replicas = self.route.replicas
        pieces = [self._piece(x.size, granule) for x in flat]
        shape = (*self.route.parts[:-1], self.route.outer)
        padded = [
            jnp.pad(x, (0, replicas * piece - x.size)).reshape(*shape, piece)
            for x, piece in zip(flat, pieces, strict=True)
        ]
        x = padded[0] if len(padded) == 1 else jnp.concatenate(padded, axis=-1)
        for level in range(len(self.route.parts) - 1):
            x = lax.psum_scatter(x, AXIS, scatter_dimension=0, axis_index_groups=self._groups(level))
        return x, pieces

    def _groups(self, level: int) -> list[list[int]] | None:
        return None if len(self.route.parts) == 1 else groups(self.route.parts, level)

    def _everywhere(self, x: jax.Array, levels: Sequence[int]) -> jax.Array:
        """[..., as x]: what all devices of the groups have, the last level innermost."""
        for level in levels:
            groups = self._groups(level)
            if self.both_ways and self.route.parts[level] == 2 and x.dtype == jnp.uint8:
                x = self._pair(x, level)
            else:
                x = lax.all_gather(x, AXIS, axis_index_groups=groups)
        return x

    def _pair(self, x: jax.Array, level: int) -> jax.Array:
        """The bytes of two, as an all-gather gives them: the other's are the sum of both, as words, minus one's own."""
        flat = jnp.pad(x.reshape(-1), (0, -x.size % 4))
        own = lax.bitcast_convert_type(flat.reshape(-1, 4), jnp.uint32)
        other = lax.psum(own, AXIS, axis_index_groups=self._groups(level)) - own
        second = lax.axis_index(AXIS) // math.prod(self.route.parts[:level]) % 2 == 1
        both = jnp.where(second, jnp.stack([other, own]), jnp.stack([own, other]))
        return lax.bitcast_convert_type(both, jnp.uint8).reshape(2, -1)[:, : x.size].reshape(2, *x.shape)

    def _whole(self, x: jax.Array, flat: Sequence[jax.Array], pieces: list[int]) -> list[jax.Array]:
        """The tensors of sums [inner..., outer, numbers]."""
        return [part.reshape(-1)[: f.size] for f, part in zip(flat, _split(x, pieces), strict=True)]

    def _dense(self, flat: Sequence[jax.Array]) -> list[jax.Array]:
        inner = range(len(self.route.parts) - 1)[::-1]
        x, pieces = self._reduced(flat, 1)
        x = lax.psum(x, AXIS, axis_index_groups=self._groups(len(self.route.parts) - 1))
        return self._whole(self._everywhere(x, inner), flat, pieces)

    def _owned(
        self, flat: Sequence[jax.Array], residuals: dict[str, list[jax.Array]], seed: Any
    ) -> tuple[list[jax.Array], dict[str, list[jax.Array]]]:
        """Pieces go to their owners, who add them up and send the sums to all."""
        codec, last, outer = self.codec, len(self.route.parts) - 1, self.route.outer
        assert codec is not None
        x, pieces = self._reduced(flat, codec.granule)
        x = codec.before(x)
        numbers = x.shape[-1]

        def feedback(name: str, x: jax.Array, seed: Any) -> jax.Array:
            if name not in residuals:
                return codec.encode(x, None, seed)[0]
            old = residuals[name]
            joined = jnp.concatenate([r.reshape(*x.shape[:-1], -1) for r in old], axis=-1)
            payload, left = codec.encode(x, joined, seed)
            new = _split(left, pieces)
            residuals[name] = [r.reshape(o.shape) for r, o in zip(new, old, strict=True)]
            return payload

        payload = feedback("sent", x, seed)
        payload = lax.all_to_all(payload, AXIS, 0, 0, axis_index_groups=self._groups(last))
        payload = feedback("summed", codec.decode_sum(payload, numbers), seed + jnp.uint32(1))
        payloads = self._everywhere(payload, range(last + 1)[::-1])
        found = codec.after(codec.decode(payloads, numbers)).reshape(*self.route.parts[:-1], outer, numbers)
        return self._whole(found, flat, pieces), residuals

    def _gathered(
        self, flat: Sequence[jax.Array], residuals: dict[str, list[jax.Array]], seed: Any
    ) -> tuple[list[jax.Array], dict[str, list[jax.Array]]]:
        """What each sends goes to all, tensor by tensor."""
        codec, last, outer = self.codec, len(self.route.parts) - 1, self.route.outer
        assert codec is not None
        x, pieces = self._reduced(flat, codec.granule)
        payloads = []
        for index, part in enumerate(_split(codec.before(x), pieces)):
            old = residuals["sent"][index] if "sent" in residuals else None
            salted = seed + jnp.uint32(2 * index)
            payload, left = codec.encode(part.reshape(-1), None if old is None else old.reshape(-1), salted)
            payloads.append(payload)
            if old is not None:
                residuals["sent"][index] = left.reshape(old.shape)
        found = []
        gathered = self._everywhere(jnp.concatenate(payloads), range(last + 1)[::-1])
        for payload, piece in zip(_split(gathered, [p.size for p in payloads]), pieces, strict=True):
            sums = _mapped(partial(codec.decode_sum, n=outer * piece), payload, last)
            found.append(sums.reshape(*self.route.parts[:-1], outer, piece))
        return self._whole(codec.after(jnp.concatenate(found, axis=-1)), flat, pieces), residuals


def _split(x: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Parts of these sizes along the last dimension."""
    return jnp.split(x, np.cumsum(sizes)[:-1].tolist(), axis=-1)


def mean(grads: Any, weight: jax.Array) -> Any:
    """Sums of gradients over a weight; zeros where that is 0.

    Residuals are of means, so that they keep their meaning where weights differ from step to step.
    Divided in fp32; the results have the types of the sums.
    """
    scale = jnp.maximum(weight, jnp.finfo(jnp.float32).tiny)
    return jax.tree.map(lambda g: (g / scale).astype(g.dtype), grads)


def seed_of(step: jax.Array) -> jax.Array:
    """A number for stochastic rounding, another at every step."""
    return step.astype(jnp.uint32) * jnp.uint32(0x85EBCA6B)


def residual_specs(exchange: Exchange | None, layout: Layout | None = None) -> dict[str, dict[str, P]]:
    """How the residuals lie on the mesh; with a layout of a body, how the axes that are left behind cut them."""
    if exchange is None:
        return {}
    specs = {path: residual_spec(t) for path, t in exchange.tensors.items() if t.coded}
    if layout is not None:
        specs = {path: only(spec, lambda a: a in layout.local) for path, spec in specs.items()}
    return dict.fromkeys(exchange.keeps, specs)


def residual_spec(tensor: Tensor) -> P:
    """How a residual [replicas, axes that cut its parameter..., numbers] lies on the mesh."""
    return P(AXIS, *(axis for axis, _ in tensor.axes), None)


def _mapped(function: Any, x: jax.Array, dimensions: int) -> jax.Array:
    """`function` for each index of the first dimensions of x."""
    if dimensions == 0:
        return function(x)
    return lax.map(lambda x: _mapped(function, x, dimensions - 1), x)

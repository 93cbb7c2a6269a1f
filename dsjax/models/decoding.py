"""Attention that goes on from what it kept of earlier tokens: decoding.

A pass over the model reads the caches and changes none. What layers make of the tokens at hand comes out beside the
result, and is written afterwards, for all layers of a stack at once and in place: the loop over layers then carries
no cache along, and a token costs one reading of it.

Letters of shapes: l layers, b batch, p places of a cache, s tokens at hand, n query heads, k key/value heads, g query
heads of a key/value head, h head dimension, v of values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from dsjax.mesh import Layout, current_layout, manual
from dsjax.models.attention import cut_names
from dsjax.models.layers import cut_axes
from dsjax.models.variables import Given

# Score of a key that is not seen: finite, as in training's attention.
_UNSEEN = -1e30
# A window that no sequence is longer than.
_ALL = 1 << 30

Caches = Mapping[str, Mapping[str, jax.Array]]
"""Path of an attention -> "keys", and "values" unless they are part of the keys -> [l, b, k, p, h].

A head's places stand together, as products of matrices read them: otherwise XLA would first turn a whole cache around.
"""


class Kept(Given):
    """Keys or values of a row's earlier tokens, [b, k, p, h]; decoding alone has them."""


class Made(nnx.Variable):
    """Those of the tokens at hand, [b, k, s, h], once the layer has run."""


class Cache(nnx.Module):
    """What an attention kept, and what it made since.

    Args:
      kept: one attention's part of `Caches`, of a stack of layers.
    """

    def __init__(self, kept: Mapping[str, jax.Array]):
        self.keys = Kept(kept["keys"])
        self.values = Kept(kept["values"]) if "values" in kept else None
        # Empty: what is made has the loop's own dimension for the layers.
        none = jnp.zeros(kept["keys"].shape[:1])
        self.new_keys = Made(none)
        self.new_values = Made(none) if "values" in kept else None

    def attend(
        self,
        q_bsnh: jax.Array,
        k_bskh: jax.Array,
        v_bskv: jax.Array,
        start_b: jax.Array,
        *,
        scale: float | None = None,
        windows: tuple[int | None, ...] = (None,),
        kind: jax.Array | None = None,
        cap: float | None = None,
    ) -> jax.Array:
        """What `attention` gives for tokens that stand after the first `start_b` of their rows, [b, s, n, v].

        Args:
          k_bskh, v_bskv: of the same tokens; they are remembered. Without a cache of values, v are the first dimensions
            of the keys.
          windows, kind, scale, cap: as there.
        """
        k_bksh, v_bksv = k_bskh.swapaxes(1, 2), v_bskv.swapaxes(1, 2)
        self.new_keys.set_value(k_bksh)
        old = [self.keys[...]]
        if self.values is not None and self.new_values is not None:
            self.new_values.set_value(v_bksv)
            old.append(self.values[...])
        scale = 1 / math.sqrt(q_bsnh.shape[-1]) if scale is None else scale
        widths = [_ALL if width is None else width for width in windows]
        window = jnp.asarray(widths, jnp.int32)[0 if kind is None else kind]

        def local(
            q: Any, k: Any, v: Any, start: Any, window: Any, keys: Any, values: Any = None
        ) -> jax.Array:
            values = keys[..., : v.shape[-1]] if values is None else values
            return _attend(q, (keys, k), (values, v), start, window, scale, cap)

        _, (batch, _, q_heads, kv_heads) = cut_names(q_bsnh, k_bskh)
        of_keys = (batch, kv_heads, None, None)
        result = (batch, None, q_heads, None)
        mapped = manual(local, [result, of_keys, of_keys, (batch,), (), *[of_keys] * len(old)], result)
        return mapped(q_bsnh, k_bksh, v_bksv, start_b, window, *old)


def _attend(
    q_bsnh: jax.Array,
    keys: tuple[jax.Array, jax.Array],
    values: tuple[jax.Array, jax.Array],
    start_b: jax.Array,
    window: jax.Array,
    scale: float,
    cap: float | None,
) -> jax.Array:
    """Softmax in fp32 over kept keys before `start_b`, and over new ones up to a query's own."""
    b, s, n, h = q_bsnh.shape
    kv_heads, places = keys[0].shape[1:3]
    q_bskgh = q_bsnh.reshape(b, s, kv_heads, n // kv_heads, h)
    wide = {"preferred_element_type": jnp.float32}
    scores = scale * jnp.concatenate([jnp.einsum("bskgh,bkph->bkgsp", q_bskgh, k, **wide) for k in keys], -1)
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    slots, own = jnp.arange(places), jnp.arange(s)
    # How far back each key is: [b, s, p] and [s, s].
    back = (start_b[:, None] + own)[..., None] - slots
    near = back < window
    seen_old = (slots < start_b[:, None])[:, None] & near
    back = own[:, None] - own
    seen_new = jnp.broadcast_to((back >= 0) & (back < window), (b, s, s))
    seen = jnp.concatenate([seen_old, seen_new], -1)[:, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, _UNSEEN), -1)
    parts = (weights[..., :places], weights[..., places:])
    out = sum(
        jnp.einsum("bkgsp,bkpv->bkgsv", w.astype(v.dtype), v, **wide)
        for w, v in zip(parts, values, strict=True)
    )
    # Turned around after the sum: products of narrow types that come out turned are none that XLA's CPU backend has.
    return jnp.moveaxis(out, 3, 1).reshape(b, s, n, -1).astype(q_bsnh.dtype)


class Decodes(nnx.Module):
    """An attention that goes on from its `cache` while it has one."""

    cache: Cache | None = None

    def kept(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What is kept of a token: "keys" [k, h], and "values" [k, v] unless they are part of the keys."""
        raise AttributeError("an attention says what it keeps of a token")


def _attentions(model: nnx.Module) -> dict[str, Decodes]:
    """Path -> attention, of the layers that a token passes through."""
    found = {
        "/".join(map(str, path)): node for path, node in nnx.iter_graph(model) if isinstance(node, Decodes)
    }
    return {path: found[path] for path in sorted(found) if not path.startswith("ahead/")}


def cache_shapes(
    model: nnx.Module, rows: int, places: int, layout: Layout | None
) -> dict[str, dict[str, Any]]:
    """Abstract `Caches` of a model for so many rows of so many tokens, with their places on the mesh."""

    def one(depth: int, kept: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        heads, width = kept.shape
        shape = (depth, rows, heads, places, width)
        if layout is None:
            return jax.ShapeDtypeStruct(shape, kept.dtype)
        cuts = [cut_axes(layout, name, n) or None for name, n in (("batch", rows), ("kv_heads", heads))]
        place = layout.place(P(None, *cuts))
        return jax.ShapeDtypeStruct(shape, kept.dtype, sharding=place)

    return {
        path: {name: one(_depth(module), kept) for name, kept in module.kept().items()}
        for path, module in _attentions(model).items()
    }


def _depth(module: nnx.Module) -> int:
    return int(jax.tree.leaves(nnx.state(module, nnx.Param))[0].shape[0])


def attach(model: nnx.Module, caches: Caches) -> None:
    """Gives the model's attentions their caches: it then takes tokens with `start_b`."""
    for path, module in _attentions(model).items():
        module.cache = Cache(caches[path])


def written(model: nnx.Module, caches: Caches, start_b: jax.Array) -> dict[str, dict[str, jax.Array]]:
    """The caches with what the model's last pass made of the tokens after the first `start_b` of their rows."""
    found: dict[str, dict[str, jax.Array]] = {}
    for path, module in _attentions(model).items():
        cache = module.cache
        assert cache is not None
        made = {"keys": cache.new_keys, "values": cache.new_values}
        found[path] = {
            name: _write(kept, made[name][...].astype(kept.dtype), start_b)  # type: ignore[index]
            for name, kept in caches[path].items()
        }
    return found


def _write(kept_lbkph: jax.Array, made_lbksh: jax.Array, start_b: jax.Array) -> jax.Array:
    def local(kept: jax.Array, made: jax.Array, start: jax.Array) -> jax.Array:
        rows = jnp.arange(kept.shape[1])[:, None]
        places = start[:, None] + jnp.arange(made.shape[3])
        options: dict[str, Any] = {"mode": "drop", "unique_indices": True, "indices_are_sorted": True}
        return kept.at[:, rows, :, places].set(made.transpose(1, 3, 0, 2, 4), **options)

    layout = current_layout()
    batch = "batch" if cut_axes(layout, "batch", kept_lbkph.shape[1]) else None
    heads = "kv_heads" if cut_axes(layout, "kv_heads", kept_lbkph.shape[2]) else None
    names = (None, batch, heads, None, None)
    return manual(local, [names, names, (batch,)], names)(kept_lbkph, made_lbksh, start_b)

"""Multi-head latent attention (DeepSeek-AI 2024): keys and values of all heads from one small vector a token.

Letters of shapes: b batch, s sequence, n heads, c latent, d hidden, p and r dimensions of a head without and with
positions, v of its values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.mesh import constrain
from dsjax.models.attention import attention
from dsjax.models.layers import Init, Linear
from dsjax.models.rotary import rotate
from dsjax.models.spec import Where


@dataclass(frozen=True)
class Latents:
    """Sizes and choices.

    Attributes:
      queries: dimensions of the vector that queries are made of; None: they are made of the input itself.
      latent: c.
      plain, rotated, values: p, r and v.
      interleaved: pairs that are rotated together lie side by side in the weights, not half a head apart.
      init: (inputs, outputs) -> initialiser of a matrix of that size.
      norm: makes a norm over so many features.
      scale: of the scores.
    """

    hidden: int
    heads: int
    queries: int | None
    latent: int
    plain: int
    rotated: int
    values: int
    interleaved: bool
    init: Callable[[int, int], Init]
    norm: Callable[[int, nnx.Rngs], Any]
    scale: float
    bias: bool = False


class LatentAttention(nnx.Module):
    """Attention whose keys and values are linear in a latent vector.

    Attributes:
      absorbed: queries go into the latent space and results come out of it, instead of the latents out to every
        head: one key and value of c + r and c dimensions a token, whatever the number of heads. More arithmetic for
        a whole sequence and less memory; the way to decode.
    """

    def __init__(self, sizes: Latents, *, rngs: nnx.Rngs):
        d, n, c = sizes.hidden, sizes.heads, sizes.latent
        self.sizes, self.absorbed = sizes, False

        def linear(
            inputs: tuple[int, ...], outputs: tuple[int, ...], size: tuple[int, int], bias: bool
        ) -> Linear:
            return Linear(inputs, outputs, init=sizes.init(*size), bias=bias, rngs=rngs)

        q, whole = sizes.queries, sizes.plain + sizes.rotated
        self.q_a_proj = linear((d,), (q,), (d, q), sizes.bias) if q else None
        self.q_a_norm = sizes.norm(q, rngs) if q else None
        self.q_proj = linear((q or d,), (n, whole), (q or d, n * whole), False)
        self.kv_a_proj = linear((d,), (c + sizes.rotated,), (d, c + sizes.rotated), sizes.bias)
        self.kv_a_norm = sizes.norm(c, rngs)
        self.kv_proj = linear(
            (c,), (n, sizes.plain + sizes.values), (c, n * (sizes.plain + sizes.values)), False
        )
        self.o_proj = linear((n, sizes.values), (d,), (n * sizes.values, d), sizes.bias)

    def __call__(self, x_bsd: jax.Array, where: Where) -> jax.Array:
        plain = self.sizes.plain
        q = x_bsd
        if self.q_a_proj is not None and self.q_a_norm is not None:
            q = self.q_a_norm(self.q_a_proj(q))
        q = constrain(self.q_proj(q), "batch", "sequence", "heads", None)
        q_plain, q_rotated = q[..., :plain], self._rotated(q[..., plain:], where)
        both = self.kv_a_proj(x_bsd)
        latent = self.kv_a_norm(both[..., : self.sizes.latent])
        # One head, which all share.
        k_rotated = self._rotated(both[..., None, self.sizes.latent :], where)
        form = self._by_latents if self.absorbed else self._by_heads
        out = form(q_plain, q_rotated, latent, k_rotated, where)
        return self.o_proj(constrain(out, "batch", "sequence", "columns", None))

    def _rotated(self, x_bsnr: jax.Array, where: Where) -> jax.Array:
        if self.sizes.interleaved:
            x_bsnr = jnp.concatenate([x_bsnr[..., 0::2], x_bsnr[..., 1::2]], axis=-1)
        return rotate(x_bsnr, *where.ropes[0])

    def _attended(self, q: jax.Array, k: jax.Array, v: jax.Array, where: Where) -> jax.Array:
        return attention(
            q, k, v, segment_ids_bs=where.segment_ids_bs, zigzag=where.zigzag, scale=self.sizes.scale
        )  # fmt: skip

    def _by_heads(
        self,
        q_plain: jax.Array,
        q_rotated: jax.Array,
        latent_bsc: jax.Array,
        k_rotated: jax.Array,
        where: Where,
    ) -> jax.Array:
        """[b, s, n, v]: every head's own keys and values."""
        made = constrain(self.kv_proj(latent_bsc), "batch", "sequence", "heads", None)
        shared = jnp.broadcast_to(k_rotated, (*made.shape[:3], k_rotated.shape[-1]))
        q = jnp.concatenate([q_plain, q_rotated], axis=-1)
        k = jnp.concatenate([made[..., : self.sizes.plain], shared], axis=-1)
        return self._attended(q, k, made[..., self.sizes.plain :], where)

    def _by_latents(
        self,
        q_plain: jax.Array,
        q_rotated: jax.Array,
        latent_bsc: jax.Array,
        k_rotated: jax.Array,
        where: Where,
    ) -> jax.Array:
        """The same [b, s, n, v] by the associative law: q (W c) = (q W) c, and sums of (W c) are W times sums of c."""
        kernel = self.kv_proj.kernel[...].astype(latent_bsc.dtype)
        to_keys, to_values = kernel[..., : self.sizes.plain], kernel[..., self.sizes.plain :]
        into = jnp.einsum("bsnp,cnp->bsnc", q_plain, to_keys)
        q = jnp.concatenate([into, q_rotated], axis=-1)
        k = jnp.concatenate([latent_bsc[:, :, None], k_rotated], axis=-1)
        found = self._attended(q, k, latent_bsc[:, :, None], where)
        return jnp.einsum("bsnc,cnv->bsnv", found, to_values)

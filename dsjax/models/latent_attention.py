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
from dsjax.models.decoding import Decodes
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


class LatentAttention(Decodes):
    """Attention whose keys and values are linear in a latent vector.

    With a cache, queries go into the latent space and results come out of it, instead of the latents out to every head
    (the absorbed form): one key of c + r dimensions a token is kept, of which the first c are the value too, whatever
    the number of heads. More arithmetic for a whole sequence, and much less to read for one more token.
    """

    def __init__(self, sizes: Latents, *, rngs: nnx.Rngs):
        d, n, c = sizes.hidden, sizes.heads, sizes.latent
        self.sizes = sizes

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
        sizes, cache = self.sizes, self.cache
        q = x_bsd
        if self.q_a_proj is not None and self.q_a_norm is not None:
            q = self.q_a_norm(self.q_a_proj(q))
        q = constrain(self.q_proj(q), "batch", "sequence", "heads", None)
        both = self.kv_a_proj(x_bsd)
        latent = self.kv_a_norm(both[..., : sizes.latent])
        plain = q[..., : sizes.plain]
        if cache is not None:
            # By the associative law: q (W c) = (q W) c, and sums of (W c) are W times sums of c.
            kernel = self.kv_proj.matrix().astype(latent.dtype)
            plain = jnp.einsum("bsnp,cnp->bsnc", plain, kernel[..., : sizes.plain])
            k = v = latent[:, :, None]
        else:
            made = constrain(self.kv_proj(latent), "batch", "sequence", "heads", None)
            k, v = made[..., : sizes.plain], made[..., sizes.plain :]
        # One head, which all share.
        k_rotated = self._rotated(both[..., None, sizes.latent :], where)
        k = jnp.concatenate([k, jnp.broadcast_to(k_rotated, (*k.shape[:3], sizes.rotated))], axis=-1)
        q = jnp.concatenate([plain, self._rotated(q[..., sizes.plain :], where)], axis=-1)
        if cache is not None:
            out = cache.attend(q, k, v, where.start_b, scale=sizes.scale)
            out = jnp.einsum("bsnc,cnv->bsnv", out, kernel[..., sizes.plain :])
        else:
            out = attention(
                q, k, v, segment_ids_bs=where.segment_ids_bs, zigzag=where.zigzag, scale=sizes.scale
            )  # fmt: skip
        return self.o_proj(constrain(out, "batch", "sequence", "columns", None))

    def kept(self) -> dict[str, jax.ShapeDtypeStruct]:
        """See `Decodes`."""
        made = self.kv_a_proj
        width = self.sizes.latent + self.sizes.rotated
        return {"keys": jax.ShapeDtypeStruct((1, width), made.dtype or made.kernel.dtype)}

    def _rotated(self, x_bsnr: jax.Array, where: Where) -> jax.Array:
        if self.sizes.interleaved:
            x_bsnr = jnp.concatenate([x_bsnr[..., 0::2], x_bsnr[..., 1::2]], axis=-1)
        return rotate(x_bsnr, *where.ropes[0])

"""Codecs: forms in which gradients travel, each a small pure object.

A codec turns fp32 numbers into bytes and back. What it loses it returns as a residual, which error feedback adds
to the next step's gradient (Seide et al. 2014; Karimireddy et al. 2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsjax.config.exchange import GradSyncConfig
from pallas_kernels import block_quant, top_k


class Codec(Protocol):
    """What a codec can do; `n` numbers are a multiple of `granule`.

    Attributes:
      name: as in a config, with what else decides about the meaning of a residual.
      granule: numbers that belong together.
      sparse: what is sent are few numbers out of all: encoded numbers are not added and encoded again.
      lossy: it keeps a residual.
    """

    @property
    def name(self) -> str: ...
    @property
    def granule(self) -> int: ...
    @property
    def sparse(self) -> bool: ...
    @property
    def lossy(self) -> bool: ...

    def bytes(self, n: int) -> int:
        """Bytes of n numbers, encoded."""

    def before(self, x: jax.Array) -> jax.Array:
        """Numbers [..., n] as they are encoded; linear."""

    def after(self, x: jax.Array) -> jax.Array:
        """The opposite of `before`."""

    def encode(self, x: jax.Array, residual: jax.Array | None, seed: Any) -> tuple[jax.Array, Any]:
        """uint8 [..., bytes(n)] of x + residual [..., n], and the new residual (None without one)."""

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """float32 [..., n]."""

    def decode_sum(self, payloads: jax.Array, n: int) -> jax.Array:
        """float32 [n]: the sum over the first dimension of payloads [s, bytes(n)], in its order."""


class _Plain:
    """Numbers are encoded as they are."""

    def before(self, x: jax.Array) -> jax.Array:
        return x

    def after(self, x: jax.Array) -> jax.Array:
        return x


@dataclass(frozen=True)
class Cast(_Plain):
    """bfloat16: half the bytes; sums are made in fp32 and rounded once more."""

    name: str = "bfloat16"
    granule: int = 1
    sparse: bool = False
    lossy: bool = False

    def bytes(self, n: int) -> int:
        return 2 * n

    def encode(self, x: jax.Array, residual: jax.Array | None, seed: Any) -> tuple[jax.Array, Any]:
        return _as_bytes(x.astype(jnp.bfloat16)), residual

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        return _from_bytes(payload, jnp.bfloat16).astype(jnp.float32)

    def decode_sum(self, payloads: jax.Array, n: int) -> jax.Array:
        return jnp.sum(self.decode(payloads, n), axis=0)


@dataclass(frozen=True)
class Blocks:
    """Blocks of numbers with a scale each, in few bits: int8, int4, e2m4.

    Attributes:
      format: of `pallas_kernels.block_quant`.
      block: numbers a scale.
      decay: share of a residual that is kept as it was.
      stochastic: rounds by chance.
      hadamard: blocks are turned by a Hadamard matrix; residuals are of the turned numbers.
    """

    format: str
    block: int = 128
    decay: float = 0.0
    stochastic: bool = False
    hadamard: bool = False
    sparse: bool = False
    lossy: bool = True

    @property
    def name(self) -> str:
        return f"{self.format} block {self.block}{' hadamard' if self.hadamard else ''}"

    @property
    def granule(self) -> int:
        return self.block

    def bytes(self, n: int) -> int:
        return block_quant.packed_bytes(n, self.format, self.block)

    def before(self, x: jax.Array) -> jax.Array:
        return _turned(x, self.block) if self.hadamard else x

    def after(self, x: jax.Array) -> jax.Array:
        return self.before(x)  # symmetric and orthogonal: its own inverse

    def encode(self, x: jax.Array, residual: jax.Array | None, seed: Any) -> tuple[jax.Array, Any]:
        seed = seed if self.stochastic else None
        return block_quant.pack(x, residual, format=self.format, block=self.block, beta=self.decay, seed=seed)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        return block_quant.unpack(payload, n, format=self.format, block=self.block)

    def decode_sum(self, payloads: jax.Array, n: int) -> jax.Array:
        return block_quant.unpack_sum(payloads, n, format=self.format, block=self.block)


@dataclass(frozen=True)
class TopK(_Plain):
    """The largest numbers only (Aji & Heafield 2017), in bfloat16 or 4 bits; where they are is a bit map or indices.

    Attributes:
      fraction: share of the numbers that are sent, at least one.
      quantised: values in int4 blocks.
      block: numbers a scale of those.
    """

    fraction: float = 0.05
    quantised: bool = False
    block: int = 128
    granule: int = 1
    sparse: bool = True
    lossy: bool = True

    @property
    def name(self) -> str:
        return f"top-k{' int4' if self.quantised else ''}"

    def count(self, n: int) -> int:
        """How many of n numbers are sent."""
        return max(1, min(n, round(self.fraction * n)))

    def _mapped(self, n: int) -> bool:
        """Whether a bit a number takes fewer bytes than an index a number sent."""
        return -(-n // 8) <= 4 * self.count(n)

    def _values(self) -> Blocks | Cast:
        return Blocks("int4", self.block) if self.quantised else Cast()

    def _padded(self, n: int) -> int:
        granule = self._values().granule
        return -(-self.count(n) // granule) * granule

    def bytes(self, n: int) -> int:
        places = -(-n // 8) if self._mapped(n) else 4 * self.count(n)
        return self._values().bytes(self._padded(n)) + places

    def encode(self, x: jax.Array, residual: jax.Array | None, seed: Any) -> tuple[jax.Array, Any]:
        n, k = x.shape[-1], self.count(x.shape[-1])
        values, indices, kept = top_k.select(x, residual, k)
        values = jnp.pad(values, (0, self._padded(n) - k))
        payload, _ = self._values().encode(values, None, seed)
        left = None
        if residual is not None:
            # What rounding took from the numbers that were sent stays behind too.
            lost = (values - self._values().decode(payload, len(values)))[:k]
            left = kept.at[indices].set(lost, indices_are_sorted=True, unique_indices=True)
        places = top_k.pack_mask(indices, n) if self._mapped(n) else _as_bytes(indices)
        return jnp.concatenate([payload, places]), left

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        k = self.count(n)
        size = self._values().bytes(self._padded(n))
        values = self._values().decode(payload[:size], self._padded(n))[:k]
        if self._mapped(n):
            return top_k.scatter_from_mask(values, payload[size:], n)
        indices = _from_bytes(payload[size:], jnp.int32)
        return jnp.zeros(n, jnp.float32).at[indices].set(values, indices_are_sorted=True, unique_indices=True)

    def decode_sum(self, payloads: jax.Array, n: int) -> jax.Array:
        total = jnp.zeros(n, jnp.float32)
        return lax.fori_loop(0, len(payloads), lambda i, sum: sum + self.decode(payloads[i], n), total)


def make_codec(config: GradSyncConfig) -> Codec | None:
    """The codec that a config names; None: fp32, as it is."""
    if config.codec == "dense":
        return Cast() if config.dense_dtype == "bfloat16" else None
    if config.codec in ("topk", "topk_int4"):
        return TopK(config.fraction, config.codec == "topk_int4", config.block)
    return Blocks(config.codec, config.block, config.feedback_decay, config.stochastic, config.hadamard)


def _as_bytes(x: jax.Array) -> jax.Array:
    """[..., n] of any type as uint8 [..., n * its bytes]."""
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], -1)


def _from_bytes(x: jax.Array, dtype: Any) -> jax.Array:
    size = jnp.dtype(dtype).itemsize
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, size), dtype)


def _turned(x: jax.Array, block: int) -> jax.Array:
    """Blocks times a Hadamard matrix / sqrt(block), by the fast transform: sums and differences of halves.

    Signs before and after it, as by a random draw, keep it symmetric; without them a constant block would become one
    large number.
    """
    signs = np.random.default_rng(0).choice(np.array([-1, 1], np.float32), block)
    y = x.reshape(*x.shape[:-1], -1, block) * signs
    half = 1
    while half < block:
        pairs = y.reshape(*y.shape[:-1], -1, 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = jnp.stack([a + b, a - b], axis=-2).reshape(y.shape)
        half *= 2
    return (y * (signs / np.float32(math.sqrt(block)))).reshape(x.shape)

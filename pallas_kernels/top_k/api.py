"""The k largest magnitudes on whatever is here: Triton kernels on GPUs, plain JAX elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import hardware
from pallas_kernels.top_k import reference, triton

KERNELS = {"triton": triton.GENERATIONS}


def key(x: jax.Array) -> jax.Array:
    """uint32 keys in the order of |x|, any shape: the bits of |x| as f32; NaN is above infinity."""
    return reference.key(x)


def threshold(x: jax.Array, k: int) -> jax.Array:
    """Key of the k-th largest magnitude, exactly, from counts of keys: nothing is sorted.

    Args:
      x: [n] f32 or bf16.

    Returns:
      uint32 scalar.

    Raises:
      ValueError: x is no vector, or k is not in 1 .. n.
    """
    _check("threshold", x, k)
    chosen = hardware.choose(KERNELS)
    if chosen == "reference":
        return reference.threshold(x, k)
    return triton.threshold(x, k, interpret=chosen == "interpret")


def select(x: jax.Array, residual: jax.Array | None, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The k largest of h = x + residual, and what is left: top-k with error feedback.

    All above the k-th largest magnitude are sent, then the first of those equal to it.

    Args:
      x: [n] f32 or bf16.
      residual: [n] f32, or None for zeros.

    Returns:
      values [k] f32; their indices [k] int32, ascending; the new residual [n] f32, h with the sent places 0.

    Raises:
      ValueError: x is no vector, residual is not like x, or k is not in 1 .. n.
    """
    _check("select", x, k)
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"select: expected a residual like x, {x.shape}; got {residual.shape}")
    if residual is not None:
        residual = residual.astype(jnp.float32)
    chosen = hardware.choose(KERNELS)
    if chosen == "reference":
        return reference.select(x, residual, k)
    return triton.select(x, residual, k, interpret=chosen == "interpret")


def pack_mask(indices: jax.Array, n: int) -> jax.Array:
    """A bitmap of places: bit i % 8 of byte i // 8 is set for every i in `indices`.

    Args:
      indices: [k] int32, ascending, each once, below n.

    Returns:
      [ceil(n / 8)] u8.
    """
    return reference.pack_mask(indices, n)


def scatter_from_mask(values: jax.Array, bitmap: jax.Array, n: int) -> jax.Array:
    """Values at the places of a bitmap, zeros elsewhere; the inverse of `select` and `pack_mask`.

    A place's value is found by its rank among the bits that are set, so that nothing is scattered.

    Args:
      values: [k] f32, in the order of their places.
      bitmap: [ceil(n / 8)] u8 with k bits set.

    Returns:
      [n] f32.

    Raises:
      ValueError: the bitmap is not of n bits.
    """
    if bitmap.shape != (-(-n // 8),):
        raise ValueError(f"scatter_from_mask: expected a bitmap [{-(-n // 8)}] for n={n}; got {bitmap.shape}")
    chosen = hardware.choose(KERNELS)
    if chosen == "reference":
        return reference.scatter_from_mask(values, bitmap, n)
    return triton.scatter_from_mask(values, bitmap, n, interpret=chosen == "interpret")


def _check(what: str, x: jax.Array, k: int) -> None:
    if x.ndim != 1 or x.size >= 1 << 31:
        raise ValueError(f"{what}: expected x [n], n below 2^31; got {x.shape}")
    if not 1 <= k <= x.size:
        raise ValueError(f"{what}: expected k in 1 .. {x.size}; got {k}")

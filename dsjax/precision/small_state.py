"""Optimizer state in fewer bytes: moments in bf16 or in 8 bits, whatever the optimizer.

Moments change by less than the steps of bf16, so they are rounded at random, up or down with the odds that keep
their mean.  In 8 bits a block of numbers shares a scale, its largest, and each is one of 255 or 127 values below it
whose distance grows with them (dynamic exponents: Dettmers et al. 2021, "8-bit Optimizers via Block-wise
Quantization"): a moment a million times smaller than its neighbour still has a value of its own.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import optax

from dsjax.precision.rounding import stochastically_rounded

BLOCK, SMALLEST_BLOCK, SMALLEST = 128, 16, 4096


@flax.struct.dataclass
class SmallState:
    """The state of an optimizer in fewer bytes.

    Attributes:
      count: int32 [], updates made.
      codes: the optimizer's own state, with moments in bf16 or as codes.
      scales: likewise, with the scales of blocks, float32 [..., blocks]; [] where there are none.
    """

    count: jax.Array
    codes: Any
    scales: Any


def small_state(
    optimizer: optax.GradientTransformation, dtype: Literal["bfloat16", "int8"]
) -> optax.GradientTransformation:
    """An optimizer that keeps its state in fewer bytes; it computes in fp32 as it did.

    Args:
      optimizer: any optax transformation. Of its state float32 arrays of `SMALLEST` numbers or more are made
        small; in 8 bits those whose last dimension has blocks of at least `SMALLEST_BLOCK`.
    """

    def init(params: Any) -> SmallState:
        return _packed(optimizer.init(params), dtype, jnp.int32(0))

    def update(updates: Any, state: SmallState, params: Any = None, **more: Any) -> tuple[Any, SmallState]:
        updates, inner = optimizer.update(updates, _unpacked(state), params, **more)
        return updates, _packed(inner, dtype, state.count + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def _packed(state: Any, dtype: str, count: jax.Array) -> SmallState:
    found, tree = jax.tree_util.tree_flatten_with_path(state)
    codes, scales = [], []
    for number, (path, leaf) in enumerate(found):
        code, scale = leaf, jnp.zeros((), jnp.float32)
        if _is_moment(leaf) and dtype == "bfloat16":
            code = stochastically_rounded(leaf, jax.random.fold_in(jax.random.key(number), count))
        elif _is_moment(leaf) and _block(leaf.shape):
            code, scale = encoded(leaf, _is_square(path))
        codes.append(code)
        scales.append(scale)
    return SmallState(count, jax.tree.unflatten(tree, codes), jax.tree.unflatten(tree, scales))


def _unpacked(state: SmallState) -> Any:
    def one(code: Any, scale: Any) -> Any:
        if code.dtype == jnp.bfloat16:
            return code.astype(jnp.float32)
        return decoded(code, scale, code.dtype == jnp.uint8) if scale.ndim else code

    return jax.tree.map(one, state.codes, state.scales)


def mean_of_workers(state: SmallState) -> SmallState:
    """The mean of states of which each worker has its own, [workers, ...], in the same types."""
    narrow = any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(state.codes))
    whole = jax.vmap(_unpacked)(state)
    one = jax.tree.map(lambda x: jnp.mean(x, axis=0) if jnp.issubdtype(x.dtype, jnp.inexact) else x[0], whole)
    return _packed(one, "bfloat16" if narrow else "int8", state.count[0])


def _is_moment(leaf: Any) -> bool:
    return leaf.dtype == jnp.float32 and leaf.ndim > 0 and leaf.size >= SMALLEST


def _is_square(path: Any) -> bool:
    """Whether a moment is one of squares, which are never negative, by the names that optax's states give them."""
    return any(getattr(entry, "name", "") in ("nu", "v", "v_row", "v_col") for entry in path)


def _block(shape: tuple[int, ...]) -> int:
    """Numbers of the last dimension that share a scale; 0: too few."""
    block = math.gcd(shape[-1], BLOCK)
    return block if block >= SMALLEST_BLOCK else 0


# ---- 8 bits ----------------------------------------------------------------------------------------
#
# Code 0 is the number 0; codes 2^e to 2^(e+1) - 1 are the middles of 2^e equal parts of one power of ten, the e-th;
# the last code is 1.  All by arithmetic: what looks into a table is not fused into what is computed from it.


def _powers(square: bool) -> int:
    """Powers of ten that codes cover; one bit is the sign of what is no square."""
    return 8 if square else 7


def _middle(code: jax.Array, square: bool) -> jax.Array:
    """The magnitude that a positive code (int32) stands for, 0 to 1."""
    power = 31 - jax.lax.clz(jnp.maximum(code, 1))
    parts = jnp.left_shift(1, power).astype(jnp.float32)
    place = (code.astype(jnp.float32) - parts + 0.5) / parts
    value = (0.1 + 0.9 * place) * _ten_to(power - _powers(square) + 1)
    return jnp.where(code == 2 ** _powers(square) - 1, 1.0, jnp.where(code == 0, 0.0, value))


def _code(part: jax.Array, square: bool) -> jax.Array:
    """The code (int32) of a magnitude from 0 to 1: the part of its power of ten that it lies in."""
    highest = _powers(square) - 1
    power = jnp.ceil(jnp.log10(jnp.maximum(part, 1e-30))).astype(jnp.int32) + highest
    power = jnp.clip(power, 0, highest)
    parts = jnp.left_shift(1, power).astype(jnp.float32)
    place = jnp.floor((part / _ten_to(power - highest) - 0.1) / 0.9 * parts)
    code = (parts + jnp.clip(place, 0.0, parts - 1)).astype(jnp.int32)
    # Half of the smallest value and less is 0, but of squares: the root of a moment is divided by.
    smallest = 0.0 if square else 0.275 * 10.0**-highest
    return jnp.where(part > smallest, code, 0)


def _ten_to(power: jax.Array) -> jax.Array:
    return jnp.exp(power.astype(jnp.float32) * math.log(10.0))


def encoded(x: jax.Array, square: bool) -> tuple[jax.Array, jax.Array]:
    """Codes of numbers: uint8 of squares, int8 of others, as x, and scales, float32 [..., blocks]."""
    blocks = x.reshape(*x.shape[:-1], -1, _block(x.shape))
    scale = jnp.max(jnp.abs(blocks), axis=-1)
    code = _code(jnp.abs(blocks) / jnp.where(scale > 0, scale, 1.0)[..., None], square)
    if square:
        return code.astype(jnp.uint8).reshape(x.shape), scale
    return jnp.where(blocks < 0, -code, code).astype(jnp.int8).reshape(x.shape), scale


def decoded(codes: jax.Array, scale: jax.Array, square: bool) -> jax.Array:
    """The numbers, float32."""
    blocks = codes.reshape(*codes.shape[:-1], scale.shape[-1], -1).astype(jnp.int32)
    found = _middle(jnp.abs(blocks), square) * jnp.sign(blocks) * scale[..., None]
    return found.reshape(codes.shape)

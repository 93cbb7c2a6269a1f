"""Cross-entropy of a linear head, by chunks of tokens: the full tokens x vocabulary array never exists.

The loss is a sum, so its gradient is known up to one factor once a chunk's logits are: hidden states'
and kernel's gradients are made together with the loss, and a chunk's logits are computed only once.

Letters of shapes: b batch, s sequence, t tokens of a device, c tokens of a chunk, d hidden, v vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from dsjax.mesh import Layout, current_layout
from dsjax.models.layers import cut_axes

# Score of a padding entry of the vocabulary: its probability is 0 and it is never the largest.
_PADDING = -1e30


def linear_cross_entropy(
    hidden_bsd: jax.Array,
    kernel_dv: jax.Array,
    targets_bs: jax.Array,
    weights_bs: jax.Array,
    *,
    vocab_size: int,
    dtype: Any = jnp.float32,
    chunk: int = 1024,
    cap: float | None = None,
) -> jax.Array:
    """Sum over tokens of weight * -log softmax(hidden @ kernel)[target], float32 [].

    Args:
      kernel_dv: the head, v >= vocab_size; columns past it are padding and get no gradient. Gathered
        already along d; cut along v or whole.
      targets_bs: int32 in [0, vocab_size); anything where the weight is 0.
      weights_bs: float32; a token of weight 0 adds nothing, whatever its hidden state is.
      dtype: type of the matrix products; softmax and sums are fp32.
      chunk: tokens of each device whose logits exist at a time.
      cap: logits are bent to cap * tanh(logit / cap), in fp32; None: they are as they are.
    """
    setting = replace(_Setting.of(hidden_bsd.shape, kernel_dv, vocab_size, jnp.dtype(dtype), chunk), cap=cap)
    return _summed(hidden_bsd, kernel_dv, targets_bs, weights_bs.astype(jnp.float32), setting)


@dataclass(frozen=True)
class _Setting:
    """What does not change from call to call, and how the arrays are cut.

    Attributes:
      padded: the kernel has columns past the vocabulary.
      layout: None on one device.
      batch_axes, sequence_axes: mesh axes over which b and s are cut.
      vocab_axes: mesh axes over which the kernel's columns are cut.
      scatter_axes: those along d over which the kernel's gradient leaves cut.
      kernel_dtype: of the kernel as it is given, and of its gradient.
      cap: what logits stay below.
    """

    vocab_size: int
    dtype: Any
    chunk: int
    padded: bool
    layout: Layout | None
    batch_axes: tuple[str, ...] = ()
    sequence_axes: tuple[str, ...] = ()
    vocab_axes: tuple[str, ...] = ()
    scatter_axes: tuple[str, ...] = ()
    kernel_dtype: Any = None
    cap: float | None = None

    @staticmethod
    def of(hidden: tuple[int, ...], kernel: jax.Array, vocab_size: int, dtype: Any, chunk: int) -> _Setting:
        layout, kernel_dtype = current_layout(), kernel.dtype
        rows, columns = kernel.shape
        padded = columns > vocab_size
        if layout is None or layout.alone:
            return _Setting(vocab_size, dtype, chunk, padded, None, kernel_dtype=kernel_dtype)

        batch = cut_axes(layout, "batch", hidden[0])
        sequence = cut_axes(layout, "sequence", hidden[1])
        vocab = cut_axes(layout, "vocab", columns)
        scatter = tuple(axis for axis in layout.shard_axes if axis in (*batch, *sequence))
        if rows % math.prod(layout.axis_size(axis) for axis in scatter):
            scatter = ()
        return _Setting(
            vocab_size, dtype, chunk, padded, layout, batch, sequence, vocab, scatter, kernel_dtype
        )

    @property
    def lift(self) -> float:
        """What gradients of logits are multiplied by: in fp16 probabilities below 6e-8 would all be 0."""
        return 64.0 if self.dtype == jnp.float16 else 1.0

    @property
    def summed_dtype(self) -> Any:
        """The type in which the kernel's gradient is summed over devices: a sum over all tokens outgrows fp16."""
        return jnp.float32 if self.kernel_dtype == jnp.float16 else self.kernel_dtype

    @property
    def token_axes(self) -> tuple[str, ...]:
        return self.batch_axes + self.sequence_axes

    def mapped(self, function: Callable[..., Any], gradients: bool) -> Callable[..., Any]:
        """`function` over each device's tokens and columns."""
        if self.layout is None:
            return function
        vocab = self.vocab_axes or None
        tokens = P(self.batch_axes or None, self.sequence_axes or None)
        outputs: Any = P()
        if gradients:
            outputs = (P(), P(*tokens, None), P(self.scatter_axes or None, vocab))
        return self.layout.shard_map(function, (P(*tokens, None), P(None, vocab), tokens, tokens), outputs)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _summed(hidden: Any, kernel: Any, targets: Any, weights: Any, setting: _Setting) -> jax.Array:
    def local(hidden: Any, kernel: Any, targets: Any, weights: Any) -> jax.Array:
        loss = _local(hidden, kernel, targets, weights, setting, False)[0]
        return _sum_over(loss, setting.token_axes)

    return setting.mapped(local, False)(hidden, kernel, targets, weights)


def _summed_fwd(hidden: Any, kernel: Any, targets: Any, weights: Any, setting: _Setting) -> tuple[Any, Any]:
    def local(hidden: Any, kernel: Any, targets: Any, weights: Any) -> tuple[jax.Array, ...]:
        loss, d_hidden, d_kernel = _local(hidden, kernel, targets, weights, setting, True)
        scatter = setting.scatter_axes
        axes = tuple(axis for axis in setting.token_axes if axis not in scatter)
        if scatter:
            d_kernel = lax.psum_scatter(d_kernel, scatter, scatter_dimension=0, tiled=True)
        return _sum_over(loss, setting.token_axes), d_hidden, _sum_over(d_kernel, axes)

    loss, *gradients = setting.mapped(local, True)(hidden, kernel, targets, weights)
    return loss, gradients


def _summed_bwd(setting: _Setting, gradients: Any, factor: jax.Array) -> tuple[Any, ...]:
    d_hidden, d_kernel = gradients
    return (
        (d_hidden * factor).astype(d_hidden.dtype),
        (d_kernel * factor).astype(setting.kernel_dtype),
        None,
        None,
    )


_summed.defvjp(_summed_fwd, _summed_bwd)


def _sum_over(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.psum(x, axes) if axes else x


def _local(
    hidden_bsd: Any, kernel_dv: Any, targets_bs: Any, weights_bs: Any, setting: _Setting, gradients: bool
) -> tuple[jax.Array, Any, Any]:
    """This device's tokens: loss, gradient of hidden, gradient of the kernel's own columns."""
    tokens = targets_bs.size
    count = -(-tokens // setting.chunk)
    size = -(-tokens // count)

    def chunked(x: jax.Array) -> jax.Array:
        flat = x.reshape(tokens, *x.shape[2:])
        padding = [(0, count * size - tokens)] + [(0, 0)] * (flat.ndim - 1)
        return jnp.pad(flat, padding).reshape(count, size, *flat.shape[1:])

    kernel = kernel_dv.astype(setting.dtype)
    column = jnp.arange(kernel.shape[1])
    if setting.vocab_axes:
        column += lax.axis_index(setting.vocab_axes) * kernel.shape[1]

    def step(carry: tuple[Any, Any], scanned: tuple[Any, Any, Any]) -> tuple[tuple[Any, Any], Any]:
        hidden, targets, weights = scanned
        loss, d_hidden, d_kernel = _chunk(hidden, targets, weights, kernel, column, setting, gradients)
        return (carry[0] + loss, carry[1] + d_kernel if gradients else None), d_hidden

    parts = (chunked(hidden_bsd), chunked(targets_bs), chunked(weights_bs))
    start: Any = (jnp.zeros(()), jnp.zeros(kernel.shape, jnp.float32) if gradients else None)
    (loss, d_kernel), d_hidden = lax.scan(step, start, parts, unroll=count == 1)
    if not gradients:
        return loss, None, None
    d_hidden = d_hidden.reshape(count * size, -1)[:tokens].reshape(hidden_bsd.shape)
    return loss, d_hidden, (d_kernel / setting.lift).astype(setting.summed_dtype)


def _chunk(
    hidden_cd: Any,
    targets_c: Any,
    weights_c: Any,
    kernel_dv: Any,
    column_v: Any,
    setting: _Setting,
    gradients: bool,
) -> tuple[jax.Array, Any, Any]:
    """One chunk's loss, and with `gradients` those of its hidden states and of the kernel."""
    over_vocab = setting.vocab_axes
    live_c = weights_c != 0
    hidden = jnp.where(live_c[:, None], hidden_cd, 0).astype(setting.dtype)
    logits_cv = jnp.dot(hidden, kernel_dv, preferred_element_type=jnp.float32)
    slope_cv: Any = None
    if setting.cap is not None:
        bent_cv = jnp.tanh(logits_cv / setting.cap)
        logits_cv, slope_cv = setting.cap * bent_cv, 1 - bent_cv * bent_cv
    if setting.padded:
        logits_cv = jnp.where(column_v < setting.vocab_size, logits_cv, _PADDING)
    top_c = logits_cv.max(-1)
    if over_vocab:
        top_c = lax.pmax(top_c, over_vocab)
    exp_cv = jnp.exp(logits_cv - top_c[:, None])
    total_c = _sum_over(exp_cv.sum(-1), over_vocab)
    own_c = targets_c - column_v[0]
    picked_c = jnp.take_along_axis(logits_cv, own_c[:, None], axis=1, mode="clip")[:, 0]
    here_c = (own_c >= 0) & (own_c < column_v.size)
    target_c = _sum_over(jnp.where(here_c, picked_c, 0), over_vocab)
    # A target outside the vocabulary shows as NaN instead of being counted as something else.
    known_c = (targets_c >= 0) & (targets_c < setting.vocab_size)
    losses_c = jnp.where(known_c, top_c + jnp.log(total_c) - target_c, jnp.nan)
    loss = jnp.sum(jnp.where(live_c, weights_c * losses_c, 0))
    if not gradients:
        return loss, None, None
    is_target_cv = column_v == targets_c[:, None]
    d_logits = (exp_cv / total_c[:, None] - is_target_cv) * (weights_c * setting.lift)[:, None]
    d_logits = d_logits if slope_cv is None else d_logits * slope_cv
    d_logits = d_logits.astype(setting.dtype)
    d_hidden = jnp.einsum("cv,dv->cd", d_logits, kernel_dv, preferred_element_type=jnp.float32) / setting.lift
    d_kernel = jnp.einsum("cd,cv->dv", hidden, d_logits, preferred_element_type=jnp.float32)
    return loss, _sum_over(d_hidden, over_vocab).astype(hidden_cd.dtype), d_kernel

"""Layers that model families share: projections, embedding, normalisation, rotary positions.

Parameters are fp32; a layer whose `dtype` is None computes in its parameters' type until a precision
policy sets another.  Matrices keep their heads as a dimension of their own, so that a layout cuts
between heads and never through one.

Letters of shapes: b batch, s sequence, n heads, h head dimension, d hidden, m feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from dsjax.mesh import Layout, constrain, current_layout, gathered

__all__ = [
    "MLP", "Activation", "Embedding", "GatedMLP", "Init", "LayerNorm", "Linear", "Matrix", "RMSNorm", "cut_axes",
    "gather_sequence", "normal", "product", "rms_norm", "xavier_uniform",
]  # fmt: skip

Init = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]
Activation = Callable[[jax.Array], jax.Array]


def cut_axes(layout: Layout | None, name: str, extent: int) -> tuple[str, ...]:
    """Mesh axes over which an activation's dimension of this extent is cut in a shard_map.

    One that does not divide (the rows of a last, partial batch) is whole on every device.
    """
    if layout is None:
        return ()
    axes = layout.active(name)
    return axes if extent % math.prod([layout.axis_size(axis) for axis in axes]) == 0 else ()


def normal(stddev: float) -> Init:
    """Independent normal draws."""
    return jax.nn.initializers.normal(stddev)


def xavier_uniform(inputs: int, outputs: int) -> Init:
    """Glorot & Bengio 2010 for a matrix of so many inputs and outputs, whatever dimensions it has."""
    limit = math.sqrt(6.0 / (inputs + outputs))

    def draw(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -limit, limit)

    return draw


class Matrix(nnx.Module):
    """A kernel [*inputs, *outputs] that others multiply by, in its type: a head is, by the loss.

    Args:
      inputs, outputs: dimensions contracted and made.
      init: draws the kernel.
    """

    def __init__(self, inputs: Sequence[int], outputs: Sequence[int], *, init: Init, rngs: nnx.Rngs):
        self.contracted, self.dimensions = len(inputs), len(inputs) + len(outputs)
        self.dtype: Any = None
        self.kernel = nnx.Param(init(rngs.params(), (*inputs, *outputs), jnp.float32))

    def matrix(self) -> jax.Array:
        """The kernel, with what an adapter adds to it (`dsjax.models.adapters`)."""
        return self.kernel[...]


class Linear(Matrix):
    """A projection from the last dimensions of its input to new ones; a bias, if it has one, begins as zeros.

    `dot_general`, if given, multiplies in place of `jax.lax.dot_general`.
    """

    def __init__(
        self, inputs: Sequence[int], outputs: Sequence[int], *, init: Init, bias: bool = False, rngs: nnx.Rngs
    ):
        super().__init__(inputs, outputs, init=init, rngs=rngs)
        self.dot_general: Any = None
        self.bias = nnx.Param(jnp.zeros(tuple(outputs), jnp.float32)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel[...]
        dtype = self.dtype or kernel.dtype
        y = product(
            self.dot_general or jax.lax.dot_general, x.astype(dtype), kernel.astype(dtype), self.contracted
        )
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


def product(dot_general: Any, x: jax.Array, kernel: jax.Array, contracted: int) -> jax.Array:
    """x [..., *inputs] times kernel [*inputs, *outputs], as one product of two matrices where that is free.

    XLA's CPU library takes a weight's gradient over two token dimensions nearly twice as long as over
    one. On a mesh the dimensions stay: a flat one could not be cut along both batch and sequence.
    """
    lead, inputs = x.shape[: x.ndim - contracted], math.prod(kernel.shape[:contracted])
    if not _alone():
        last, first = tuple(range(len(lead), x.ndim)), tuple(range(contracted))
        return dot_general(x, kernel, ((last, first), ((), ())))
    flat = dot_general(x.reshape(-1, inputs), kernel.reshape(inputs, -1), (((1,), (0,)), ((), ())))
    return flat.reshape(*lead, *kernel.shape[contracted:])


def _flat(x_bsd: jax.Array) -> jax.Array:
    """[b * s, d] on one device, where elementwise loops over it are simpler; unchanged on a mesh."""
    return x_bsd.reshape(-1, x_bsd.shape[-1]) if _alone() else x_bsd


def _alone() -> bool:
    layout = current_layout()
    return layout is None or layout.alone


def gather_sequence(x_bsd: jax.Array) -> jax.Array:
    """The input of matrix products from what lies between them: no longer cut along s over `tensor`.

    Moves what Megatron-LM's sequence parallelism moves (Korthikanti et al. 2022).
    """
    layout = current_layout()
    if layout is None or layout.fitting("residual", x_bsd.shape[1]) == layout.fitting(
        "sequence", x_bsd.shape[1]
    ):
        return x_bsd
    # The barrier keeps the compiler from gathering the wider values that x was cast from.
    return constrain(jax.lax.optimization_barrier(x_bsd), "batch", "sequence", "embed")


class Embedding(nnx.Module):
    """A table of vectors, [rows, features]; its dimensions are named (`vocab`, `embed`) in a layout."""

    operator = "embedding"

    def __init__(self, rows: int, features: int, *, init: Init, rngs: nnx.Rngs):
        self.dtype: Any = None
        self.embedding = nnx.Param(init(rngs.params(), (rows, features), jnp.float32))

    def table(self, prefix: str) -> jax.Array:
        """The table gathered over `fsdp`. `prefix` is this layer's path in the model."""
        return gathered({"embedding": self.embedding[...]}, prefix)["embedding"]

    def __call__(self, tokens_bs: jax.Array) -> jax.Array:
        """Vectors [b, s, d] of int32 [b, s] rows."""
        table = self.embedding[...]
        # Its gradient is a sum over all tokens: in a narrow type what a frequent one adds would be lost.
        wide = table.astype(jnp.promote_types(table.dtype, jnp.float32))
        return _lookup(wide, tokens_bs, jnp.dtype(self.dtype or table.dtype))


def _lookup(table_vd: jax.Array, tokens_bs: jax.Array, dtype: Any) -> jax.Array:
    """Rows of a table that stays cut: over `tensor` along v, over `shard_axes` along d.

    Each device looks up its own columns for the tokens of all its peers along those axes and the parts
    change places, which moves a vector a token instead of the whole table, forward and backward.
    """
    layout = current_layout()
    if layout is None or (layout.alone and not layout.gather_axes):
        return jnp.take(table_vd, tokens_bs, axis=0, mode="clip").astype(dtype)
    cut_rows = layout.axis_size("tensor") > 1
    batch = cut_axes(layout, "batch", tokens_bs.shape[0])
    sequence = cut_axes(layout, "sequence", tokens_bs.shape[1])
    columns = layout.gather_axes
    # The dimension of the tokens along which peers hold others of them; of one dimension, those gathered last part
    # first.
    cut = (*batch, *sequence, *layout.local)
    along = [axis for axis in columns if axis in cut and axis in sequence]
    peers = [(a, 1) for a in along] + [(a, 0) for a in columns if a in cut and a not in along]

    def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
        for axis, dimension in peers:
            tokens = jax.lax.all_gather(tokens, axis, axis=dimension, tiled=True)
        row = tokens
        if cut_rows:
            row = tokens - jax.lax.axis_index("tensor") * table.shape[0]
        found = jnp.take(table, row, axis=0, mode="clip").astype(dtype)
        if cut_rows:
            mine = (row >= 0) & (row < table.shape[0])
            found = jax.lax.psum(jnp.where(mine[..., None], found, 0), "tensor")
        for axis in columns[::-1]:
            split = dict(peers).get(axis)
            if split is None:
                found = jax.lax.all_gather(found, axis, axis=2, tiled=True)
            else:
                found = jax.lax.all_to_all(found, axis, split_axis=split, concat_axis=2, tiled=True)
        return found

    tokens_spec, rows = P(batch or None, sequence or None), layout.active("embed")
    held = (*rows, *(axis for axis in columns if axis not in layout.local))
    in_specs = (P("tensor" if cut_rows else None, held or None), tokens_spec)
    return layout.shard_map(local, in_specs, P(*tokens_spec, rows or None))(table_vd, tokens_bs)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, dtype: Any = jnp.float32) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale over the scale's dimensions, inside in `dtype` (Zhang & Sennrich 2019)."""
    wide = x.astype(dtype)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, _last(scale.ndim), keepdims=True) + eps)
    return (wide * scale.astype(dtype)).astype(x.dtype)


def _last(count: int) -> tuple[int, ...]:
    return tuple(range(-count, 0))


class RMSNorm(nnx.Module):
    """`rms_norm` with a learned scale: of its input's type, fp32 inside unless its `dtype` says otherwise.

    Args:
      features: of the dimension, or dimensions, over which is normalised.
      offset: what is added to the scale that is learned, which begins at 1 - offset (Gemma: 1).
    """

    operator = "norm"

    def __init__(self, features: int | tuple[int, ...], *, eps: float, offset: float = 0.0, rngs: nnx.Rngs):
        self.eps, self.offset = eps, offset
        self.dtype: Any = None
        shape = (features,) if isinstance(features, int) else features
        self.scale = nnx.Param(jnp.full(shape, 1 - offset, jnp.float32))

    def __call__(self, x: jax.Array, prefix: str | None = None) -> jax.Array:
        """x normalised; `prefix` is this layer's path where its scale is still cut over `fsdp`."""
        scale = self.scale[...]
        if prefix is not None:
            scale = gathered({"scale": scale}, prefix)["scale"]
        if self.offset:
            scale = scale + self.offset
        return rms_norm(x, scale, self.eps, self.dtype or jnp.float32)


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + eps) * scale + bias over the last dimension (Ba et al. 2016); types as `RMSNorm`."""

    operator = "norm"

    def __init__(self, features: int, *, eps: float, rngs: nnx.Rngs):
        self.eps = eps
        self.dtype: Any = None
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((features,), jnp.float32))

    def __call__(self, x: jax.Array, prefix: str | None = None) -> jax.Array:
        """x normalised; `prefix` is this layer's path where its parameters are still cut over `fsdp`."""
        own = {"scale": self.scale[...], "bias": self.bias[...]}
        own = own if prefix is None else gathered(own, prefix)
        dtype = self.dtype or jnp.float32
        wide = x.astype(dtype)
        wide = wide - jnp.mean(wide, -1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
        return (wide * own["scale"].astype(dtype) + own["bias"].astype(dtype)).astype(x.dtype)


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)): SwiGLU and its like (Shazeer 2020).

    Args:
      init: (inputs, outputs) -> initialiser of a matrix of that size.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        init: Callable[[int, int], Init],
        activation: Activation = jax.nn.silu,
        bias: bool = False,
        rngs: nnx.Rngs,
    ):
        self.activation = activation
        self.gate_proj = Linear((features,), (hidden,), init=init(features, hidden), bias=bias, rngs=rngs)
        self.up_proj = Linear((features,), (hidden,), init=init(features, hidden), bias=bias, rngs=rngs)
        self.down_proj = Linear((hidden,), (features,), init=init(hidden, features), bias=bias, rngs=rngs)

    def __call__(self, x_bsd: jax.Array) -> jax.Array:
        x = _flat(x_bsd)
        gate, up = (constrain(y, "batch", "sequence", "mlp") for y in (self.gate_proj(x), self.up_proj(x)))
        hidden = constrain(self.activation(gate) * up, "batch", "sequence", "columns")
        return self.down_proj(hidden).reshape(x_bsd.shape)


class MLP(nnx.Module):
    """down(activation(up(x))). Args: as `GatedMLP`."""

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        init: Callable[[int, int], Init],
        activation: Activation,
        bias: bool = False,
        rngs: nnx.Rngs,
    ):
        self.activation = activation
        self.up_proj = Linear((features,), (hidden,), init=init(features, hidden), bias=bias, rngs=rngs)
        self.down_proj = Linear((hidden,), (features,), init=init(hidden, features), bias=bias, rngs=rngs)

    def __call__(self, x_bsd: jax.Array) -> jax.Array:
        up = constrain(self.up_proj(_flat(x_bsd)), "batch", "sequence", "mlp")
        hidden = constrain(self.activation(up), "batch", "sequence", "columns")
        return self.down_proj(hidden).reshape(x_bsd.shape)

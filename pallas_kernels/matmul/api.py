"""Products fused with what follows them in a network, and their gradients.

On Hopper bf16 and fp16 products run on the Mosaic kernel, on other GPUs from Ampere on on the Triton one. fp32
operands take the reference everywhere: tensor cores would round them to tf32. Sizes that are no multiples
of a kernel's tiles are padded with zeros, which costs a copy of the operand; m = batch x sequence and widths of
real networks are multiples.

The backward pass takes the pre-activation z as the forward kernel saved it, in the operands' dtype, only where
there is an activation. Saving leaves the trade of memory for arithmetic with `jax.checkpoint`, whose second
forward pass is this kernel again; a backward pass that always computed z anew would pay a product more, and two
under `jax.checkpoint`. The products of the backward pass, x^T dz and dz w^T, have no epilogue and are XLA's own, in
fp32 sums.

The compiler does not cut a kernel over devices: over several, call these on local shards in a `jax.shard_map`.

Legend: m rows, n columns, k contraction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import compat, hardware
from pallas_kernels.matmul import mosaic, reference, triton
from pallas_kernels.matmul.epilogue import ACTIVATIONS, SLOPES, Epilogue
from pallas_kernels.matmul.scaling import TILE

KERNELS = {"mosaic": mosaic.GENERATIONS, "triton": triton.GENERATIONS}
_TO_FP8 = KERNELS | {"triton": triton.FP8_GENERATIONS}
_HALVES = (jnp.bfloat16, jnp.float16)


def matmul(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    activation: str = "none",
    out_dtype: Any = None,
) -> jax.Array:
    """activation(x w + bias) + residual, in one kernel; differentiable.

    Args:
      x: [..., k]. w: [k, n], of x's dtype: bf16, fp16 or fp32. bias: [n]. residual: [..., n].
      activation: none, relu, silu or gelu (the tanh form).
      out_dtype: of the result; x's by default.

    Returns:
      [..., n]. Sums, activation and residual are in fp32; the result is rounded once.

    Raises:
      ValueError: shapes or dtypes that do not fit, or no such activation.
    """
    epilogue = _epilogue("matmul", activation, dtype=out_dtype or x.dtype)
    return _shaped("matmul", x, (w,), bias, residual, epilogue)


def gated_matmul(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    residual: jax.Array | None = None,
    *,
    activation: str = "silu",
    out_dtype: Any = None,
) -> jax.Array:
    """activation(x w_gate) * (x w_up) + residual in one pass over x (SwiGLU with silu); differentiable.

    Shapes, dtypes and errors are those of `matmul`; both weights are [k, n].
    """
    epilogue = _epilogue("gated_matmul", activation, gated=True, dtype=out_dtype or x.dtype)
    return _shaped("gated_matmul", x, (w_gate, w_up), None, residual, epilogue)


def quantised_matmul(
    x: jax.Array,
    w: jax.Array | tuple[jax.Array, jax.Array],
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    activation: str = "none",
    scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """As `matmul`, or with a pair of weights as `gated_matmul`, with a result in E4M3 for a product in fp8.

    No gradient passes: straight-through estimates are the caller's.

    Args:
      scale: fp32 scalar by which the result is divided; None: one for each row's 128 columns, max(amax,
        1e-4) / 448.

    Returns:
      values [..., n] E4M3, scales [..., n / 128] fp32 or the given one; they stand for values * scales. Where n is no
      multiple of 128 the last tile is narrower.

    Raises:
      ValueError: as `matmul`.
    """
    weights = w if isinstance(w, tuple) else (w,)
    epilogue = _epilogue(
        "quantised_matmul", activation, gated=len(weights) == 2, quantise="tile" if scale is None else "given"
    )
    lead, flat = _flat("quantised_matmul", x, weights, bias, residual)
    if scale is not None:
        scale = jnp.asarray(scale, jnp.float32).reshape(1)
    inputs = jax.lax.stop_gradient((flat[0], weights, bias, flat[1], scale))
    out = _product(*inputs, epilogue)
    y = out["y"].reshape(*lead, weights[0].shape[1])
    return y, scale[0] if scale is not None else out["scales"].reshape(*lead, -(-y.shape[-1] // TILE))


def _epilogue(what: str, activation: str, **fields: Any) -> Epilogue:
    if activation not in ACTIVATIONS:
        raise ValueError(f"{what}: expected activation one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    return Epilogue(activation, **fields)


def _flat(
    what: str, x: jax.Array, weights: Sequence[jax.Array], bias: jax.Array | None, residual: jax.Array | None
) -> tuple[tuple[int, ...], tuple[jax.Array, jax.Array | None]]:
    """The leading dimensions, and x and residual as matrices, after a look at the shapes."""
    w = weights[0]
    if x.ndim < 1 or w.ndim != 2 or w.shape[0] != x.shape[-1] or any(v.shape != w.shape for v in weights):
        raise ValueError(
            f"{what}: expected x [..., k] and weights [k, n]; got {x.shape} and {[v.shape for v in weights]}"
        )
    if any(v.dtype != x.dtype for v in weights) or x.dtype not in (*_HALVES, jnp.float32):
        raise ValueError(
            f"{what}: expected x and weights of one dtype, bf16, fp16 or fp32; got {x.dtype} and "
            f"{[str(v.dtype) for v in weights]}"
        )
    n, lead = w.shape[1], x.shape[:-1]
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"{what}: expected a bias [{n}]; got {bias.shape}")
    if residual is not None and residual.shape != (*lead, n):
        raise ValueError(f"{what}: expected a residual {(*lead, n)}; got {residual.shape}")
    m = math.prod(lead)
    matrix = None if residual is None else residual.reshape(m, n)
    return lead, (x.reshape(m, x.shape[-1]), matrix)


def _shaped(
    what: str,
    x: jax.Array,
    weights: tuple,
    bias: jax.Array | None,
    residual: jax.Array | None,
    epilogue: Epilogue,
) -> jax.Array:
    lead, (rows, matrix) = _flat(what, x, weights, bias, residual)
    # A weight that is the same on all devices then gets a sum of their gradients.
    inputs = (rows, weights, bias, matrix)
    return _fused(epilogue, *compat.vary(inputs, inputs)).reshape(*lead, weights[0].shape[1])


# ---- gradients --------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(epilogue: Epilogue, x: Any, weights: Any, bias: Any, residual: Any) -> jax.Array:
    return _product(x, weights, bias, residual, None, epilogue)["y"]


def _forward(epilogue: Epilogue, x: Any, weights: Any, bias: Any, residual: Any) -> tuple[jax.Array, Any]:
    save = epilogue.gated or epilogue.activation != "none"
    out = _product(x, weights, bias, residual, None, epilogue.saving() if save else epilogue)
    # Of bias and residual only the dtypes are needed.
    kept = [None if v is None else jnp.empty(0, v.dtype) for v in (bias, residual)]
    return out["y"], (x, weights, out["z"], kept)


def _backward(epilogue: Epilogue, saved: Any, dy: jax.Array) -> tuple[Any, ...]:
    x, weights, z, (bias, residual) = saved
    exact = _through(epilogue, [part.astype(jnp.float32) for part in z], dy)
    dz = [d.astype(x.dtype) for d in exact]
    # Sums in fp32 and one rounding, whichever the number of weights.
    dx: Any = sum(reference.dot(d, w, (1, 1)) for d, w in zip(dz, weights, strict=True))
    dw = tuple(reference.dot(x, d, (0, 0)).astype(w.dtype) for d, w in zip(dz, weights, strict=True))
    db = None if bias is None else jnp.sum(exact[0], axis=0).astype(bias.dtype)
    return dx.astype(x.dtype), dw, db, None if residual is None else dy.astype(residual.dtype)


def _through(epilogue: Epilogue, z: list[jax.Array], dy: jax.Array) -> list[jax.Array]:
    """Gradients of the pre-activations, fp32."""
    dy = dy.astype(jnp.float32)
    if not z:
        return [dy]
    slope = SLOPES[epilogue.activation](z[0])
    if not epilogue.gated:
        return [dy * slope]
    return [dy * z[1] * slope, dy * ACTIVATIONS[epilogue.activation](z[0])]


_fused.defvjp(_forward, _backward)


# ---- choice -----------------------------------------------------------------------------------


def _product(
    x: Any, weights: Any, bias: Any, residual: Any, scale: Any, epilogue: Epilogue
) -> dict[str, Any]:
    """`reference.product` by the implementation that suits the chip and the operands."""
    (m, k), n = x.shape, weights[0].shape[1]
    chosen = hardware.choose(_TO_FP8 if epilogue.quantise else KERNELS)
    inexact = x.dtype not in _HALVES and chosen != "interpret"
    if chosen == "reference" or inexact or not m * n * k:
        multiples = (1, TILE if epilogue.quantise else 1, 1)
        run = reference.product
    elif chosen == "mosaic":
        multiples, run = mosaic.MULTIPLES, mosaic.product
    else:
        multiples, run = triton.MULTIPLES, partial(triton.product, interpret=chosen == "interpret")
    up = [-size % to for size, to in zip((m, n, k), multiples, strict=True)]
    x, residual = _padded(x, up[0], up[2]), _padded(residual, up[0], up[1])
    weights, bias = tuple(_padded(w, up[2], up[1]) for w in weights), _padded(bias, up[1])
    out = run(x, weights, bias, residual, scale, epilogue)
    return jax.tree.map(lambda a: a[:m, :n], out) if up[0] or up[1] else out


def _padded(a: jax.Array | None, *by: int) -> jax.Array | None:
    return a if a is None or not any(by) else jnp.pad(a, [(0, more) for more in by])

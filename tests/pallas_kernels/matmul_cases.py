"""Products with epilogues for the tests of kernels."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import Case, Compiled

from pallas_kernels import matmul

BF16, F32 = jnp.bfloat16, jnp.float32


def normal(shape: tuple[int, ...], dtype: Any = BF16, seed: int = 0, scale: float = 1.0) -> jax.Array:
    """Normal numbers."""
    return jnp.asarray(scale * np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


def operands(m: int, k: int, n: int, dtype: Any = BF16, weights: int = 1) -> tuple[jax.Array, ...]:
    """x [m, k] and weights [k, n] whose product has entries of about one."""
    return normal((m, k), dtype), *(normal((k, n), dtype, seed, k**-0.5) for seed in range(1, weights + 1))


def near(k: int, dtype: Any) -> Any:
    """A check of results of about one, activations and gates of sums over k of operands as above.

    Products of the operands are exact in fp32, so a sum is off by no more than k 2^-24 of the sum of
    magnitudes, here less than 1.5 sqrt(k), in either implementation. Activations stretch that by less than
    1.2, a gate by less than 6. What is written may round to a neighbour.
    """
    off = 2 * k * 2.0**-24 * 1.5 * k**0.5 * 1.2 * 6

    def check(got: Any, want: Any) -> None:
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            a, b = (np.asarray(v, np.float64) for v in (a, b))
            np.testing.assert_allclose(a, b, rtol=float(jnp.finfo(dtype).eps), atol=off)

    return check


def near_codes(got: Any, want: Any) -> None:
    """E4M3 values and fp32 scales: scales to an error of their sums, few values at a neighbouring number."""
    (codes, scales), (wanted, wanted_scales) = got, want
    assert (codes.shape, codes.dtype) == (wanted.shape, wanted.dtype)
    np.testing.assert_allclose(scales, wanted_scales, rtol=1e-5)
    steps = np.abs(_ordinal(codes) - _ordinal(wanted))
    assert steps.max() <= 1
    assert steps.mean() < 0.01


def _ordinal(codes: jax.Array) -> np.ndarray:
    """E4M3 numbers as integers in their order."""
    bits = np.asarray(jax.lax.bitcast_convert_type(codes, jnp.uint8)).astype(int)
    return np.where(bits >= 128, 128 - bits, bits)


def _plain(
    name: str, m: int, k: int, n: int, dtype: Any = BF16, lead: tuple[int, ...] = (), **more: Any
) -> Case:
    """A case with `activation`, `out_dtype`, and dtypes of a `bias` and a `residual`."""
    added = {key: more.pop(key, None) for key in ("bias", "residual")}

    def arguments() -> tuple[Any, ...]:
        x, w = operands(m * math.prod(lead), k, n, dtype)
        bias = added["bias"] and normal((n,), added["bias"])
        residual = added["residual"] and normal((*lead, m, n), added["residual"])
        return x.reshape(*lead, m, k), w, bias, residual

    return Case(
        f"matmul-{name}", partial(matmul.matmul, **more), arguments, near(k, more.get("out_dtype", dtype))
    )


def _gated(name: str, m: int, k: int, n: int, activation: str = "silu") -> Case:
    call = partial(matmul.gated_matmul, activation=activation)
    return Case(f"matmul-gated-{name}", call, partial(operands, m, k, n, weights=2), near(k, BF16))


def _quantised(name: str, m: int, k: int, n: int, gated: bool = False, **more: Any) -> Case:
    def call(x: jax.Array, *weights: jax.Array) -> Any:
        return matmul.quantised_matmul(x, weights if gated else weights[0], activation="silu", **more)

    return Case(f"matmul-fp8-{name}", call, partial(operands, m, k, n, weights=1 + gated), near_codes)


def saved(case: Case) -> Case:
    """A case's gradients: the kernel then saves what the backward pass needs."""

    def call(*arguments: Any) -> Any:
        there = [i for i, v in enumerate(arguments) if v is not None]
        y, back = jax.vjp(
            lambda *some: case.function(*_put(arguments, there, some)), *(arguments[i] for i in there)
        )
        return y, back(jnp.cos(y))

    # Gradients are sums over rows or columns of what is off by so much, and are rounded once more.
    return Case(f"{case.name}-gradient", call, case.arguments, _gradients_near)


def _put(arguments: tuple[Any, ...], there: list[int], some: Any) -> list[Any]:
    given = dict(zip(there, some, strict=True))
    return [given.get(i) for i in range(len(arguments))]


def _gradients_near(got: Any, want: Any) -> None:
    """Each to 2^-7 of its norm: the pre-activations and the products' operands are rounded to bf16, 2^-9 each."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        assert np.linalg.norm(a - b) <= 2**-7 * np.linalg.norm(b)


CONFORMANCE = [
    _plain("one-tile", 128, 64, 128),
    _plain("tiles", 256, 192, 512),
    _plain("odd", 37, 70, 130, activation="gelu", bias=BF16),
    _plain("row", 1, 200, 24, activation="relu", bias=F32),
    _plain("residual", 128, 64, 384, residual=BF16, bias=F32, activation="silu"),
    _plain("residual-fp32", 130, 64, 256, residual=F32, out_dtype=F32),
    _plain("batched", 40, 64, 128, lead=(2, 2), residual=BF16),
    _plain("fp16", 64, 64, 64, jnp.float16),
    _plain("fp32", 60, 33, 20, F32, activation="gelu", bias=F32),
    saved(_plain("saving", 128, 128, 256, activation="gelu", bias=BF16, residual=BF16)),
    _gated("tiles", 128, 192, 256),
    _gated("odd", 50, 100, 200, "gelu"),
    saved(_gated("saving", 64, 64, 128)),
    _quantised("tiles", 128, 64, 256),
    _quantised("odd", 50, 90, 200),
    _quantised("gated", 128, 128, 128, gated=True),
    _quantised("given", 128, 64, 128, scale=0.02),
]

M, K, N = 8192, 4096, 14336
X, W, B, Y = ((M, K), BF16), ((K, N), BF16), ((N,), F32), ((M, N), BF16)


def _forward(function: Any, *arguments: Any) -> Any:
    """The forward pass of a training step, with what it saves."""
    return jax.vjp(function, *arguments)


HOPPER = [
    Compiled("matmul-plain", matmul.matmul, (X, W)),
    Compiled("matmul-gelu", partial(matmul.matmul, activation="gelu"), (X, W, B)),
    Compiled("matmul-residual", partial(matmul.matmul, activation="silu"), (X, W, B, Y)),
    Compiled(
        "matmul-residual-fp32",
        lambda x, w, y: matmul.matmul(x, w, None, y, out_dtype=F32),
        (X, W, ((M, N), F32)),
    ),
    Compiled("matmul-saving", partial(_forward, partial(matmul.matmul, activation="gelu")), (X, W, B, Y)),
    Compiled("matmul-gated", matmul.gated_matmul, (X, W, W)),
    Compiled("matmul-gated-saving", partial(_forward, matmul.gated_matmul), (X, W, W, Y)),
    Compiled(  # what takes the most shared memory
        "matmul-gated-saving-fp32",
        partial(_forward, partial(matmul.gated_matmul, out_dtype=F32)),
        (X, W, W, ((M, N), F32)),
    ),
    Compiled("matmul-fp8", partial(matmul.quantised_matmul, activation="silu"), (X, W, B)),
    Compiled(
        "matmul-fp8-gated",
        lambda x, w, u: matmul.quantised_matmul(x, (w, u), activation="silu"),
        (X, W, W),
    ),
    Compiled(
        "matmul-fp8-residual",
        lambda x, w, y: matmul.quantised_matmul(x, w, None, y),
        (X, W, ((M, N), F32)),
    ),
    Compiled(
        "matmul-fp8-given",
        lambda x, w, s: matmul.quantised_matmul(x, w, scale=s)[0],
        (X, W, ((), F32)),
    ),
]
"""What an H100 leads to the Mosaic kernel; `test_products` compiles it."""

COMPILED = [replace(case, name=f"{case.name}-triton", implementation="triton") for case in HOPPER]

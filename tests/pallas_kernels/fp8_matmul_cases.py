"""Products in fp8 for the tests of kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import Case, Compiled
from matmul_cases import BF16, F32, near, operands

from pallas_kernels import fp8_matmul

E4M3 = jnp.float8_e4m3fn


def _quantised(m: int, k: int, n: int, power_of_two: bool) -> tuple[jax.Array, ...]:
    x, w = operands(m, k, n, F32)
    return (
        *fp8_matmul.quantise_activations(x, power_of_two=power_of_two),
        *fp8_matmul.quantise_weights(w, power_of_two=power_of_two),
    )


def _case(name: str, m: int, k: int, n: int, out: Any = F32, power_of_two: bool = False) -> Case:
    call = partial(fp8_matmul.fp8_matmul, out_dtype=out)
    return Case(f"fp8-matmul-{name}", call, partial(_quantised, m, k, n, power_of_two), near(k, out))


def _through(x: jax.Array, w: jax.Array) -> Any:
    y, back = jax.vjp(fp8_matmul.fp8_linear, x, w)
    return y, back(jnp.cos(y))


def _near_norm(got: Any, want: Any) -> None:
    """A result that rounds to a neighbour in bf16 may move a gradient's tile by an E4M3 step, 2^-4 of a value."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        assert np.linalg.norm(a - b) <= 2**-7 * np.linalg.norm(b)


CONFORMANCE = [
    _case("one-tile", 128, 128, 128),
    _case("tiles", 256, 512, 256),
    _case("odd", 50, 200, 130),
    _case("row", 1, 100, 20, BF16),
    _case("powers", 128, 256, 128, BF16, power_of_two=True),
    Case("fp8-matmul-linear", _through, partial(operands, 70, 150, 200), _near_norm),
]

M, K, N = 8192, 4096, 14336
SHAPES = ((M, K), E4M3), ((M, K // 128), F32), ((N, K), E4M3), ((N // 128, K // 128), F32)
HOPPER = [Compiled("fp8-matmul", fp8_matmul.fp8_matmul, SHAPES)]
"""What an H100 leads to the Mosaic kernel; `test_products` compiles it."""

COMPILED = [
    replace(HOPPER[0], name="fp8-matmul-triton", implementation="triton"),
    Compiled("fp8-matmul-linear", fp8_matmul.fp8_linear, (((M // 2, K), BF16), ((K, N), BF16))),
]

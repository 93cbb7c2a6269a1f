"""The k largest magnitudes for the tests of kernels."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from cases import Case, Compiled

from pallas_kernels import top_k


def values(n: int, kind: str = "normal") -> jax.Array:
    draw = np.random.default_rng(n)
    x = draw.normal(size=n).astype(np.float32)
    if kind == "ties":
        x = np.sign(x) * draw.integers(0, 4, n)
    if kind == "odd":
        x[draw.integers(0, n, n // 2)] = 0
        x[draw.integers(0, n, 9)] = [np.nan, np.inf, -np.inf, 1e-40, -1e-40, 3.4e38, -3.4e38, -0.0, 1e-38]
    return jnp.asarray(x, jnp.bfloat16 if kind == "bf16" else jnp.float32)


def kinds(n: int) -> jax.Array:
    return jnp.stack([values(n), values(n, "ties"), values(n, "odd"), jnp.zeros(n)])


def _back(n: int, k: int) -> Case:
    def arguments() -> tuple[jax.Array, jax.Array]:
        places = np.sort(np.random.default_rng(n).choice(n, k, replace=False)).astype(np.int32)
        return values(k), top_k.pack_mask(jnp.asarray(places), n)

    return Case(f"top-k-scatter-{n}", partial(top_k.scatter_from_mask, n=n), arguments)


CONFORMANCE = [
    # Under vmap, so that all kinds of values are compiled once.
    Case(
        "top-k-select",
        jax.vmap(partial(top_k.select, k=6000)),
        lambda: (kinds(10007), kinds(10007)[::-1] / 4),
    ),
    Case("top-k-select-alone", jax.vmap(lambda x: top_k.select(x, None, 7)), lambda: (kinds(4097),)),
    Case("top-k-select-bf16", partial(top_k.select, k=300), lambda: (values(4097, "bf16"), values(4097))),
    Case("top-k-select-all", lambda x: top_k.select(x, None, 4096), lambda: (values(4096, "odd"),)),
    Case("top-k-select-one", lambda x: top_k.select(x, None, 1), lambda: (values(1),)),
    Case("top-k-threshold", partial(top_k.threshold, k=77), lambda: (values(9999, "ties"),)),
    Case("top-k-threshold-nan", partial(top_k.threshold, k=2), lambda: (jnp.full(20, jnp.nan),)),
    _back(10007, 101),
    _back(4096, 4096),
    _back(5, 1),
]

N, K = 1_000_003, 10_000
COMPILED = [
    Compiled("top-k-threshold", partial(top_k.threshold, k=K), (((N,), jnp.float32),), kernels=2),
    Compiled(
        "top-k-select",
        lambda x, e: top_k.select(x, e, K),
        (((N,), jnp.float32),) * 2,
        kernels=4,
        donated=(1,),
    ),
    Compiled("top-k-select-alone", lambda x: top_k.select(x, None, K), (((N,), jnp.bfloat16),), kernels=4),
    Compiled(
        "top-k-scatter",
        partial(top_k.scatter_from_mask, n=N),
        (((K,), jnp.float32), ((-(-N // 8),), jnp.uint8)),
    ),
]

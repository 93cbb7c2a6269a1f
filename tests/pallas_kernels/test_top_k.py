"""The k largest magnitudes against NumPy's sort."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import top_k_cases as cases
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import top_k


@pytest.mark.parametrize(
    ("n", "k", "kind"),
    [(1, 1, "normal"), (999, 1, "ties"), (1000, 400, "ties"), (1000, 500, "odd"), (64, 64, "odd")],
)
def test_exactly_k_the_largest_and_of_equals_the_first(n, k, kind):
    x = cases.values(n, kind)
    values, indices, left = jax.jit(top_k.select, static_argnums=2)(x, None, k)
    # NaN above infinity, infinity above every f32.
    size = np.nan_to_num(np.abs(np.asarray(x, np.float64)), nan=2e300, posinf=1e300)
    want = np.sort(np.argsort(-size, kind="stable")[:k])
    np.testing.assert_array_equal(indices, want)
    np.testing.assert_array_equal(values, np.asarray(x)[want])
    np.testing.assert_array_equal(left, np.where(np.isin(np.arange(n), want), 0, x))
    assert top_k.threshold(x, k) == np.sort(np.asarray(top_k.key(x)))[-k]


def test_keys_are_in_the_order_of_magnitudes():
    x = jnp.array([0.0, -1e-45, 1e-38, -1.0, 1.5, 3.4e38, -jnp.inf, jnp.nan])
    keys = np.asarray(top_k.key(x))
    assert keys.dtype == np.uint32 and (np.diff(keys.astype(np.int64)) > 0).all()
    assert top_k.key(-x[4]) == keys[4]
    assert top_k.key(jnp.bfloat16(1.5)) == keys[4]


def test_nothing_is_lost_over_steps():
    sent, residual = jnp.zeros(300), jnp.zeros(300)
    total = jnp.zeros(300)
    for step in range(5):
        x = jnp.round(cases.values(300 + step)[:300] * 64)  # whole numbers: sums are exact
        values, indices, residual = top_k.select(x, residual, 30)
        sent = sent + top_k.scatter_from_mask(values, top_k.pack_mask(indices, 300), 300)
        total = total + x
    np.testing.assert_array_equal(sent + residual, total)
    assert int((sent != 0).sum()) > 30


@pytest.mark.parametrize("n", [1, 8, 9, 31, 32, 100])
def test_bitmaps_are_little_endian(n):
    chosen = np.random.default_rng(n).random(n) < 0.4
    chosen[-1] = True
    bitmap = top_k.pack_mask(jnp.flatnonzero(jnp.asarray(chosen)).astype(jnp.int32), n)
    np.testing.assert_array_equal(bitmap, np.packbits(chosen, bitorder="little"))


def test_inside_shard_map():
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,))
    x = cases.values(400, "ties")

    def sparse(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, indices, left = top_k.select(x, None, 9)
        return top_k.scatter_from_mask(values, top_k.pack_mask(indices, 100), 100), left

    sent, left = jax.jit(jax.shard_map(sparse, mesh=mesh, in_specs=P("data"), out_specs=P("data")))(x)
    np.testing.assert_array_equal(sent + left, x)
    assert ((sent.reshape(4, 100) != 0).sum(1) == 9).all()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: top_k.select(x, None, 0), "k in 1 .. 10; got 0"),
        (lambda x: top_k.threshold(x, 11), "k in 1 .. 10; got 11"),
        (lambda x: top_k.select(x[None], None, 1), "expected x [n], n below 2^31; got (1, 10)"),
        (lambda x: top_k.select(x, x[:3], 1), "got (3,)"),
        (lambda x: top_k.scatter_from_mask(x, jnp.zeros(3, jnp.uint8), 10), "bitmap [2] for n=10; got (3,)"),
    ],
)
def test_refusals(call, says):
    with pytest.raises(ValueError) as refused:
        call(jnp.zeros(10))
    assert says in str(refused.value)

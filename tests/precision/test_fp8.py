"""Products in fp8: rounding, scales, gradients, what is not finite, and delayed scaling's histories."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.ad_checkpoint import saved_residuals

from dsjax.errors import ConfigError
from dsjax.mesh.remat import PRODUCTS
from dsjax.precision.delayed import DelayedDot, Largest, observed, probes, pushed, with_probes
from dsjax.precision.fp8 import E4M3, E5M2, Fp8Dot, by_blocks, by_rows, rounded, scale_for, scaled_product
from pallas_kernels import hardware
from pallas_kernels.fp8_matmul import fp8_linear

DIMENSIONS = (((2,), (0,)), ((), ()))


def operands(k: int = 200) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [3, 5, k], w [k, 7], dy [3, 5, 7]."""
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(
        jax.random.normal(key, s) for key, s in zip(keys, [(3, 5, k), (k, 7), (3, 5, 7)], strict=True)
    )


def by_hand(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Numbers rounded under the scale of their largest, in float64."""
    scale = np.abs(x).max() / float(jnp.finfo(dtype).max)
    return (x / scale).astype(dtype).astype(np.float64) * scale


def test_a_product_and_its_gradients_are_those_of_rounded_operands() -> None:
    x, w, dy = operands()
    y, back = jax.vjp(lambda x, w: Fp8Dot()(x, w, DIMENSIONS), x, w)
    dx, dw = back(dy)
    rx, rw, rdy = by_hand(np.asarray(x), E4M3), by_hand(np.asarray(w), E4M3), by_hand(np.asarray(dy), E5M2)
    np.testing.assert_allclose(y, rx @ rw, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dx, rdy @ rw.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dw, np.einsum("abk,abn->kn", rx, rdy), rtol=1e-4, atol=1e-4)
    assert not np.allclose(y, x @ w, rtol=1e-4, atol=1e-4)  # it does round


def test_by_blocks_a_product_is_the_reference_of_the_kernel() -> None:
    x, w, dy = operands()
    y, back = jax.vjp(lambda x, w: Fp8Dot("block")(x, w, DIMENSIONS), x, w)
    want, back_of_reference = jax.vjp(fp8_linear, x, w)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
    for got, wanted in zip(back(dy), back_of_reference(dy), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_tiles_and_blocks_have_scales_of_their_own() -> None:
    x = jnp.ones((2, 256)).at[0, :128].set(1e4)
    w = jnp.ones((256, 130)).at[:128, :128].set(1e4)
    # One scale for all would round 1 to 0.98 or so; alone it is exact but for the scale's own rounding.
    np.testing.assert_allclose(by_rows(x)[:, 128:], 1.0, rtol=1e-6)
    np.testing.assert_allclose(by_blocks(w)[128:], 1.0, rtol=1e-6)


@pytest.mark.parametrize("scaling", ["tensor", "block"])
def test_dimensions_of_heads_are_contracted_as_one(scaling: str) -> None:
    x, w = jax.random.normal(jax.random.key(0), (2, 3, 4, 8)), jax.random.normal(jax.random.key(1), (4, 8, 5))
    dot = Fp8Dot(scaling)
    got = dot(x, w, (((2, 3), (0, 1)), ((), ())))
    want = dot(x.reshape(2, 3, 32), w.reshape(32, 5), DIMENSIONS)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scaling", ["tensor", "block"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(scaling: str, bad: float) -> None:
    x, w, _ = operands()
    dot = Fp8Dot(scaling)
    assert not np.all(np.isfinite(dot(x.at[0, 0, 3].set(bad), w, DIMENSIONS)))
    assert not np.all(np.isfinite(dot(x, w.at[3, 0].set(bad), DIMENSIONS)))


@pytest.mark.parametrize("scaling", ["tensor", "block"])
def test_zeros_and_tiny_numbers(scaling: str) -> None:
    x, w, _ = operands()
    dot = Fp8Dot(scaling)
    assert np.all(dot(jnp.zeros_like(x), w, DIMENSIONS) == 0)
    tiny = np.asarray(dot(x * 1e-35, w, DIMENSIONS))
    assert np.all(np.isfinite(tiny))


def test_a_large_number_becomes_the_largest_under_a_scale_of_before() -> None:
    x = jnp.array([1e3, -1e3, 1.0, jnp.nan])
    got = rounded(x, scale_for(jnp.float32(448.0), E4M3), E4M3).astype(jnp.float32)
    np.testing.assert_array_equal(got, [448.0, -448.0, 1.0, np.nan])


def test_other_products_are_refused() -> None:
    x = jnp.ones((2, 3, 4))
    with pytest.raises(ConfigError, match=r"precision\.table"):
        Fp8Dot()(x, jnp.ones((2, 4, 5)), (((2,), (1,)), ((0,), (0,))))
    with pytest.raises(ConfigError, match=r"precision\.table"):
        Fp8Dot()(x, jnp.ones((5, 4)), (((2,), (1,)), ((), ())))


def test_the_kernel_is_cut_over_devices_as_the_compiler_cuts_it() -> None:
    mesh = jax.make_mesh((2, 2), ("rows", "columns"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x, w = jax.random.normal(jax.random.key(0), (4, 256)), jax.random.normal(jax.random.key(1), (256, 256))

    def place(value: jax.Array, *spec: str | None) -> jax.Array:
        return jax.device_put(value, jax.NamedSharding(mesh, jax.P(*spec)))

    product = jax.jit(lambda x, w: Fp8Dot("block")(x, w, (((1,), (0,)), ((), ()))))
    want = product(x, w)
    with hardware.use("interpret"):
        kernel = jax.jit(lambda x, w: Fp8Dot("block")(x, w, (((1,), (0,)), ((), ()))))
        by_columns = kernel(place(x, "rows", None), place(w, None, "columns"))
        contracted = kernel(place(x, "rows", "columns"), place(w, "columns", None))
    for got in (by_columns, contracted):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


# ---- delayed scaling -------------------------------------------------------------------------------


def test_a_history_remembers_the_last_passes_and_nothing_that_is_not_finite() -> None:
    history = jnp.zeros(3)
    for value in (5.0, 1.0, jnp.inf, 2.0):
        history = pushed(history, jnp.float32(value))
    np.testing.assert_array_equal(history, [2.0, 1.0, 1.0])


def delayed(layers: tuple[int, ...] = ()) -> nnx.Linear:
    layer = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
    layer.dot_general = nnx.data(DelayedDot(layers, 2))
    return layer


def test_delayed_scales_are_those_of_passes_before() -> None:
    graph, params, others = nnx.split(delayed(), nnx.Param, ...)

    def step(others: nnx.State, x: jax.Array) -> tuple[jax.Array, nnx.State]:
        def total(params: nnx.State, zeros: dict) -> tuple[jax.Array, nnx.State]:
            layer = nnx.merge(graph, params, with_probes(others, zeros), copy=True)
            layer.train()
            y = layer(x)
            return jnp.sum(y * x[:, :4]), (y, nnx.state(layer, nnx.Not(nnx.Param)))

        (_, (y, after)), (_, magnitudes) = jax.value_and_grad(total, (0, 1), has_aux=True)(
            params, probes(others)
        )
        return y, observed(after, magnitudes)

    def histories(others: nnx.State) -> dict[str, list[float]]:
        return {p[-1]: np.asarray(v[...]).tolist() for p, v in others.flat_state() if isinstance(v, Largest)}

    small, large = jnp.full((2, 6), 2.0), jnp.full((2, 6), 64.0)
    y, others = step(others, small)
    assert histories(others) == {"inputs": [2.0, 0.0], "gradients": [2.0, 0.0]}
    # Nothing was known: the first pass is scaled by itself.
    np.testing.assert_allclose(y, Fp8Dot()(small, params["kernel"][...], (((1,), (0,)), ((), ()))), rtol=1e-6)
    y, others = step(others, large)
    assert histories(others) == {"inputs": [64.0, 2.0], "gradients": [64.0, 2.0]}
    # A scale for 2 ends at 2: all that is larger is taken for that.
    np.testing.assert_allclose(y, Fp8Dot()(small, params["kernel"][...], (((1,), (0,)), ((), ()))), rtol=1e-6)
    _, others = step(others, small)
    assert histories(others) == {"inputs": [2.0, 64.0], "gradients": [2.0, 64.0]}


def test_without_probes_a_state_is_left_alone() -> None:
    _, _, others = nnx.split(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), nnx.Param, ...)
    assert probes(others) == {} and observed(others, {}) is others and with_probes(others, {}) is others


def test_the_gradient_of_a_probe_is_the_largest_magnitude() -> None:
    x, w, dy = operands()
    given = (jnp.float32(1.0), jnp.float32(1.0), jnp.zeros(2))
    _, back = jax.vjp(lambda x, w, given: scaled_product(1, x.dtype, x, w, given), x, w, given)
    np.testing.assert_array_equal(back(dy)[2][2], [jnp.max(jnp.abs(dy)), 1.0])


def test_a_model_that_is_called_outside_of_training_remembers_nothing() -> None:
    layer = delayed()
    before = np.asarray(layer.dot_general.inputs[...])
    jax.jit(lambda x: layer(x))(jnp.ones((2, 6)))
    layer.eval()
    layer(jnp.ones((2, 6)))
    np.testing.assert_array_equal(layer.dot_general.inputs[...], before)


@pytest.mark.parametrize("scaling", ["tensor", "block"])
def test_many_products_at_once(scaling: str) -> None:
    x, w, _ = operands()
    dot = Fp8Dot(scaling)
    many = jax.vmap(lambda x, w: jnp.sum(dot(x, w, DIMENSIONS) ** 2), (0, None))
    each = [jnp.sum(dot(one, w, DIMENSIONS) ** 2) for one in jnp.stack([x, 2 * x])]
    np.testing.assert_allclose(many(jnp.stack([x, 2 * x]), w), each, rtol=1e-5)
    assert np.all(np.isfinite(jax.grad(lambda x: jnp.sum(many(x, w)))(jnp.stack([x, x]))))


@pytest.mark.parametrize("scaling", ["tensor", "block"])
def test_recomputation_of_all_but_products_keeps_fp8_ones(scaling: str) -> None:
    x, w, _ = operands()
    dot = Fp8Dot(scaling)

    def twice(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(dot(x, w, DIMENSIONS)))

    residuals = saved_residuals(jax.checkpoint(twice, policy=PRODUCTS), x, w)
    assert any(shape.shape == (3, 5, 7) for shape, _ in residuals)
    assert not any(s.shape == (3, 5, 7) for s, _ in saved_residuals(jax.checkpoint(twice), x, w))

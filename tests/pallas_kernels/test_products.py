"""Mosaic GPU kernels of products, interpreted, and what the conformance suite does not ask of a product."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import fp8_matmul_cases
import jax
import jax.numpy as jnp
import matmul_cases
import numpy as np
import pytest
from cases import Case, Compiled
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from matmul_cases import F32, normal, operands
from test_compiles import compile_case

from pallas_kernels import compat, fp8_matmul, hardware, matmul

MOSAIC = [case for case in matmul_cases.CONFORMANCE if "fp32" not in case.name] + fp8_matmul_cases.CONFORMANCE


@pytest.mark.parametrize("case", MOSAIC, ids=[case.name for case in MOSAIC])
def test_mosaic_gives_what_the_reference_gives(case: Case):
    if case in fp8_matmul_cases.CONFORMANCE and jax.__version_info__ < (0, 12):
        pytest.skip("this jax does not interpret wgmma with a transposed operand")
    arguments = case.arguments()
    with hardware.use("reference"):
        want = jax.jit(lambda *a: case.function(*a))(*arguments)
    with hardware.use("mosaic"), compat.interpreted():
        got = jax.jit(lambda *a: case.function(*a))(*arguments)
    case.check(got, want)


HOPPER = matmul_cases.HOPPER + fp8_matmul_cases.HOPPER


@pytest.mark.parametrize("case", HOPPER, ids=[case.name for case in HOPPER])
def test_mosaic_keeps_sums_in_registers(case: Compiled, gpu_compiler, tmp_path: Path, monkeypatch):
    # A kernel that this process has compiled before leaves no report: no other test compiles these.
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    program, _ = compile_case(case)
    assert program.as_text().count("custom-call(") == case.kernels
    [report] = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    assert int(re.search(r"Used (\d+) registers", report).group(1)) <= 168  # 65536 / 384 threads


# ---- the reference against plain JAX ------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "plain"),
    [("none", lambda z: z), ("relu", jax.nn.relu), ("silu", jax.nn.silu), ("gelu", jax.nn.gelu)],
)
def test_gradients_are_those_of_plain_jax(activation: str, plain: Any):
    x, w, up = operands(12, 20, 24, F32, weights=2)
    bias, residual = normal((24,), F32), normal((12, 24), F32)

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.dot(a, b, precision="highest")

    pairs = [
        (
            lambda x, w, b, r: matmul.matmul(x, w, b, r, activation=activation),
            lambda x, w, b, r: plain(product(x, w) + b) + r,
            (x, w, bias, residual),
        ),
        (
            lambda x, w, u, r: matmul.gated_matmul(x, w, u, r, activation=activation),
            lambda x, w, u, r: plain(product(x, w)) * product(x, u) + r,
            (x, w, up, residual),
        ),
    ]
    for ours, theirs, arguments in pairs:
        got, want = (
            jax.value_and_grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a))), (0, 1, 2, 3))(*arguments)
            for f in (ours, theirs)
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_weight_on_all_devices_gets_the_sum_of_their_gradients(fp8: bool):
    devices = jax.devices("cpu")
    if len(devices) < 4:
        pytest.skip("jax has fewer than four simulated CPU devices here")
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=devices[:4])
    x, w = operands(4 * 128, 128, 128, F32)

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        y = fp8_matmul.fp8_linear(x, w) if fp8 else matmul.matmul(x, w, activation="silu")
        return jnp.sum(jnp.sin(y))

    def local(x: jax.Array, w: jax.Array) -> Any:
        return jax.grad(loss, (0, 1))(x, w)

    cut = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P()), out_specs=(P("data"), P()))
    for got, want in zip(jax.jit(cut)(x, w), jax.grad(loss, (0, 1))(x, w), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_relu_and_codes_keep_nan_visible():
    x = jnp.array([[jnp.nan, 1.0], [1.0, 1.0]])
    y = matmul.matmul(x, jnp.ones((2, 3)), activation="relu")
    assert np.isnan(y[0]).all()
    assert np.isfinite(y[1]).all()
    codes, scales = matmul.quantised_matmul(x, jnp.ones((2, 3)))
    decoded = codes.astype(F32) * scales
    assert np.isnan(decoded[0]).all()
    assert np.isfinite(decoded[1]).all()


def test_a_checkpoint_keeps_no_pre_activation():
    x, w = operands(16, 8, 32, F32)

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(matmul.matmul(x, w, activation="gelu"))

    def kept(f: Any) -> int:
        return sum(v.size for v in jax.tree.leaves(jax.vjp(f, x)[1]) if hasattr(v, "size"))

    assert kept(loss) - kept(jax.checkpoint(loss)) >= 16 * 32


# ---- fp8 ----------------------------------------------------------------------------------------


def test_scales_are_those_of_the_formula():
    x = normal((3, 300), F32, scale=5)
    codes, scales = fp8_matmul.quantise_activations(x)
    tiles = np.pad(np.asarray(x), ((0, 0), (0, 84))).reshape(3, 3, 128)
    np.testing.assert_allclose(scales, np.maximum(np.abs(tiles).max(2), 1e-4) / 448, rtol=1e-6)
    assert float(jnp.abs(codes.astype(F32)).max()) == 448
    powers = fp8_matmul.quantise_activations(x, power_of_two=True)[1]
    exponents = np.log2(np.asarray(powers))
    np.testing.assert_array_equal(exponents, np.ceil(np.log2(np.asarray(scales))))


def test_codes_round_to_the_nearest_number_ties_to_even():
    # 16 .. 18 are neighbours with a step of 2; 448 makes the scale 1.
    x = jnp.array([[448.0, 17.0, 19.0, 16.9, -17.1, 0.0]])
    codes, _ = fp8_matmul.quantise_activations(x, power_of_two=True)
    np.testing.assert_array_equal(codes.astype(F32)[0], [448, 16, 20, 16, -18, 0])


def test_weights_are_transposed_blocks():
    w = normal((200, 130), F32)
    codes, scales = fp8_matmul.quantise_weights(w)
    assert (codes.shape, scales.shape) == ((130, 200), (2, 2))
    decoded = codes.astype(F32) * jnp.repeat(jnp.repeat(scales, 128, 0), 128, 1)[:130, :200]
    np.testing.assert_allclose(decoded.T, w, rtol=2**-4, atol=float(scales.max()) * 2**-10)


def test_an_outlier_costs_its_own_tile_only():
    x = normal((4, 256), F32).at[0, 0].set(1e5)
    w = normal((256, 64), F32, scale=1 / 16)
    y, want = fp8_matmul.fp8_linear(x, w), jnp.dot(x, w, precision="highest")
    off = jnp.linalg.norm(y - want, axis=1) / jnp.linalg.norm(want, axis=1)
    assert float(off[1:].max()) < 0.06


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: matmul.matmul(jnp.ones((2, 3)), jnp.ones((4, 5))), "x [..., k]"),
        (lambda: matmul.matmul(jnp.ones((2, 3)), jnp.ones((3, 5)), activation="tanh"), "activation"),
        (lambda: matmul.matmul(jnp.ones((2, 3)), jnp.ones((3, 5)), jnp.ones(4)), "bias [5]"),
        (lambda: matmul.matmul(jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 5))), "one dtype"),
        (lambda: matmul.gated_matmul(jnp.ones((2, 3)), jnp.ones((3, 5)), jnp.ones((3, 4))), "weights"),
        (
            lambda: matmul.matmul(jnp.ones((2, 3)), jnp.ones((3, 5)), None, jnp.ones((2, 4))),
            "residual (2, 5)",
        ),
        (lambda: fp8_matmul.quantise_weights(jnp.ones(3)), "w [k, n]"),
        (lambda: fp8_matmul.fp8_matmul(*[jnp.ones((2, 2))] * 4), "float8_e4m3fn"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, said: str):
    with pytest.raises(ValueError, match=re.escape(said)):
        call()


@pytest.mark.parametrize(("m", "k", "n"), [(0, 4, 5), (2, 0, 3), (2, 3, 0)])
def test_an_empty_product_is_empty_or_zero(m: int, k: int, n: int):
    x, w = jnp.ones((m, k)), jnp.ones((k, n))
    np.testing.assert_array_equal(matmul.matmul(x, w), jnp.zeros((m, n)))
    codes, scales = matmul.quantised_matmul(x, w)
    assert (codes.shape, scales.shape) == ((m, n), (m, -(-n // 128)))
    np.testing.assert_array_equal(fp8_matmul.fp8_linear(x, w), jnp.zeros((m, n)))

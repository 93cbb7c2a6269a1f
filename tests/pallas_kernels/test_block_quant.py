"""Quantisation by blocks against NumPy, format by format: scales, codes, places of bits, what is refused."""

from __future__ import annotations

import itertools

import block_quant_cases as cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax import aot
from pallas_kernels import block_quant, hardware

TOP = {"int8": 127.0, "int4": 7.0, "e2m4": 7.75, "fp8": 448.0}
FORMATS = block_quant.FORMATS
encode = jax.jit(block_quant.encode, static_argnames=("format", "block", "beta"))


def numbers(format: str) -> np.ndarray:
    """The value of every code, in the codes' order."""
    if format == "fp8":
        return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    if format != "e2m4":
        codes = np.arange(256 if format == "int8" else 16)
        return np.where(codes < len(codes) // 2, codes, codes - len(codes)).astype(np.float32)
    sizes = [m / 16 if e == 0 else 2.0 ** (e - 1) * (1 + m / 16) for e in range(4) for m in range(16)]
    return np.array([*sizes, *(-s for s in sizes)], np.float32)


def unpack(packed: np.ndarray, format: str) -> np.ndarray:
    """Codes [..., block] of bytes [..., code_bytes]."""
    if format == "int4":
        return np.concatenate([packed & 15, packed >> 4], -1)
    if format == "e2m4":
        parts = packed.reshape(*packed.shape[:-1], 7, -1)
        last = sum((parts[..., j, :] >> 7) << j for j in range(7))
        return np.concatenate([(parts & 127).reshape(packed.shape), last], -1)
    return packed


def test_bytes_of_a_block():
    assert [block_quant.code_bytes(format, 128) for format in FORMATS] == [128, 64, 112, 128]
    assert tuple(TOP) == FORMATS


@pytest.mark.parametrize("format", FORMATS)
def test_every_code_decodes_to_its_number(format):
    codes, scales = cases.shards(format, 128, (64,))
    got = np.asarray(block_quant.decode(codes, scales, format=format)).reshape(64, 128)
    want = numbers(format)[unpack(np.asarray(codes), format)] * np.asarray(scales, np.float32)[:, None]
    met = unpack(np.asarray(codes), format)
    want, got = (np.where(np.isin(met, (127, 255)) & (format == "fp8"), 0, x) for x in (want, got))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("format", FORMATS)
def test_the_scale_is_the_largest_over_the_top_rounded_once(format):
    x = cases.values((20000 * 16,))
    _, scales, _ = encode(x, format=format, block=16)
    amax = np.abs(x.reshape(-1, 16)).max(-1)
    want = (amax / np.float32(TOP[format])).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(scales), want)


@pytest.mark.parametrize("format", FORMATS)
def test_codes_are_the_nearest_numbers(format):
    x, _ = cases.inputs((40 * 128,))
    packed, scales, _ = encode(x, format=format)
    q = np.asarray(x).reshape(40, 128) / np.asarray(scales, np.float32)[:, None]
    finite = numbers(format)
    finite = np.sort(finite[np.isfinite(finite) & (np.abs(finite) <= TOP[format])])
    got = numbers(format)[unpack(np.asarray(packed), format)]
    nearest = np.abs(q[..., None] - finite).min(-1)
    np.testing.assert_array_equal(np.abs(q - got), nearest)


def test_ties_go_up_in_integers_and_to_even_in_floats():
    x = np.zeros((4, 128), np.float32)
    x[:, 0] = [127, 7, 7.75, 448]  # scale 1
    x[:, 1:5] = [2.5, -2.5, 3.5, -3.5]
    x[2, 1:5] = np.array([2.5, -2.5, 3.5, -3.5]) / 16
    x[3, 1:5] = np.array([17, -17, 19, -19])
    want = [[3, -2, 4, -3], [3, -2, 4, -3], np.array([2, -2, 4, -4]) / 16, [16, -16, 20, -20]]
    for row, expected, format in zip(x, want, FORMATS, strict=True):
        codes, scales, _ = encode(row, format=format)
        assert float(scales[0]) == 1
        np.testing.assert_array_equal(block_quant.decode(codes, scales, format=format)[1:5], expected)


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_finite_stays_visible_and_in_its_block(format):
    x = cases.odd_values()
    codes, scales, _ = encode(x, format=format)
    back = np.asarray(block_quant.decode(codes, scales, format=format)).reshape(-1, 128)
    seen = ~np.isfinite(back)
    assert seen[1:4].all() and not seen[[0, *range(4, 12)]].any()
    np.testing.assert_array_equal(back[[0, 5, 10]], 0)
    np.testing.assert_array_equal(np.asarray(scales, np.float32)[[0, 5, 10]], 1)


@pytest.mark.parametrize(("format", "beta"), itertools.product(FORMATS, (0.0, 0.8)))
def test_the_residual_is_what_was_lost(format, beta):
    x, e = cases.inputs((3, 256))
    codes, scales, left = encode(x, e, format=format, beta=beta)
    lost = x + e - block_quant.decode(codes, scales, format=format)
    want = beta * e + (1 - beta) * lost
    np.testing.assert_allclose(left, want, rtol=0, atol=0 if beta == 0 else 1e-6 * float(jnp.abs(want).max()))
    assert block_quant.encode(x, format=format)[2] is None


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_stochastic_rounding_has_no_bias_and_depends_on_the_seed(format):
    x = jnp.linspace(-1, 1, 128 * 512)
    mean = jnp.zeros_like(x)
    drawn = [encode(x, format=format, seed=jnp.uint32(seed)) for seed in range(30)]
    for codes, scales, _ in drawn:
        mean += block_quant.decode(codes, scales, format=format) / len(drawn)
    step = float(drawn[0][1].astype(jnp.float32).max())
    # A draw's error has a standard deviation of at most half a step.
    assert abs(float((mean - x).mean())) < 4 * step / 2 / np.sqrt(x.size * len(drawn))
    assert float(jnp.abs(mean - x).max()) < 5 * step / 2 / np.sqrt(len(drawn)) * 1.2
    again = encode(x, format=format, seed=jnp.uint32(0))
    assert (again[0] == drawn[0][0]).all() and (drawn[1][0] != drawn[0][0]).any()


@pytest.mark.parametrize("format", FORMATS)
def test_the_sum_is_taken_in_order(format):
    codes, scales = cases.shards(format, 128, (7, 2, 3))
    codes = codes & 0x77 if format == "fp8" else codes
    total = np.zeros((2, 3 * 128), np.float32)
    for shard in range(7):
        total = total + np.asarray(block_quant.decode(codes[shard], scales[shard], format=format))
    np.testing.assert_array_equal(block_quant.decode_sum(codes, scales, format=format), total)


@pytest.mark.parametrize("name", ["reference", "interpret"])
@pytest.mark.parametrize("format", FORMATS)
def test_inside_shard_map(format, name):
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,))
    x, e = cases.inputs((4 * 256,))

    def mean(x: jax.Array, e: jax.Array) -> tuple[jax.Array, jax.Array]:
        codes, scales, left = block_quant.encode(x, e, format=format)
        codes, scales = (jax.lax.all_gather(a, "data") for a in (codes, scales))
        return block_quant.decode_sum(codes, scales, format=format), left

    # What interprets kernels does not say over which axes its own constants vary.
    mapped = jax.shard_map(
        mean, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=name == "reference"
    )
    with hardware.use(name):
        total, left = jax.jit(mapped)(x, e)
    want = (x + e - left).reshape(4, 256).sum(0)
    np.testing.assert_allclose(total.reshape(4, 256), jnp.tile(want, (4, 1)), rtol=1e-5, atol=1e-2)


def test_what_crosses_between_gpus_is_packed(gpu_compiler):
    target = aot.parse_target("8xH100")
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,), devices=target.devices())

    def mean(x: jax.Array) -> jax.Array:
        codes, scales, _ = block_quant.encode(x, format="int4")
        codes, scales = (jax.lax.all_gather(a, "data") for a in (codes, scales))
        return block_quant.decode_sum(codes, scales, format="int4") / 8

    mapped = jax.jit(jax.shard_map(mean, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    x = jax.ShapeDtypeStruct((8 * 1280,), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    compiled = aot.compile_for(target, aot.lower_for(target, mapped, x))
    assert compiled.as_text().count("xla.gpu.triton") == 2
    sent = sum(c.wire_bytes for c in aot.inspect(compiled, mesh).collectives)
    assert sent == 7 * 10 * (64 + 2)  # ten blocks to seven others


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: block_quant.encode(x, format="int3"), "format of int8, int4, e2m4, fp8; got 'int3'"),
        (lambda x: block_quant.encode(x[:100], format="int8"), "multiple of block=128; got (100,)"),
        (lambda x: block_quant.encode(x, x[:128], format="int8"), "got (128,)"),
        (lambda x: block_quant.encode(x, format="int8", block=24), "got 24"),
        (lambda x: block_quant.encode(x, x, format="int8", beta=1.0), "[0, 1); got 1.0"),
        (lambda x: block_quant.encode(x, format="fp8", seed=jnp.uint32(1)), "takes no seed"),
        (lambda x: block_quant.decode(x.reshape(2, 128), x[:2], format="int4"), "[..., blocks, 64]"),
        (lambda x: block_quant.decode_sum(x.reshape(2, 128), x[:2], format="int8"), "[shards, ..., blocks"),
    ],
)
def test_refusals(call, says):
    with pytest.raises(ValueError) as refused:
        call(jnp.zeros(256))
    assert says in str(refused.value)

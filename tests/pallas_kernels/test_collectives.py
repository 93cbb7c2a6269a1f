"""Exchanges of packed values on simulated devices, and the kernels over NVLink compiled for eight H100s."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from dsjax import aot
from pallas_kernels import block_quant, collectives

FORMATS = block_quant.FORMATS
DEVICES = 4


def mesh_of(devices: list[Any]) -> Any:
    """A mesh of one axis."""
    return jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)


@pytest.fixture(scope="module")
def mesh() -> Any:
    """Four simulated devices."""
    if len(jax.devices("cpu")) < DEVICES:
        pytest.skip("jax has fewer than four simulated CPU devices here")
    return mesh_of(jax.devices("cpu")[:DEVICES])


def on(mesh: Any, function: Any, into: Any = None) -> Any:
    """The function on each device's shard."""
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=into or P("data"), out_specs=P("data")))


def values(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape), jnp.float32)


def rounded(x: jax.Array, format: str, block: int = 128) -> jax.Array:
    """What is left of values that are packed and unpacked as one row."""
    packed, _ = block_quant.pack(x.reshape(-1), format=format, block=block)
    return block_quant.unpack(packed, x.size, format=format, block=block).reshape(x.shape)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("n", [1, 128, 700])
def test_packing_is_block_quant_in_one_buffer(format: str, n: int):
    x = values(3, n)
    packed, _ = block_quant.pack(x, format=format)
    whole = jnp.pad(x, ((0, 0), (0, -n % 128)))
    codes, scales, _ = block_quant.encode(whole, format=format)
    assert packed.dtype == jnp.uint8
    assert packed.shape == (3, codes[0].size + 2 * scales[0].size)
    assert packed.shape[1] == block_quant.packed_bytes(n, format)
    want = block_quant.decode(codes, scales, format=format)[:, :n]
    np.testing.assert_array_equal(block_quant.unpack(packed, n, format=format), want)
    total = block_quant.decode_sum(codes, scales, format=format)[:n]
    np.testing.assert_array_equal(block_quant.unpack_sum(packed, n, format=format), total)


def test_packing_keeps_what_was_lost():
    x, lost = values(2, 300), values(2, 300) / 8
    packed, left = block_quant.pack(x, lost, format="int4")
    np.testing.assert_allclose(
        block_quant.unpack(packed, 300, format="int4") + left, x + lost, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("shape", "axis"), [((DEVICES * 96,), 0), ((6, DEVICES * 10, 3), 1)])
def test_gathers_what_each_device_packed(mesh: Any, format: str, shape: tuple[int, ...], axis: int):
    x, place = values(*shape), P(*[None] * axis, "data")
    gather = partial(collectives.all_gather, axis_name="data", format=format, axis=axis)
    got = on(mesh, lambda x: gather(x)[None], place)(x)
    want = jnp.concatenate([rounded(part, format) for part in jnp.split(x, DEVICES, axis)], axis)
    for device in range(DEVICES):
        np.testing.assert_array_equal(got[device], want)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("shape", "axis"), [((DEVICES * 96,), 0), ((6, DEVICES * 10, 3), 1), ((2, 8), -1)])
def test_scatters_sums_of_what_each_device_packed(mesh: Any, format: str, shape: tuple[int, ...], axis: int):
    x = values(DEVICES, *shape)
    scatter = partial(collectives.reduce_scatter, axis_name="data", format=format, axis=axis)
    got = on(mesh, lambda x: scatter(x[0])[None])(x)
    for device in range(DEVICES):
        parts = [jnp.split(x[sender], DEVICES, axis)[device] for sender in range(DEVICES)]
        np.testing.assert_array_equal(got[device], sum(rounded(part, format) for part in parts))


def test_one_collective_of_bytes_crosses(mesh: Any):
    x, n = values(DEVICES, 4096), 4096
    gather = on(mesh, lambda x: collectives.all_gather(x, "data", format="int4"))
    scatter = on(mesh, lambda x: collectives.reduce_scatter(x[0], "data", format="int4"))
    for function, kind, width in ((gather, "all-gather", n), (scatter, "all-to-all", n // DEVICES)):
        text = function.lower(x).compile().as_text()
        sent = re.findall(rf"= \(?(\w+)\[([\d,]+)\][^=]*? {kind}\(", text)
        assert sent
        assert {dtype for dtype, _ in sent} == {"u8"}
        size = block_quant.packed_bytes(width, "int4")
        assert all(dims.split(",")[-1] == str(size) for _, dims in sent)
        others = {"all-reduce(", "all-gather(", "all-to-all(", "reduce-scatter("} - {f"{kind}("}
        assert not any(f" {other}" in text for other in others)


def test_dtype_is_kept(mesh: Any):
    x = values(DEVICES, 256).astype(jnp.bfloat16)
    scatter = on(mesh, lambda x: collectives.reduce_scatter(x[0], "data", format="int8"))
    assert scatter(x).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (partial(collectives.reduce_scatter, format="int8"), "multiple of the 4 devices"),
        (partial(collectives.all_gather, format="int8", axis=2), "axis=2"),
        (partial(collectives.all_gather, format="int8", nvlink=True), "nvlink=True takes one process"),
        (partial(collectives.all_gather, format="int9"), "format"),
    ],
)
def test_what_does_not_fit_is_refused(mesh: Any, call: Any, said: str):
    with pytest.raises(ValueError, match=re.escape(said)):
        on(mesh, lambda x: call(x[0], "data"))(values(DEVICES, 6))


def test_unpacking_wants_all_bytes():
    with pytest.raises(ValueError, match="300 values take"):
        block_quant.unpack(jnp.zeros(100, jnp.uint8), 300, format="int8")


@pytest.mark.parametrize("n", [700, 1 << 20])
@pytest.mark.parametrize("call", [collectives.all_gather, collectives.reduce_scatter])
def test_kernels_over_nvlink_compile(gpu_compiler, call: Any, n: int):
    target = aot.parse_target("8xH100")
    mesh = mesh_of(target.devices())
    x = jax.ShapeDtypeStruct((8, 8 * n), jnp.float32, sharding=jax.NamedSharding(mesh, P("data")))
    run = on(mesh, lambda x: call(x[0], "data", format="int4", nvlink=True))
    text = aot.compile_for(target, aot.lower_for(target, run, x)).as_text()
    # Packing, the exchange and unpacking, and no collective of XLA's.
    assert text.count("custom-call(") == 3
    assert not re.search(r"all-(gather|to-all)", text)

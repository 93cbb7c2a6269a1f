"""What the framework's step sends: compiled for simulated CPUs, and for H100s where their compiler is installed."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import pytest
import steps
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax import aot
from dsjax.errors import ConfigError
from dsjax.train.memory import bytes_a_device

gpu = pytest.mark.usefixtures("gpu_compiler")


@functools.cache
def inspected(name: str, **mesh: int | tuple[int, int]):
    """The step's inspection with its program and batch."""
    target = aot.parse_target(name)
    program, batch, lowered = steps.lowered_step(target, mesh)
    return aot.inspect(aot.compile_for(target, lowered), program.mesh), program, batch


def carried(collectives, dtype: str) -> int:
    """Bytes of one type that come out of collectives in a step."""
    return sum(p.result_bytes * c.times for c in collectives for p in c.parts if p.dtype == dtype)


def test_fsdp_gathers_a_layer_at_a_time_on_cpus_too(cpu8):
    inspection, program, batch = inspected("cpu:8", fsdp=4, tensor=2)
    gathers = inspection.collectives.over("fsdp").of("all-gather").in_loop()
    assert {c.times for c in gathers} == {steps.LAYERS}
    # Once forward and once to recompute; each device gathers its half over tensor, in fp32 here.
    matrices = 2 * steps.LAYERS * steps.LAYER_MATRICES * 4 // 2
    norms = 2 * steps.LAYERS * 2 * steps.HIDDEN * 4
    assert carried(gathers, "f32") == matrices + norms
    assert inspection.memory.argument == bytes_a_device((program.abstract_state, batch)) + 4
    assert dict(inspection.mesh) == {"fsdp": 4, "tensor": 2}


def test_flops_are_those_of_the_model(cpu8):
    inspection, _, _ = inspected("cpu:8", fsdp=4, tensor=2)
    tokens = steps.BATCH * steps.SEQUENCE
    # Forward, recomputed and twice backward in the layers; the head is not recomputed.
    layers = 4 * 2 * tokens * steps.LAYERS * steps.LAYER_MATRICES
    head = 3 * 2 * tokens * steps.HIDDEN * steps.VOCABULARY
    attention = 2 * 2 * steps.BATCH * steps.SEQUENCE**2 * steps.HIDDEN * steps.LAYERS
    least, most = layers + head, layers + head + 5 * attention
    assert least / 8 < inspection.flops < most / 8


@gpu
def test_fsdp_gathers_in_bf16_in_the_loop_and_scatters_gradients():
    inspection, program, batch = inspected("8xH100", fsdp=8)
    layered = inspection.collectives.over("fsdp").in_loop()
    gathers, scatters = layered.of("all-gather"), layered.of("reduce-scatter")
    assert {c.times for c in layered} == {steps.LAYERS}
    forward = gathers.named(r"/jvp\(\)/while")
    assert carried(forward, "bf16") == steps.LAYERS * steps.LAYER_MATRICES * 2
    assert carried(forward, "f32") == steps.LAYERS * 2 * steps.HIDDEN * 4  # the norms' scales
    assert carried(scatters, "bf16") == steps.LAYERS * steps.LAYER_MATRICES * 2 // 8
    assert not layered.of("all-reduce")
    assert inspection.memory.argument == bytes_a_device((program.abstract_state, batch)) + 4
    assert inspection.memory.alias == bytes_a_device(program.abstract_state)


@gpu
def test_gathers_for_the_backward_pass_are_in_bf16_too():
    inspection, _, _ = inspected("8xH100", fsdp=8)
    gathers = inspection.collectives.over("fsdp").of("all-gather").in_loop("transpose")
    assert carried(gathers, "bf16") == steps.LAYERS * steps.LAYER_MATRICES * 2
    assert carried(gathers, "f32") == steps.LAYERS * 2 * steps.HIDDEN * 4


@gpu
def test_between_products_the_sequence_is_cut_over_tensor():
    inspection, _, _ = inspected("8xH100", fsdp=4, tensor=2)
    activations = steps.BATCH // 4 * steps.SEQUENCE * steps.HIDDEN * 2  # bytes, bf16
    inside = inspection.collectives.over("tensor").in_loop().at_least(activations // 2)
    gathers, scatters = inside.of("all-gather"), inside.of("reduce-scatter")
    # Into attention and the MLP: forward, recomputed, and their gradients backward.
    assert carried(gathers, "bf16") == 6 * steps.LAYERS * activations
    # Out of both forward, out of the first again when recomputed, out of both backward.
    assert carried(scatters, "bf16") == 5 * steps.LAYERS * activations // 2
    assert len(inside) == len(gathers) + len(scatters)
    assert {c.dtype for c in inside} == {"bf16"}


@gpu
def test_matrices_cut_along_both_dimensions_sum_over_rows_and_send_no_more_than_parts():
    inspection, program, batch = inspected("8xH100", fsdp=2, tensor=(2, 2))
    tokens = steps.BATCH // 2 * steps.SEQUENCE * 2  # bytes of one feature, bf16
    between = inspection.collectives.over("tensor").in_loop().at_least(tokens * steps.HIDDEN // 4)
    assert {c.kind for c in between} == {"all-gather", "reduce-scatter"}
    assert {c.operand_bytes for c in between.of("reduce-scatter")} == {tokens * steps.HIDDEN // 2}
    rows = inspection.collectives.over("tensor_rows").in_loop().at_least(tokens * steps.HIDDEN // 4)
    assert rows and {c.kind for c in rows} <= {"all-gather", "reduce-scatter"}
    assert {c.dtype for c in (*between, *rows)} == {"bf16"}
    # A device holds an eighth of every matrix.
    assert inspection.memory.argument == bytes_a_device((program.abstract_state, batch)) + 4
    matrix = program.abstract_state.params["layers"]["mlp"]["up_proj"]["kernel"]
    local = matrix.sharding.shard_shape(matrix.shape)
    assert math.prod(local) * 8 == math.prod(matrix.shape)


@gpu
def test_parameters_are_cut_over_context_too_and_gathered_over_both():
    inspection, _, _ = inspected("8xH100", fsdp=4, context=2)
    layered = inspection.collectives.over("fsdp", "context").in_loop()
    assert carried(layered.of("reduce-scatter"), "bf16") == steps.LAYERS * steps.LAYER_MATRICES * 2 // 8
    assert carried(layered.of("all-gather"), "bf16") == 2 * steps.LAYERS * steps.LAYER_MATRICES * 2
    assert not layered.of("all-reduce")
    # With replicas their sum is of the shards, not of the whole.
    replicated, program, _ = inspected("2x8xH100", data=2, fsdp=4, context=2)
    sums = replicated.collectives.touching("data")
    assert not sums.in_loop()
    numbers = sum(sum(tensor.numbers) for tensor in program.parts.exchange.tensors.values())
    assert 0 <= carried(sums.of("all-reduce"), "f32") - 4 * numbers < 200
    # The gradient is made where its sums are: activations are not moved to where it is kept.
    mixed, _, _ = inspected("8xH100", fsdp=1, context=2, tensor=4)
    activations = steps.BATCH * steps.SEQUENCE * steps.HIDDEN * 2 // 8
    assert not mixed.collectives.over("context", "tensor").at_least(activations)


@gpu
def test_context_parallel_gathers_keys_and_values_and_decides_by_its_place():
    inspection, _, _ = inspected("2x4xH100", data=2, fsdp=2, context=2)
    gathers = inspection.collectives.over("context").of("all-gather").in_loop()
    keys_and_values = 2 * steps.BATCH // 4 * steps.SEQUENCE * steps.HIDDEN * 2  # bytes, bf16
    assert carried(gathers, "bf16") == 2 * steps.LAYERS * keys_and_values
    assert inspection.conditionals
    assert {c.differs_over for c in inspection.conditionals} == {frozenset({"context"})}
    assert not inspection.collectives.of("collective-permute").divided()


@gpu
def test_only_data_leaves_a_node():
    inspection, program, _ = inspected("2x4xH100", data=2, fsdp=2, context=2)
    target = aot.parse_target("2x4xH100")
    outside = inspection.collectives.crossing(target.domain)
    assert outside
    assert all("data" in c.axes for c in outside)
    assert len(outside) == len(inspection.collectives.touching("data"))
    assert not outside.of("all-gather", "all-to-all")
    assert target.link_of(program.mesh, ["data", "fsdp"]) == target.chip.network


@gpu
def test_attention_runs_in_cudnn_and_its_flops_are_counted():
    inspection, _, _ = inspected("8xH100", fsdp=8)
    attention = [c for c in inspection.custom_calls if c.kind == "attention"]
    assert {c.times for c in attention} == {steps.LAYERS}
    backward = sum(c.flops for c in attention if "Backward" in c.target)
    forward = sum(c.flops for c in attention) - backward
    # Forward and recomputed two products each, backward five; causal blocks leave out up to half.
    assert backward == 2.5 * forward / 2
    whole = 4 * steps.SEQUENCE**2 * steps.HIDDEN  # of the one example on each device
    assert whole / 2 < forward / 2 <= whole


@gpu
def test_what_is_computed_while_something_travels():
    inspection, _, _ = inspected("8xH100", fsdp=8)
    started = inspection.collectives.asynchronous()
    assert any(c.between_work.flops.keys() == {"bf16"} for c in started)
    assert all(c.between_work.total_flops < inspection.flops for c in started)
    for collective in inspection.collectives:
        assert collective.asynchronous or not collective.between


@gpu
def test_options_are_checked_for_the_absent_chip():
    target = aot.parse_target("8xH100")
    chosen = aot.choose_options(target, {"xla_gpu_enable_command_buffer": ""}, environ={})
    assert chosen.options["xla_gpu_enable_command_buffer"] == ""
    assert chosen.options["xla_gpu_enable_latency_hiding_scheduler"] is True
    users = {"XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=false"}
    chosen = aot.choose_options(target, environ=users)
    assert "xla_gpu_enable_latency_hiding_scheduler" not in chosen.options
    assert any("xla_gpu_enable_latency_hiding_scheduler" in note for note in chosen.notes)
    with pytest.raises(ConfigError, match="xla_gpu_no_such_thing"):
        aot.choose_options(target, {"xla_gpu_no_such_thing": 1})
    sharding = NamedSharding(Mesh(target.devices(), ("x",)), P("x"))
    argument = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    lowered = aot.lower_for(target, lambda x: x + 1, argument)
    with pytest.raises(ConfigError, match="xla_gpu_no_such_thing"):
        aot.compile_for(target, lowered, {"xla_gpu_no_such_thing": 1, "xla_gpu_enable_triton_gemm": True})


@gpu
@pytest.mark.parametrize("chip", ["A100-80", "H200", "B200", "L40S"])
def test_products_compile_for_other_chips(chip):
    target = aot.parse_target(f"2x{chip}")
    sharding = NamedSharding(Mesh(target.devices(), ("x",)), P(None, "x"))
    argument = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=sharding)
    compiled = aot.compile_for(target, aot.lower_for(target, lambda x: jnp.sum(x @ x.T), argument))
    inspection = aot.inspect(compiled)
    assert math.isclose(inspection.flops, 2 * 256 * 256 * 128)
    assert inspection.collectives.over("x").of("all-reduce")


@gpu
def test_pallas_kernels_are_told_from_the_rest():
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    target = aot.parse_target("1xH100")
    sharding = NamedSharding(Mesh(target.devices(), ("x",)), P())
    argument = jax.ShapeDtypeStruct((128,), jnp.float32, sharding=sharding)
    kernel = pl.pallas_call(
        double, out_shape=jax.ShapeDtypeStruct((128,), jnp.float32), name="double_it",
        compiler_params=plt.CompilerParams(num_warps=4),
    )  # fmt: skip
    inspection = aot.inspect(aot.compile_for(target, aot.lower_for(target, kernel, argument)))
    (found,) = inspection.kernels()
    assert found.kernel == "double_it"
    assert (found.operands[0].dims, found.results[0].dtype) == ((128,), "f32")


@gpu
def test_mosaic_kernels_are_kernels_too():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def triple(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 3

    target = aot.parse_target("1xH100")
    sharding = NamedSharding(Mesh(target.devices(), ("x",)), P())
    argument = jax.ShapeDtypeStruct((128, 128), jnp.float32, sharding=sharding)
    result = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    kernel = plgpu.kernel(triple, out_type=result)
    inspection = aot.inspect(aot.compile_for(target, aot.lower_for(target, kernel, argument)))
    assert [c.kernel for c in inspection.kernels("triple")] == ["triple"]


def convolutions(target):
    """A convolution and its gradients with 3 x 3 x 16 -> 32 kernels over images of 8 x 8, one image a device."""
    devices = target.devices()
    sharding = NamedSharding(Mesh(devices, ("x",)), P())

    def loss(kernel, images):
        out = jax.lax.conv_general_dilated(
            images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sum(jnp.tanh(out))

    arguments = [((3, 3, 16, 32), jnp.float32), ((4, 8, 8, 16), jnp.float32)]
    arguments = [jax.ShapeDtypeStruct(s, d, sharding=sharding) for s, d in arguments]
    lowered = aot.lower_for(target, jax.grad(loss, argnums=(0, 1)), *arguments)
    return aot.inspect(aot.compile_for(target, lowered))


def test_flops_of_convolutions():
    inspection = convolutions(aot.parse_target("cpu:1"))
    once = 2 * (4 * 8 * 8 * 32) * (3 * 3 * 16)
    assert inspection.flops == pytest.approx(3 * once)


@gpu
def test_flops_of_convolutions_in_cudnn():
    inspection = convolutions(aot.parse_target("1xH100"))
    once = 2 * (4 * 8 * 8 * 32) * (3 * 3 * 16)
    assert inspection.flops == pytest.approx(3 * once)


@gpu
def test_a_mesh_that_is_set_is_left_as_it_is():
    target = aot.parse_target("8xH100")
    mesh = jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Auto,), devices=target.devices())
    argument = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh):
        lowered = aot.lower_for(
            target, lambda x: jax.lax.with_sharding_constraint(x + 1, P(None, "x")), argument
        )
    assert aot.inspect(aot.compile_for(target, lowered)).collectives.over("x").of("all-to-all")

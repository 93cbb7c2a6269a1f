"""What fp8 policies make of the step on GPUs that multiply in fp8, and on one that does not."""

from __future__ import annotations

import functools

import pytest
import steps

from dsjax import aot
from dsjax.config.precision import Fp8Config, PrecisionConfig

pytestmark = pytest.mark.usefixtures("gpu_compiler")
TOKENS = steps.BATCH * steps.SEQUENCE
# FLOPs of all products of the layers, once, of one of eight devices.
ONCE = 2 * TOKENS * steps.LAYERS * steps.LAYER_MATRICES / 8


@functools.cache
def inspected(target: str, scaling: str, **mesh: int) -> aot.Inspection:
    there = aot.parse_target(target)
    precision = PrecisionConfig(policy="fp8", fp8=Fp8Config(scaling=scaling))
    program, _, lowered = steps.lowered_step(there, mesh, precision)
    return aot.inspect(aot.compile_for(there, lowered), program.mesh)


def in_fp8(inspection: aot.Inspection) -> dict[str, float]:
    return {unit: flops / ONCE for unit, flops in inspection.work.flops.items() if unit.startswith("f8")}


@pytest.mark.parametrize("scaling", ["tensor", "delayed"])
def test_all_products_of_layers_are_in_fp8(scaling):
    found = in_fp8(inspected("8xH100", scaling, fsdp=4, tensor=2))
    # Forward and recomputed (but for the last of a layer, whose result nobody needs again), then dw: x in E4M3 on the
    # left; and dx, whose gradients are on the left.
    assert 2.5 <= found["f8e4m3fn"] <= 3.0 and found["f8e5m2"] == pytest.approx(1.0)


def test_collectives_carry_less_than_in_bf16():
    there = aot.parse_target("8xH100")
    program, _, lowered = steps.lowered_step(there, {"fsdp": 4, "tensor": 2})
    plain = aot.inspect(aot.compile_for(there, lowered), program.mesh)
    rounded = inspected("8xH100", "tensor", fsdp=4, tensor=2)

    def carried(inspection: aot.Inspection) -> int:
        return sum(p.result_bytes * c.times for c in inspection.collectives for p in c.parts)

    # Less: what gradients lie cut along the sequence for is gathered in fp8.
    assert carried(rounded) < carried(plain)


def test_by_blocks_the_kernel_multiplies_on_each_devices_own_part():
    inspection = inspected("8xH100", "block", fsdp=4, tensor=2)
    kernels = [found for found in inspection.kernels() if found.operands[0].dtype == "f8e4m3fn"]
    # Forward, recomputed but for the last, and the gradients of inputs of seven products, once in each loop's body.
    assert 7 + 6 + 7 <= len(kernels) <= 7 + 7 + 7
    assert {kernel.results[0].dims[0] for kernel in kernels} == {TOKENS // 4}
    # Columns over `tensor`, or the whole of a product that is summed over it.
    assert {kernel.results[0].dims[1] for kernel in kernels} == {steps.HIDDEN // 2, steps.HIDDEN}
    assert {kernel.results[0].dtype for kernel in kernels} == {"bf16"}
    # Their FLOPs count: forward, recomputed but for the last, and gradients of inputs.
    assert 2.5 <= in_fp8(inspection)["f8e4m3fn"] <= 3.0


def test_where_there_is_no_fp8_the_same_numbers_are_multiplied_in_bf16():
    assert in_fp8(inspected("8xA100-80", "tensor", fsdp=8)) == {}

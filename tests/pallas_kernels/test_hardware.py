"""Which implementation is taken where."""

from __future__ import annotations

import jax
import pytest

from dsjax import aot
from pallas_kernels import hardware

KERNELS = {"mosaic": range(90, 100), "triton": range(80, 130)}


def test_a_cpu_takes_the_reference():
    assert hardware.chip() == hardware.Chip("cpu")
    assert hardware.choose(KERNELS) == "reference"


@pytest.mark.parametrize(
    ("name", "generation", "kernel"),
    [("A100-80", 80, "triton"), ("H100", 90, "mosaic"), ("H200", 90, "mosaic"), ("B200", 100, "triton")],
)
def test_a_gpu_that_is_compiled_for_is_known_by_its_name(name, generation, kernel, gpu_compiler):
    target = aot.parse_target(f"1x{name}")
    with aot.on(target):
        assert hardware.chip() == hardware.Chip("gpu", generation)
        assert hardware.choose(KERNELS) == kernel
    with jax.set_mesh(jax.sharding.Mesh(target.devices(), ("data",))):
        assert hardware.choose(KERNELS) == kernel
        assert hardware.choose({}) == "reference"


def test_use_forces_and_lets_go():
    with hardware.use("triton"):
        assert hardware.choose(KERNELS) == "triton"
        with hardware.use("interpret"):
            assert hardware.choose(KERNELS) == "interpret"
        assert hardware.choose(KERNELS) == "triton"
    assert hardware.choose(KERNELS) == "reference"


def test_refusals():
    with pytest.raises(ValueError, match="expected one of reference, triton"), hardware.use("cuda"):
        pass
    with hardware.use("mosaic"), pytest.raises(ValueError, match="this operation has reference, triton only"):
        hardware.choose({"triton": range(80, 130)})

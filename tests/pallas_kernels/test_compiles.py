"""Every kernel compiles for an H100 that is not here, without spills and with nothing beside it."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import pytest
from cases import Compiled, collect
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax import aot
from pallas_kernels import hardware, resources

CASES = collect("COMPILED")


def compile_case(case: Compiled, chip: str = "H100") -> tuple[Any, list[resources.Resources]]:
    """The compiled program and what its kernels take."""
    target = aot.parse_target(f"1x{chip}")
    here = NamedSharding(jax.sharding.Mesh(target.devices(), ("data",)), P())
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=here) for shape, dtype in case.shapes]
    function = jax.jit(lambda *a: case.function(*a), donate_argnums=case.donated)
    with hardware.use(case.implementation) if case.implementation else contextlib.nullcontext():
        lowered = aot.lower_for(target, function, *arguments)
    return resources.compiled(lambda options: aot.compile_for(target, lowered, options))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_compiles_for_hopper(case: Compiled, gpu_compiler):
    program, kernels = compile_case(case)
    assert program.as_text().count("custom-call(") == case.kernels
    assert all(kernel.spilled == 0 for kernel in kernels), kernels


def test_resources_are_read(gpu_compiler):
    case = next(case for case in CASES if case.name == "int8-encode")
    _, [kernel] = compile_case(case)
    assert (kernel.name, kernel.threads, kernel.spilled) == ("block_quant_encode_int8", 128, 0)
    assert 16 < kernel.registers < 256 and 0 < kernel.shared <= 16384
    assert resources.of_ptx("") == []

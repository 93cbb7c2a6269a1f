"""Every implementation of every operation gives what the reference gives."""

from __future__ import annotations

import jax
import pytest
from cases import Case, collect

from pallas_kernels import hardware

RUNS = [(case, name) for case in collect("CONFORMANCE") for name in case.implementations]


@pytest.mark.parametrize(("case", "name"), RUNS, ids=[f"{case.name}-{name}" for case, name in RUNS])
def test_conformance(case: Case, name: str):
    arguments = case.arguments()
    with hardware.use("reference"):
        want = jax.jit(lambda *a: case.function(*a))(*arguments)
    with hardware.use(name):
        got = jax.jit(lambda *a: case.function(*a))(*arguments)
    case.check(got, want)

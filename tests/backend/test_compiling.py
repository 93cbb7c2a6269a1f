"""Faults of XLA that go away without one option."""

from __future__ import annotations

import numpy as np
import pytest

from dsjax.backend.compiling import JittedAround, compiled_around

TRITON, DOUBLED = "xla_gpu_enable_triton_gemm", "xla_gpu_enable_while_loop_double_buffering"


def compiler(*faults: tuple[str, str]):
    """A compiler that says something while an option is not off; what it was called with is kept."""
    calls = []

    def compile_with(options):
        calls.append(dict(options))
        for option, said in faults:
            if options.get(option) is not False:
                raise RuntimeError(f"INTERNAL: {said} %dot.653")
        return "compiled"

    return compile_with, calls


def test_what_compiles_is_compiled_once_and_nothing_is_said():
    compile_with, calls = compiler()
    given = {DOUBLED: True}
    assert compiled_around(compile_with, given) == ("compiled", given, []) and calls == [given]


def test_options_in_the_way_are_left_out_one_by_one_and_said():
    compile_with, calls = compiler(
        (TRITON, "Couldn't find output tile sizes that satisfy"),
        (DOUBLED, "bitcast.1 is not scheduled after its control predecessor bitcast.1"),
    )
    given = {DOUBLED: True}
    compiled, options, notes = compiled_around(compile_with, given)
    assert compiled == "compiled" and options == {TRITON: False, DOUBLED: False} and len(calls) == 3
    assert [note.split("=")[0] for note in notes] == [f"XLA: {TRITON}", f"XLA: {DOUBLED}"]
    assert given == {DOUBLED: True}


@pytest.mark.parametrize("said", ["RESOURCE_EXHAUSTED", "tile sizes"])
def test_other_faults_and_those_that_stay_are_raised(said):
    compile_with, calls = compiler(("never", said))
    with pytest.raises(RuntimeError, match=said):
        compiled_around(compile_with, {TRITON: False})
    assert len(calls) == 1


def test_a_jitted_function_goes_on_without_the_option(monkeypatch):
    tried = []

    def jit(function, compiler_options, donate_argnums):
        tried.append(compiler_options)

        def call(*args):
            if compiler_options.get(TRITON) is not False:
                raise RuntimeError("INTERNAL: Couldn't find output tile sizes that satisfy")
            return function(*args)

        return call

    monkeypatch.setattr("jax.jit", jit)
    called = JittedAround(lambda x, y: x - y, {DOUBLED: True}, donate_argnums=1)
    with pytest.warns(UserWarning, match=TRITON):
        assert called(5, 3) == 2
    assert called(7, 3) == 4
    assert tried == [{DOUBLED: True}, {DOUBLED: True, TRITON: False}]


def test_a_jitted_function_computes_with_its_options():
    called = JittedAround(lambda x: x + 1, {"xla_cpu_enable_fast_math": False})
    assert called(1.0) == 2.0 and called(np.ones(3, np.int32)).tolist() == [2, 2, 2]

"""Faults of XLA that go away without one option."""

from __future__ import annotations

import pytest

from dsjax.backend.compiling import compiled_around

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

"""Compiling around faults of XLA that one of its options brings to light."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class _Fault(NamedTuple):
    """What XLA says, the option without which it compiles, and why."""

    said: str
    option: str
    why: str


_FAULTS = (
    # Where there is no device on which several could be tried (jax 0.10.2 to 0.12).
    _Fault("tile sizes", "xla_gpu_enable_triton_gemm", "Triton has no tiles for a product of this size"),
    # Two turns of a loop, written out, that both sum a number a token over devices: norms of heads that `tensor` cuts.
    _Fault(
        "not scheduled after its control predecessor", "xla_gpu_enable_while_loop_double_buffering",
        "XLA cannot put two turns of this program's loops in order",
    ),
)  # fmt: skip


def compiled_around(
    compile_with: Callable[[dict[str, Any]], T], options: Mapping[str, Any]
) -> tuple[T, dict[str, Any], list[str]]:
    """What is compiled, the options with which it could be, and what of them was changed, in words.

    Args:
      compile_with: called with XLA's options, again without one of them where that is in the way.
    """
    tried, notes = dict(options), list[str]()
    while True:
        try:
            return compile_with(tried), tried, notes
        except Exception as error:
            text = str(error)
            found = next((f for f in _FAULTS if f.said in text and tried.get(f.option) is not False), None)
            if found is None:
                raise
        tried[found.option] = False
        notes.append(f"XLA: {found.option}=false: {found.why}")

"""Compiling around faults of XLA that one of its options brings to light."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import jax

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


class JittedAround(Generic[T]):
    """`jax.jit` of a function with XLA's options, compiled around what they break; a warning says what was changed.

    Args:
      how: `jax.jit`'s own.

    Attributes:
      jitted: the jitted function as it was compiled last.
    """

    def __init__(self, function: Callable[..., T], options: Mapping[str, Any], **how: Any):
        self._function, self._how = function, how
        self._use(options)

    def _use(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self.jitted: Any = jax.jit(self._function, compiler_options=dict(options), **self._how)

    def __call__(self, *args: Any) -> T:
        """The function's result."""

        def run(options: dict[str, Any]) -> T:
            if options != self._options:
                self._use(options)
            result: T = self.jitted(*args)
            return result

        result, _, notes = compiled_around(run, self._options)
        for note in notes:
            warnings.warn(note, stacklevel=2)
        return result

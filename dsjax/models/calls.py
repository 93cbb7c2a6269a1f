"""Calls of a model's modules, seen and changed from outside while a program is traced.

A module is opened by giving it a class of its own, derived from the one it has, that knows the module's path; the
class goes where the module's structure goes, so copies of it (a layer in a loop) are open too.  What is
open computes as ever until an interceptor is there.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import flax.linen
from flax import nnx

LOSS = "loss"  # the name under which a loss passes


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
      path: the module's path in the model; "" for the model itself.
      parent: path of the open module from which it is called; None: none.
      stack: path of the stack of layers in whose loop it is; None: it is in none.
      layer: its number in the stack (int32 []), or in a list of modules that its path names; None: it is in no layer.
      depth: layers of the stack; None: it is in none.
      outermost: whether it is in a layer and its caller is not.
      number: how many calls of the same path were traced before it, in its turn of the loop.
    """

    path: str
    parent: str | None = None
    stack: str | None = None
    layer: Any = None
    depth: int | None = None
    outermost: bool = False
    number: int = 0


Interceptor = Callable[[Call, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class _Now:
    """Where the tracing is: who looks on, in which layer, whose call, and how often each path was called."""

    interceptors: tuple[Interceptor, ...]
    counts: dict[str, int]
    stack: tuple[str, Any, int] | None = None
    parent: str | None = None
    in_layer: bool = False


_now: contextvars.ContextVar[_Now | None] = contextvars.ContextVar("calls", default=None)


@contextlib.contextmanager
def _at(now: _Now) -> Iterator[None]:
    token = _now.set(now)
    try:
        yield
    finally:
        _now.reset(token)


@contextlib.contextmanager
def intercepted(interceptor: Interceptor) -> Iterator[None]:
    """Every call of an open module that is traced inside goes through ``interceptor(call, run, args, kwargs)``.

    Those that are there already stand around it.  Modules of Linen need not be opened.
    """
    now = _now.get()
    others = now.interceptors if now else ()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_at(_Now((*others, interceptor), {})))
        if not others:
            stack.enter_context(flax.linen.intercept_methods(_linen))
        yield


@contextlib.contextmanager
def in_layer(stack: str, index: Any, depth: int, first: int = 0) -> Iterator[None]:
    """Calls inside are of layer `first + index` of a stack of so many."""
    now = _now.get()
    if now is None:
        yield
        return
    with _at(_Now(now.interceptors, {}, (stack, first + index, depth), now.parent)):
        yield


def passing(name: str, value: Any) -> Any:
    """A value that is no module's output, shown to interceptors as the output of a call of this name."""
    return value if _now.get() is None else _called(name, lambda: value, (), {})


def _called(path: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    now = _now.get()
    if now is None:
        return run(*args, **kwargs)
    stack, layer, depth = now.stack or (None, number_in(path), None)
    number = now.counts.get(path, 0)
    now.counts[path] = number + 1
    call = Call(path, now.parent, stack, layer, depth, layer is not None and not now.in_layer, number)

    def through(interceptors: tuple[Interceptor, ...], *args: Any, **kwargs: Any) -> Any:
        if not interceptors:
            within = _Now(now.interceptors, now.counts, now.stack, path, layer is not None)
            with _at(within):
                return run(*args, **kwargs)
        return interceptors[0](call, functools.partial(through, interceptors[1:]), args, kwargs)

    return through(now.interceptors, *args, **kwargs)


def number_in(path: str) -> int | None:
    """The first number in a path."""
    return next((int(part) for part in path.split("/") if part.isdecimal()), None)


def _linen(run: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    if context.method_name != "__call__" or not context.module.path:
        return run(*args, **kwargs)
    return _called("/".join(context.module.path), run, args, kwargs)


def opened(model: nnx.Module) -> nnx.Module:
    """The model, with its modules opened in place."""
    for path, module in module_paths(model).items():
        if not hasattr(module, "_opened_at"):
            # A class whose instances are laid out otherwise (with slots) stays shut.
            with contextlib.suppress(TypeError):
                object.__setattr__(module, "__class__", _open_class(type(module), path))
    return model


def module_paths(model: nnx.Module) -> dict[str, nnx.Module]:
    """Path -> module that can be called, in the order of the names."""
    found = {
        "/".join(map(str, path)): node for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)
    }
    return {
        path: m for path, m in sorted(found.items()) if any("__call__" in vars(c) for c in type(m).__mro__)
    }


@functools.cache
def _open_class(kind: type, path: str) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _called(path, functools.partial(kind.__call__, self), args, kwargs)  # type: ignore[operator]

    names = {"__call__": functools.wraps(kind.__call__)(call), "_opened_at": path}  # type: ignore[operator]
    told = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind)(kind.__name__, (kind,), {**told, **names})

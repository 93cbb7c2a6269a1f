"""Lowers and compiles programs for a target that is not here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dsjax.aot.target import Target
from dsjax.backend.compiling import compiled_around
from dsjax.backend.xla_options import Chosen, choose, kept_out_of_the_cache, unknown_options
from dsjax.errors import ConfigError, OutOfDeviceMemory


@contextlib.contextmanager
def on(target: Target) -> Iterator[None]:
    """Within it, what is traced and lowered takes the target's chip for the one that will run it.

    Arguments still carry their shardings, over `target.devices()`: those say what is compiled for.
    Kernels written for a chip (Pallas) ask this context which chip that is.
    """
    import jax
    from jax.sharding import AbstractDevice, AbstractMesh

    xla = target.chip.xla
    if xla is None or not jax.sharding.get_abstract_mesh().empty:
        # A mesh that is set (`jax.set_mesh`) knows its devices.
        yield
        return
    device = AbstractDevice(xla.description, xla.cores, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield


def lower_for(target: Target, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Traces and lowers a function for a target; nothing is run.

    Args:
      function: a jitted function, or a plain one, which is jitted as it is.
      args, kwargs: trees of `jax.ShapeDtypeStruct` (or arrays, of which only the shapes count) whose
        shardings are over a mesh of `target.devices()`.

    Returns:
      What `jax.jit(...).lower` returns; `compile_for` takes it.

    Raises:
      ConfigError: no argument lies on the target's devices.
    """
    import jax

    jitted = function if hasattr(function, "trace") else jax.jit(function)
    there = set(target.devices())
    used = [set(s.device_set) for x in jax.tree.leaves((args, kwargs)) if (s := getattr(x, "sharding", None))]
    if not any(devices <= there for devices in used):
        raise ConfigError(
            f"no argument has a sharding over the devices of {target.name}; give each a "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(Mesh(target.devices(), ...), ...))"
        )
    with on(target):
        return jitted.trace(*args, **kwargs).lower(lowering_platforms=(target.platform,))


def compile_chosen(target: Target, lowered: Any, chosen: Chosen) -> tuple[Any, Chosen]:
    """Compiles with what `choose_options` gave, and again without an option that is in XLA's own way.

    Returns:
      What was compiled, and the options with which; the notes say so where they changed.

    Raises:
      ConfigError, OutOfDeviceMemory: as `compile_for`.
    """
    compiled, options, notes = compiled_around(
        lambda options: compile_for(target, lowered, options), chosen.options
    )
    return compiled, replace(chosen, options=options, notes=[*chosen.notes, *notes])


def compile_for(target: Target, lowered: Any, options: Mapping[str, Any] | None = None) -> Any:
    """Compiles what was lowered for a target.

    Args:
      options: XLA's `compiler_options`; see `choose_options`.

    Raises:
      ConfigError: an option that this jaxlib does not know, one line each; a chip too new for ptxas.
      OutOfDeviceMemory: XLA finds no way to place the program in the chip's memory.
    """
    options = dict(options or {})
    try:
        with kept_out_of_the_cache():
            return lowered.compile(compiler_options=options)
    except Exception as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "RESOURCE_EXHAUSTED" in said:
            raise OutOfDeviceMemory(f"{target.name}: the program cannot be compiled: {said[:300]}") from error
        if "ptxas" in said:
            raise ConfigError(
                f"{target.name}: the compiler for GPUs here does not take it: {said[:300]}"
            ) from error
        unknown = unknown_options(options, _one_device(target))
        if unknown:
            raise ConfigError(
                f"{name}: this jaxlib does not take it as an XLA option ({options[name]!r})"
                for name in unknown
            ) from error
        raise


def choose_options(
    target: Target,
    own: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    mesh: Mapping[str, int] | None = None,
) -> Chosen:
    """The XLA options measured to be good for the target's chip, checked against this jaxlib.

    The first of the notes names the preset.

    Args:
      own: the user's options, which win and must be right.
      environ: where XLA_FLAGS stands; the process's environment by default.
      mesh: axis -> size, where it is known: some options are not for every layout.

    Raises:
      ConfigError: one of the user's own that this jaxlib does not know, one line each.
    """
    chosen = choose(target.chip.kind, environ, device=_one_device(target), own=own, mesh=mesh)
    return replace(chosen, notes=[f"XLA options: preset {chosen.preset}", *chosen.notes])


def _one_device(target: Target) -> Any:
    """A device of the target's kind; a cluster of one is quickly made."""
    one = target if target.slice_shape is not None else Target(1, 1, target.chip)
    return one.devices()[0]

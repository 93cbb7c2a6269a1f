"""Lowers and compiles programs for a target that is not here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from dsjax.aot.target import Target
from dsjax.backend.xla_options import PRESETS, Chosen
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
        with _kept_out_of_the_cache():
            return lowered.compile(compiler_options=options)
    except Exception as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "RESOURCE_EXHAUSTED" in said:
            raise OutOfDeviceMemory(f"{target.name}: the program cannot be compiled: {said[:300]}") from error
        if "ptxas" in said:
            raise ConfigError(
                f"{target.name}: the compiler for GPUs here does not take it: {said[:300]}"
            ) from error
        unknown = [name for name, value in options.items() if refused_for(target, ((name, value),))]
        if unknown:
            raise ConfigError(
                f"{name}: this jaxlib does not take it as an XLA option ({value!r})"
                for name, value in options.items()
                if name in unknown
            ) from error
        raise


@contextlib.contextmanager
def _kept_out_of_the_cache() -> Iterator[None]:
    """Keeps what is compiled out of jax's cache on disk, which cannot give back a program without its device."""
    import jax

    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


def choose_options(
    target: Target, own: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> Chosen:
    """The XLA options measured to be good for the target's kind of chip, checked against this jaxlib.

    Args:
      own: the user's options, which win and must be right.
      environ: where XLA_FLAGS stands; the process's environment by default.

    Raises:
      ConfigError: one of the user's own that this jaxlib does not know, one line each.
    """
    own = dict(own or {})
    unknown = [name for name, value in own.items() if refused_for(target, ((name, value),))]
    if unknown:
        raise ConfigError(f"{name}: this jaxlib does not take it as an XLA option" for name in unknown)
    flags = (os.environ if environ is None else environ).get("XLA_FLAGS", "").split()
    users = {*own, *(flag.lstrip("-").partition("=")[0] for flag in flags)}
    preset = PRESETS.get(target.chip.kind, {})
    options = {name: value for name, value in preset.items() if name not in users}
    notes = [f"XLA: {name} is the user's own, not the preset's" for name in preset if name in users]
    if options and refused_for(target, tuple(options.items())):
        left = [name for name, value in options.items() if refused_for(target, ((name, value),))]
        options = {name: value for name, value in options.items() if name not in left}
        notes.append(f"XLA: left out, as this jaxlib does not take it: {', '.join(left)}")
    return Chosen({**options, **own}, notes)


def refused_for(target: Target, options: tuple[tuple[str, Any], ...]) -> bool:
    """Whether this jaxlib does not take these options for the target's kind of chip."""
    one = target if target.slice_shape is not None else Target(1, 1, target.chip)
    return _refused(tuple(one.devices()), options)


@cache
def _refused(devices: tuple[Any, ...], options: tuple[tuple[str, Any], ...]) -> bool:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    sharding = NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec())
    nothing = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), "float32", sharding=sharding))
    try:
        with _kept_out_of_the_cache():
            nothing.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError:
        return True
    return False

"""A run's real training step, compiled for a cluster that is not here."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax import aot
from dsjax.config import Config
from dsjax.data import load_tokenizer
from dsjax.errors import ConfigError, InputError
from dsjax.mesh import BATCH_AXES, batch_shards
from dsjax.mesh.axes import resolve_sizes
from dsjax.models import ModelSpec
from dsjax.train.assemble import program_for
from dsjax.train.formats import held_gradients
from dsjax.train.memory import bytes_a_device
from dsjax.train.program import Program

# What jax takes of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
_GPU_SHARE = 0.75
_INT32 = ("tokens", "targets", "segment_ids", "positions")


@dataclass(frozen=True)
class Described:
    """A run laid out on a target, traced but not compiled.

    Attributes:
      batch: abstract, [microbatches, rows, sequence] each.
    """

    config: Config
    target: aot.Target
    program: Program
    model: ModelSpec
    batch: Any

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.config.train.global_batch_size * self.config.train.sequence_length

    @property
    def model_flops(self) -> float | None:
        """Model FLOPs of a step; None where the model does not tell."""
        each = self.model.flops_per_token(self.config.train.sequence_length)
        return each * self.tokens if each else None

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of a device that are known without compiling (see `parts_of`)."""
        return parts_of(self.program, self.batch)


@dataclass(frozen=True)
class CompiledStep:
    """A compiled step, read.

    Attributes:
      seconds: tracing, lowering and compiling.
    """

    inspection: aot.Inspection
    seconds: float
    options: Mapping[str, Any]
    notes: tuple[str, ...]


def describe(config: Config, target: aot.Target, vocab_size: int | None) -> Described:
    """Lays a run out on a target's devices.

    Raises:
      ConfigError: a mesh that has another number of devices than the target, a batch or a parameter
        that does not divide, or no wheels to compile with.
    """
    check_mesh(config, target)
    with aot.on(target):
        program, model = program_for(config, target.devices(), vocab_size, topology=target.topology)
    return Described(config, target, program, model, abstract_batch(config, program))


def parts_of(program: Program, batch: Any) -> dict[str, int]:
    """Bytes of a device that are known without compiling: parameters, gradients, optimizer, exchange, batch."""
    state = program.abstract_state
    held = jax.eval_shape(partial(held_gradients, program.layout, program.numbers), state.params)
    gradients = sum(
        math.prod(param.sharding.shard_shape(param.shape)) * gradient.dtype.itemsize
        for param, gradient in zip(jax.tree.leaves(state.params), jax.tree.leaves(held), strict=True)
    )
    return {
        "parameters": bytes_a_device((state.params, state.model_state)),
        "gradients": gradients,
        "optimizer": bytes_a_device(state.opt_state),
        "exchange": bytes_a_device((state.residuals, state.workers)),
        "batch": bytes_a_device(batch),
    }


def batch_like(batch: Any, program: Program) -> Any:
    """The abstract [microbatches, rows, ...] of a batch whose arrays have all rows of a step first.

    Raises:
      ConfigError: rows that do not divide over microbatches and shards.
    """
    parts = program.microbatches * batch_shards(program.mesh)
    rows = {np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in jax.tree.leaves(batch)}
    if len(rows) != 1 or not min(rows) or min(rows) % parts:
        raise ConfigError(
            f"the batch: its arrays have the rows of a step first, a multiple of {parts} (microbatches x shards of "
            f"the batch); got {', '.join(map(str, sorted(rows))) or 'no arrays'}"
        )
    sharding = NamedSharding(program.mesh, P(None, BATCH_AXES))

    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        lead = (program.microbatches, leaf.shape[0] // program.microbatches)
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct((*lead, *leaf.shape[1:]), dtype, sharding=sharding)

    return jax.tree.map(one, batch)


def abstract_batch(config: Config, program: Program) -> dict[str, jax.ShapeDtypeStruct]:
    """A step's batch as the loaders make it."""
    train = config.train
    lead = program.microbatches
    shape = (lead, train.global_batch_size // lead, train.sequence_length)
    sharding = NamedSharding(program.mesh, P(None, BATCH_AXES))
    dtypes: dict[str, Any] = {**dict.fromkeys(_INT32, np.int32), "weights": np.float32}
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in dtypes.items()}


def check_mesh(config: Config, target: aot.Target) -> dict[str, int]:
    """The sizes of all axes on a target.

    Raises:
      ConfigError: they do not multiply to its devices.
    """
    try:
        return resolve_sizes(config.mesh.model_dump(), target.size)
    except ConfigError as error:
        raise ConfigError(
            f"{target.name}: {line.partition(' (on a CPU')[0]}" for line in error.faults
        ) from None


def compile_step(described: Described, options: Mapping[str, Any] | None = None) -> CompiledStep:
    """Compiles the step that `dsjax train` would run.

    Args:
      options: the user's XLA options, which win over the chip's preset.

    Raises:
      ConfigError: an option that this jaxlib does not know.
      OutOfDeviceMemory: XLA finds no way to place the program in the chip's memory.
    """
    return compile_program(described.program, described.batch, described.target, options)


def compile_program(
    program: Program, batch: Any, target: aot.Target, options: Mapping[str, Any] | None = None
) -> CompiledStep:
    """The same of a program and an abstract batch."""
    return compile_jitted(*program.jitted_step(batch), target, options, program.mesh)


def compile_jitted(
    jitted: Any,
    args: Sequence[Any],
    target: aot.Target,
    options: Mapping[str, Any] | None = None,
    mesh: Any = None,
) -> CompiledStep:
    """The same of any jitted function and its abstract arguments.

    Args:
      mesh: over which it is compiled; by default that of its arguments.
    """
    chosen = aot.choose_options(target, options, mesh=None if mesh is None else mesh.shape)
    started = time.monotonic()
    compiled, chosen = aot.compile_chosen(target, aot.lower_for(target, jitted, *args), chosen)
    seconds = time.monotonic() - started
    return CompiledStep(aot.inspect(compiled, mesh), seconds, chosen.options, tuple(chosen.notes))


def vocabulary(config: Config) -> int | None:
    """The size of the vocabulary that the run's tokenizer has, as far as it can be told without its data.

    None where the model brings its own.

    Raises:
      InputError: the tokenizer's file is missing or broken.
    """
    if _models_own(config):
        return None
    if config.data.tokenizer == "bpe":
        return config.data.bpe_vocab_size
    try:
        return load_tokenizer(config).vocab_size
    except InputError as error:
        raise InputError(
            f"{line}; a plan needs no more of it than its size: model.vocab_size tells that too"
            for line in error.faults
        ) from None


def vocabulary_notes(config: Config) -> list[str]:
    """What is to be said of a vocabulary whose size only the data can tell."""
    if _models_own(config) or config.data.tokenizer != "bpe":
        return []
    return [
        f"the vocabulary is taken to be data.bpe_vocab_size, {config.data.bpe_vocab_size}: data.paths was not "
        "looked at, and a tokenizer that is trained on little text has fewer tokens"
    ]


def _models_own(config: Config) -> bool:
    """Whether the model tells the size of its vocabulary."""
    return bool(config.model.fields.get("vocab_size") or config.model.config or ":" in config.model.kind)


def memory_limit(target: aot.Target, environ: Mapping[str, str] | None = None) -> int:
    """Bytes that jax lets a program use of a device.

    Args:
      environ: where XLA_PYTHON_CLIENT_MEM_FRACTION stands; the process's environment by default.

    Raises:
      ConfigError: that variable is not a share.
    """
    if target.chip.kind != "gpu":
        return target.chip.memory.bytes
    text = (os.environ if environ is None else environ).get("XLA_PYTHON_CLIENT_MEM_FRACTION", str(_GPU_SHARE))
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(f"XLA_PYTHON_CLIENT_MEM_FRACTION: takes a share above 0 and up to 1, got {text}")
    return int(share * target.chip.memory.bytes)

"""From a config to a trainer: the model, its loss, the optimizer, on the mesh."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from dsjax.config import Config
from dsjax.data import Tokenizer, load_tokenizer
from dsjax.errors import ConfigError
from dsjax.mesh import batch_shards, make_mesh, zigzag_order
from dsjax.models import ModelSpec, Stages, build
from dsjax.train.elastic import padded_rows, replanned
from dsjax.train.lay_out import lay_out
from dsjax.train.losses import language_model_loss, language_model_stages, logits_loss, loss_of_stages
from dsjax.train.optimizers import make_optimizer, make_schedule
from dsjax.train.program import Program, Recipe
from dsjax.train.stacking import microbatches_of
from dsjax.train.trainer import Trainer


@dataclass
class Assembled:
    """What a config describes, ready to run."""

    config: Config
    tokenizer: Tokenizer
    model: ModelSpec
    trainer: Trainer

    @property
    def rows(self) -> Any:
        """Which rows of the global batch this process supplies; empty ones past its end fill it up."""
        parts = batch_shards(self.trainer.mesh) * self.trainer.program.microbatches
        return self.trainer.rows(padded_rows(self.config.train.global_batch_size, parts))


def check_batch(config: Config, mesh: jax.sharding.Mesh, *, filled_up: bool = False) -> None:
    """Refuses a batch or sequence that does not divide over the mesh.

    Args:
      filled_up: the batch need not divide: empty rows fill it up.

    Raises:
      ConfigError: naming the settings and values that would work.
    """
    train, shards = config.train, batch_shards(mesh)
    parts = shards * train.gradient_accumulation_steps
    faults = []
    if train.global_batch_size % parts and not filled_up:
        below, above = train.global_batch_size // parts * parts, -(-train.global_batch_size // parts) * parts
        near = " or ".join(str(n) for n in (below, above) if n)
        faults.append(
            f"train.global_batch_size: {train.global_batch_size} does not divide over {shards} shards of the batch "
            f"(mesh data x fsdp x expert) times {train.gradient_accumulation_steps} microbatches "
            f"(train.gradient_accumulation_steps); use {near}"
        )
    passes = microbatches_of(config.pipeline, mesh.shape["pipeline"], -(-train.global_batch_size // parts))
    if not faults and (rows := -(-train.global_batch_size // parts)) % passes:
        works = next(n for n in range(min(passes, rows), 0, -1) if rows % n == 0)
        faults.append(
            f"pipeline.microbatches: {passes} do not divide the {rows} rows of a batch shard (train.global_batch_size "
            f"{train.global_batch_size} / {parts}); use {works}, or a batch of {passes * parts}"
        )
    context = mesh.shape["context"]
    if context > 1:
        try:
            zigzag_order(train.sequence_length, context)
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(faults)


def assemble(config: Config, *, allow_config_change: bool = False) -> Assembled:
    """Builds what a config describes; compiles and writes nothing but a tokenizer to be trained.

    Raises:
      ConfigError, InputError: what cannot be built, a line a fault.
    """
    config, notes = replanned(config, jax.device_count(), os.environ)
    check_batch(config, make_mesh(config.mesh), filled_up=bool(notes))
    tokenizer = load_tokenizer(config)
    model = _model(config, jax.default_backend(), tokenizer.vocab_size)
    train = config.train
    tokens = train.global_batch_size * train.sequence_length
    per_token = model.flops_per_token(train.sequence_length)
    trainer = Trainer.from_recipe(
        _recipe(config, model),
        config,
        alternatives=lambda trainer: _alternatives(config, tokenizer, trainer),
        flops_per_step=per_token * tokens if per_token else None,
        allow_config_change=allow_config_change,
    )
    trainer.notes += notes
    return Assembled(config, tokenizer, model, trainer)


def program_for(
    config: Config, devices: Sequence[jax.Device], vocab_size: int | None = None, **more: Any
) -> tuple[Program, ModelSpec]:
    """The compiled side of a config's run on these devices, which need not be here.

    Args:
      vocab_size: of the tokenizer, where the model's config names none.
      more: `Program`'s own.

    Raises:
      ConfigError: what cannot be built on such a mesh, a line a fault.
    """
    mesh = make_mesh(config.mesh, devices)
    check_batch(config, mesh)
    platform = "gpu" if devices[0].platform == "cuda" else devices[0].platform
    model = _model(config, platform, vocab_size)
    return lay_out(_recipe(config, model), config, mesh, **more), model


def _model(config: Config, platform: str, vocab_size: int | None) -> ModelSpec:
    model = build(
        config.model,
        platform=platform,
        vocab_size_hint=vocab_size,
        remat=config.train.remat,
        max_length=config.train.sequence_length,
    )
    # Its FLOPs are of a step that makes the gradients of all matrices.
    return replace(model, flops_per_token=lambda length: None) if config.lora.rank else model


def _loss(model: ModelSpec) -> Callable[[Any, Any], Any]:
    if model.loss is not None:
        return model.loss
    if model.stages is not None:
        return loss_of_stages(model.stages)
    return language_model_loss(model.cross_entropy_chunk) if model.has_hidden else logits_loss


def _recipe(config: Config, model: ModelSpec) -> Recipe:
    optimizer = config.optimizer
    schedule = make_schedule(optimizer.schedule, optimizer.learning_rate, config.train.steps)
    return Recipe(
        init=model.init,
        loss=_loss(model),
        make_optimizer=lambda names_of: make_optimizer(optimizer, schedule, names_of),
        schedule=schedule,
        param_axes=model.param_axes,
        remat_by_step=not model.remat_by_layer,
        stages=_stages(config, model),
        after_step=model.after_step,
        weights=model.family and model.family.weights,
    )


def _stages(config: Config, model: ModelSpec) -> Stages | None:
    if model.stages is not None or model.trunk is None:
        return model.stages
    return language_model_stages(model.trunk, model.cross_entropy_chunk, config.train.remat)


def _alternatives(config: Config, tokenizer: Tokenizer, trainer: Trainer) -> list[tuple[str, Program]]:
    """Programs of the same run with more accumulation or recomputation, least cost first."""
    train = config.train
    shards = batch_shards(trainer.mesh)
    found = []
    for remat in dict.fromkeys([train.remat, "dots", "full"]):
        for factor in (1, 2, 4, 8, 16):
            microbatches = train.gradient_accumulation_steps * factor
            if (factor == 1 and remat == train.remat) or train.global_batch_size % (microbatches * shards):
                continue
            settings = {"gradient_accumulation_steps": microbatches, "remat": remat}
            changed = config.model_copy(update={"train": train.model_copy(update=settings)})
            try:
                program, _ = program_for(changed, list(trainer.mesh.devices.flat), tokenizer.vocab_size)
            except ConfigError:  # not every combination makes a pipeline
                continue
            program.compiler_options = trainer.program.compiler_options
            text = " ".join(f"train.{k}={v}" for k, v in settings.items() if v != getattr(train, k))
            found.append((text, program))
    return found

"""From a config to a trainer: the model, its loss, the optimizer, on the mesh."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx

from dsjax.config import Config
from dsjax.config.lora import LoraConfig
from dsjax.data import Tokenizer, load_tokenizer
from dsjax.errors import ConfigError
from dsjax.mesh import batch_shards, make_mesh, named_leaves, zigzag_order
from dsjax.models import ModelSpec, Stages, build
from dsjax.models.adapters import adapt, is_adapter
from dsjax.train.abstract_state import trainable_filter
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
    model = model_of(config, jax.default_backend(), tokenizer.vocab_size)
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
    model = model_of(config, platform, vocab_size)
    return lay_out(_recipe(config, model), config, mesh, **more), model


def model_of(config: Config, platform: str, vocab_size: int | None) -> ModelSpec:
    """The model of a run, whose FLOPs are those of the gradients that it makes."""
    model = build(
        config.model,
        platform=platform,
        vocab_size_hint=vocab_size,
        remat=config.train.remat,
        max_length=config.train.sequence_length,
    )
    if model.family is None or not (config.lora.rank or config.optimizer.trainable):
        return model
    return replace(model, flops_per_token=_with_frozen(config, model))


def abstract_model(model: ModelSpec, lora: LoraConfig) -> nnx.Module:
    """A model with its adapters, without values."""

    def made() -> nnx.Module:
        module = model.init(nnx.Rngs(0))
        adapt(module, lora, jax.random.key(0))
        return module

    return nnx.eval_shape(made)


def _with_frozen(config: Config, model: ModelSpec) -> Callable[[int], float | None]:
    """Model FLOPs a token of a step that makes no gradients of frozen matrices, and of adapters all."""
    params = nnx.state(abstract_model(model, config.lora), nnx.Param)
    trains = trainable_filter(tuple(config.optimizer.trainable), params, bool(config.lora.rank))
    trained, frozen = (named_leaves(tree) for tree in nnx.split_state(params, trains, ...))
    family = model.family
    head = "head/kernel" if "head/kernel" in trained | frozen else "embed/embedding"

    def products(leaves: Mapping[str, Any]) -> float:
        # A token passes the experts that it chose.
        return sum(
            leaf.size * (family.num_experts_per_tok / family.experts if "/experts/" in name else 1)
            for name, leaf in leaves.items() if name.endswith("/kernel") or name == head
        )  # fmt: skip

    share = products(frozen) / (products(trained) + products(frozen))
    adapters = sum(leaf.size for name, leaf in trained.items() if is_adapter(name))
    # Without anything that trains before the last norm there is no way back through the layers.
    through = any(name.split("/")[0] not in ("norm", "head") for name in trained)

    def flops(length: int) -> float | None:
        # Without other tokens to look at, all are of matrices: two for each number, and as many again for its gradient.
        of_matrices = family.flops_per_token(0)
        return family.flops_per_token(length) - share * of_matrices / 3 + 6.0 * adapters if through else None

    return flops


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

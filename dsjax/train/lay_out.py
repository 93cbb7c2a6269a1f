"""From a config's settings to a program on a mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dsjax.config import Config
from dsjax.config.parallel import PipelineConfig
from dsjax.config.precision import PrecisionConfig, StabilityConfig
from dsjax.data.rows import empty_rows
from dsjax.errors import ConfigError
from dsjax.faults import Wrong
from dsjax.mesh import batch_shards
from dsjax.precision import Policy
from dsjax.train.program import Program, Recipe
from dsjax.train.recheck import refuse_stages
from dsjax.train.stacking import refuse_empty_slots
from dsjax.train.stage_costs import Costs, costs_of
from dsjax.train.state import Numbers


def lay_out(
    recipe: Recipe,
    config: Config,
    mesh: jax.sharding.Mesh,
    wrong: tuple[Wrong, ...] = (),
    **more: Any,
) -> Program:
    """The program of a recipe under a config's settings and with faults; `more` are `Program`'s own.

    Raises:
      ConfigError: parameters that do not divide over the mesh, or an optimizer that unused slots would mislead.
    """
    _refuse_delayed(config, mesh)
    train, platform = config.train, mesh.devices.flat[0].platform
    program = Program(
        recipe,
        mesh,
        accumulation=train.gradient_accumulation_steps,
        fsdp_gather=train.fsdp_gather,
        pipeline=_pipeline(config),
        grad_sync=config.grad_sync,
        diloco=config.diloco,
        rows_a_pass=_rows_a_pass(config, mesh),
        costs=_costs(recipe, config, mesh),
        policy=Policy.of(config.precision, platform),
        trainable=tuple(config.optimizer.trainable),
        lora=config.lora,
        max_grad_norm=config.optimizer.max_grad_norm,
        numbers=numbers_of(config, platform, mesh.shape["pipeline"], wrong),
        remat=train.remat if recipe.remat_by_step else "none",
        **more,
    )
    refuse_empty_slots(config.optimizer.kind, program.stacking)
    return program


def numbers_of(config: Config, platform: str, stages: int, wrong: tuple[Wrong, ...]) -> Numbers:
    """How numbers are kept in range."""
    fp16 = Policy.of(config.precision, platform).has_fp16
    stability = config.stability
    if config.diloco.inner_steps:
        _refuse_apart(stability, config.grad_sync.warmup_steps)
    _refuse_narrow(config.precision, config.diloco.inner_steps, stages)
    refuse_stages(stability.check_recompute_every, stages)
    return Numbers(
        params=jnp.dtype(config.precision.params),
        gradients=jnp.dtype(config.precision.gradients),
        loss_scale=config.precision.loss_scale if fp16 else None,
        clip=stability if stability.clip == "median" else None,
        cooled=stability.rollback_learning_rate
        if stability.on_nonfinite == "rollback" and stability.rollback_learning_rate < 1
        else None,
        recompute=stability.on_nonfinite == "recompute",
        wrong=wrong,
    )


def _refuse_delayed(config: Config, mesh: jax.sharding.Mesh) -> None:
    """Refuses scales of passes before where a pipeline's stages hand on no variables of layers."""
    precision = config.precision
    delayed = precision.fp8.scaling == "delayed" and "fp8" in (precision.policy, *precision.table.values())
    if delayed and mesh.shape["pipeline"] > 1:
        raise ConfigError(
            "precision.fp8.scaling: delayed keeps a history in each layer, which the stages of a pipeline do not hand "
            f"on (mesh.pipeline is {mesh.shape['pipeline']}); set it to tensor or block"
        )


def _refuse_apart(stability: StabilityConfig, warmup_steps: int) -> None:
    """Refuses what is of one gradient a step where workers that train apart have one each."""
    wrong = (
        ("clip", stability.clip, "median", "fixed"),
        ("on_nonfinite", stability.on_nonfinite, "recompute", "skip or rollback"),
    )
    faults = [
        f"stability.{name}: {value} is of one gradient a step, and workers that train apart (diloco.inner_steps) have "
        f"one each; set it to {other}"
        for name, value, refused, other in wrong
        if value == refused
    ]
    if warmup_steps:
        faults.append(
            "grad_sync.warmup_steps: workers that train apart (diloco.inner_steps) exchange moves and no gradients; "
            "set it to 0"
        )
    if faults:
        raise ConfigError(faults)


def _refuse_narrow(precision: PrecisionConfig, inner_steps: int, stages: int) -> None:
    """Refuses bf16 where what is small is added up elsewhere than in a step's update."""
    faults = [
        f"precision.{name}: bfloat16 does not go with workers that train apart, whose moves are differences of fp32 "
        f"parameters; set diloco.inner_steps=0, or precision.{name}=float32"
        for name in ("params", "gradients")
        if inner_steps and getattr(precision, name) == "bfloat16"
    ]
    if stages > 1 and precision.gradients == "bfloat16":
        faults.append(
            "precision.gradients: the stages of a pipeline add up in fp32; set mesh.pipeline=1, or "
            "precision.gradients=float32"
        )
    if faults:
        raise ConfigError(faults)


def _pipeline(config: Config) -> PipelineConfig:
    """The pipeline's settings; layers that move would leave slots empty, which adafactor does not bear."""
    if config.optimizer.kind != "adafactor":
        return config.pipeline
    return config.pipeline.model_copy(update={"rebalance_every": 0})


def _rows_a_pass(config: Config, mesh: jax.sharding.Mesh) -> int | None:
    """Rows of a batch shard in a pass of the pipeline; None for a script, whose batches tell."""
    if config.model.kind == "python":
        return None
    parts = batch_shards(mesh) * config.train.gradient_accumulation_steps
    return -(-config.train.global_batch_size // parts)


def _costs(recipe: Recipe, config: Config, mesh: jax.sharding.Mesh) -> Costs | None:
    """What a model's parts cost, if its batches are known to be rows of tokens."""
    if mesh.shape["pipeline"] == 1 or recipe.stages is None or config.model.kind == "python":
        return None
    row = jax.eval_shape(lambda: empty_rows((1, config.train.sequence_length)))
    return costs_of(recipe.stages, recipe.init, row)

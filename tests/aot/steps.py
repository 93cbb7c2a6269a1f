"""The framework's own training step, small, compiled for a target."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax import aot
from dsjax.config import from_dict
from dsjax.config.precision import PrecisionConfig
from dsjax.mesh import BATCH_AXES, make_mesh
from dsjax.models import build
from dsjax.precision import Policy
from dsjax.train.losses import language_model_loss
from dsjax.train.optimizers import make_optimizer, make_schedule
from dsjax.train.program import Program, Recipe

LAYERS, HIDDEN, MLP, VOCABULARY, SEQUENCE, BATCH = 4, 256, 512, 1024, 256, 8
LAYER_MATRICES = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * MLP  # elements of a layer's matrices
MODEL = {
    "kind": "llama", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": MLP, "vocab_size": VOCABULARY,
}  # fmt: skip


def lowered_step(
    target: aot.Target, mesh: dict[str, Any], precision: PrecisionConfig | None = None
) -> tuple[Program, Any, Any]:
    """A Llama's step with full recomputation, by default bf16 on GPUs and fp32 on CPUs: program, batch, lowered."""
    train = {"steps": 10, "global_batch_size": BATCH, "sequence_length": SEQUENCE, "remat": "full"}
    config = from_dict({"model": MODEL, "train": train, "mesh": mesh})
    spec = build(config.model, platform=target.chip.kind, remat="full", max_length=SEQUENCE)
    schedule = make_schedule(config.optimizer.schedule, 3e-4, 10)
    recipe = Recipe(
        spec.init,
        language_model_loss(spec.cross_entropy_chunk),
        lambda names_of: make_optimizer(config.optimizer, schedule, names_of),
        schedule,
        spec.param_axes,
        remat_by_step=False,
    )
    policy = Policy.of(precision or PrecisionConfig(), target.chip.kind)
    program = Program(recipe, make_mesh(config.mesh, target.devices()), policy=policy, max_grad_norm=1.0)
    sharding = NamedSharding(program.mesh, P(None, BATCH_AXES))
    dtypes = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), np.int32)
    batch = {
        name: jax.ShapeDtypeStruct((1, BATCH, SEQUENCE), dtype, sharding=sharding)
        for name, dtype in {**dtypes, "weights": np.float32}.items()
    }
    with aot.on(target):
        return program, batch, program.lower_step(batch)

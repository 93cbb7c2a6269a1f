"""Tiny models on any layout, and what training them gives: the means by which layouts are compared."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from dsjax.checkpoint import DiskCheckpoints, MemorySnapshots
from dsjax.config import from_dict
from dsjax.config.checkpoint import MemoryConfig
from dsjax.mesh import make_mesh, named_leaves
from dsjax.models import build
from dsjax.precision import Policy
from dsjax.train.lay_out import numbers_of
from dsjax.train.losses import language_model_loss, language_model_stages
from dsjax.train.optimizers import make_optimizer, make_schedule
from dsjax.train.program import Program, Recipe
from dsjax.train.resume import restore

AXES = ("pipeline", "data", "fsdp", "context", "expert", "tensor")
STEPS, BATCH, LENGTH, VOCAB = 5, 32, 32, 67
RESTART = 3  # steps after which a run that is to be restarted is
# Five steps move a parameter by half its own size, and yet rounding is not blown up from step to step: at 1e-2
# gradients of one and the same program drifted from 4e-7 of each other at step 1 to 1e-5 at step 5, with nine
# layers and tied embeddings at 3e-3 still to 2e-5; at this rate to 8e-7.
RATE = 1.5e-3
PLAIN: Mapping[str, Any] = {
    "pipeline": (1, "1f1b"), "data": 1, "fsdp": 1, "context": 1, "expert": 1, "tensor": 1,
    "gradient_accumulation_steps": 1, "remat": "none",
    "fsdp_gather": "layer", "rows": "full", "dropout": 0.0, "tied": False, "optimizer": "adamw",
    "window": None, "layers": 5, "exchange": "plain", "restart": "none", "scaled": False,
    "model": "llama", "choices": None, "format": "fp32", "state_dtype": "float32", "on_nonfinite": "skip",
    "held": "none", "clip": "fixed", "lora": "none",
}  # fmt: skip
"""One device, fp32, no tricks."""
EXCHANGES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    # Two levels where `data` spans pairs of near devices, in groups of layers that one layer fills.
    "pairs": {"topology": {"node": 2}, "route": "hierarchical", "overlap": True, "bucket_bytes": 4096},
    "groups": {"overlap": True, "bucket_bytes": 20_000},
    # A codec that begins after the last step: until then all of its ways go dense.
    "warming": {"codec": "topk", "min_size": 0, "dense": [], "warmup_steps": STEPS},
}
FORMATS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"policy": name} for name in ("fp32", "bf16", "fp16")},
    **{f"fp8_{how}": {"policy": "fp8", "fp8": {"scaling": how}} for how in ("tensor", "delayed", "block")},
}
# What is kept in bf16 between and within steps.
HELD: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "params": {"params": "bfloat16"},
    "gradients": {"gradients": "bfloat16"},
    "both": {"params": "bfloat16", "gradients": "bfloat16"},
}
# Adapters; with a large factor, so that five steps show in all gradients. Beside them some of the model may train.
ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "all": {"rank": 3, "alpha": 24.0},
    "some": {"rank": 2, "alpha": 16.0, "dropout": 0.2, "targets": ["*[qonp]_proj"]},
}
COMPUTED = ("model", "rows", "dropout", "tied", "optimizer", "window", "layers", "lora", "choices")


def devices_of(settings: Mapping[str, Any]) -> int:
    """Devices that the axes of (partial) settings make; `tensor` may be a pair, `pipeline` names its schedule."""
    stages = settings.get("pipeline", (1,))[0]
    return stages * int(np.prod([np.prod(settings.get(axis, 1)) for axis in AXES[1:]]))


@dataclass
class Trained:
    """What some steps of training gave: metrics a step, and by name gradients of each step and last parameters."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, np.ndarray]]
    params: dict[str, np.ndarray]


# Where a norm follows a product, what a step changes by counts beside the product's weights: from 0.02 on, rounding
# grew fivefold from step to step (olmo2: 1.7e-6 of a gradient at step 1, 2e-4 at step 5).
WIDE = {"initializer_range": 0.1}
ROUTED = {"router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.01, "router_bias_update_rate": 0.01}
# What a family has besides the sizes of `model_fields`. Mixtures with all that they may add to a loss, and biases that
# move by much. Windows are of some layers where a family can have both.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"max_window_layers": 2},
    "qwen3": {"max_window_layers": 2},
    "gemma2": {**WIDE, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {**WIDE, "sliding_window_pattern": 3, "query_pre_attn_scalar": 8},
    "gpt2": {},
    "olmo2": WIDE,
    "mixtral": {"intermediate_size": 48, "num_local_experts": 8, **ROUTED},
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3, **ROUTED},
    # Where two scores are a rounding apart (a few of 1,024 tokens x 8 layers x 5 steps x all cases), layouts choose
    # other experts: at a step one expert's gradient was off by 4% and all before it by 4e-7. Weights five times as
    # large spread the scores, and make that as much rarer.
    "deepseek_v3": {
        **WIDE, "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 8,
        "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "num_key_value_heads": 8, "head_dim": None,
        "kv_lora_rank": 24, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "router_aux_loss_coef": 0.1,
        "router_bias_update_rate": 0.01,
    },
}  # fmt: skip
WINDOWED = {"llama", "mistral", "mixtral"}
"""Families all of whose layers have the window."""


def model_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A model whose layers and vocabulary do not divide by anything."""
    kind, window, drop = settings["model"], settings["window"], settings["dropout"]
    same = {"kind": kind, "vocab_size": VOCAB, "tie_word_embeddings": settings["tied"]}
    if kind == "gpt2":
        sizes = {"n_embd": 32, "n_layer": settings["layers"], "n_head": 8, "n_positions": LENGTH}
        return {**same, **sizes, "n_inner": 64, "resid_pdrop": drop, "embd_pdrop": drop}
    windows: dict[str, Any] = {"sliding_window": window} if kind in WINDOWED else {}
    if window is not None and kind not in WINDOWED:
        windows = {"sliding_window": window, **({"use_sliding_window": True} if "qwen" in kind else {})}
    return {
        **same, "hidden_size": 32, "num_hidden_layers": settings["layers"], "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 64, "dropout": drop,
        **windows, **MODELS[kind],
        **({"num_experts_per_tok": settings["choices"]} if settings["choices"] else {}),
    }  # fmt: skip


def config_of(settings: Mapping[str, Any]) -> Any:
    """The config of a run with these settings."""
    return from_dict(
        {
            "model": model_fields(settings),
            "train": {
                "steps": STEPS, "global_batch_size": BATCH, "sequence_length": LENGTH, "remat": settings["remat"],
                "gradient_accumulation_steps": settings["gradient_accumulation_steps"],
                "fsdp_gather": settings["fsdp_gather"],
            },
            "optimizer": {
                "kind": settings["optimizer"], "learning_rate": RATE, "eps": 1e-4, "max_grad_norm": 1.0,
                "schedule": {"warmup_steps": 2}, "state_dtype": settings["state_dtype"],
            },
            "lora": ADAPTERS[settings["lora"]],
            "precision": {
                **FORMATS[settings["format"]], **HELD[settings["held"]], "loss_scale": {"initial": 1024.0},
            },
            "stability": {"on_nonfinite": settings["on_nonfinite"], "clip": settings["clip"]},
            "pipeline": pipeline_of(settings["pipeline"][1]),
            "grad_sync": EXCHANGES[settings["exchange"]],
            "mesh": {
                "pipeline": settings["pipeline"][0],
                **{axis: list(s) if isinstance(s := settings[axis], tuple) else s for axis in AXES[1:]},
            },
        }
    )  # fmt: skip


def pipeline_of(schedule: str) -> dict[str, Any]:
    """The pipeline's section; `1f1b_kept` keeps activations instead of computing a stage again."""
    name = schedule.removesuffix("_kept")
    return {"schedule": name, "recompute": name == schedule and name != "zero_bubble"}


def keep_gradients() -> optax.GradientTransformation:
    """An optax transformation whose state is the gradient that it was last given."""
    return optax.GradientTransformation(
        lambda params: optax.TraceState(jax.tree.map(jnp.zeros_like, params)),
        lambda updates, state, params=None: (updates, optax.TraceState(updates)),
    )


class Tuned(Program):
    """A program whose adapters were trained before: B is not zero.

    Beside zeros Adam's first steps are of a gradient's sign: where rounding makes much of a small gradient, B is off by
    as much of itself, and so is the gradient of A, a product with B (olmo2: 3e-5 of it at step 2).
    """

    def _model(self, key: jax.Array, policy: Policy | None = None) -> nnx.Module:
        model = super()._model(key, policy)
        for number, (path, leaf) in enumerate(nnx.to_flat_state(nnx.state(model, nnx.Param))):
            if path[-1] == "lora_b":
                drawn = jax.random.normal(jax.random.fold_in(key, number), leaf.shape, leaf.dtype)
                leaf.set_value(0.02 * drawn)
        return model


def program_of(settings: Mapping[str, Any], devices: Any = None) -> Program:
    """The compiled side of a run with these settings, on the first devices here unless others are given."""
    config = config_of(settings)
    train = config.train
    devices = jax.devices()[: devices_of(settings)] if devices is None else devices
    spec = build(config.model, platform="cpu", vocab_size_hint=VOCAB, remat=train.remat, max_length=LENGTH)
    schedule = make_schedule(config.optimizer.schedule, config.optimizer.learning_rate, train.steps)
    recipe = Recipe(
        init=spec.init,
        loss=language_model_loss(chunk=48),
        make_optimizer=lambda names: optax.chain(
            keep_gradients(), make_optimizer(config.optimizer, schedule, names)
        ),
        schedule=schedule,
        param_axes=spec.param_axes,
        remat_by_step=False,
        stages=language_model_stages(spec.trunk, 48, train.remat),
        after_step=spec.after_step,
    )
    numbers = numbers_of(config, "cpu", settings["pipeline"][0], ())
    if settings["scaled"]:
        numbers = replace(numbers, loss_scale=config.precision.loss_scale)
    parts = settings["data"] * settings["fsdp"] * settings["expert"] * train.gradient_accumulation_steps
    return (Tuned if settings["lora"] != "none" else Program)(
        recipe,
        make_mesh(config.mesh, devices),
        accumulation=train.gradient_accumulation_steps,
        fsdp_gather=train.fsdp_gather,
        pipeline=config.pipeline,
        grad_sync=config.grad_sync,
        rows_a_pass=BATCH // parts,
        max_grad_norm=config.optimizer.max_grad_norm,
        numbers=numbers,
        trainable=("norm/scale", "layers/*_norm/scale") if settings["lora"] == "some" else (),
        lora=config.lora,
        policy=Policy.of(config.precision, "cpu"),
        # How the devices share the work is settled before this level counts; compiling takes half the time.
        compiler_options={"xla_backend_optimization_level": 0},
    )


def batch_of(rows: str, step: int) -> dict[str, np.ndarray]:
    """A batch: `full` rows, `ragged` ones (padding, rows without any weight) or `packed` documents."""
    rng = np.random.default_rng(1000 + step)
    tokens = rng.integers(0, VOCAB, (BATCH, LENGTH + 1), dtype=np.int32)
    segments = np.ones((BATCH, LENGTH), np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (BATCH, LENGTH)).copy()
    weights = np.ones((BATCH, LENGTH), np.float32)
    if rows == "ragged":
        lengths = rng.integers(0, LENGTH + 1, BATCH)
        lengths[:3] = 0
        inside = np.arange(LENGTH) < lengths[:, None]
        segments, weights = segments * inside, weights * inside
    if rows == "packed":
        starts = rng.random((BATCH, LENGTH)) < 0.15
        starts[:, 0] = True
        segments = np.cumsum(starts, axis=1).astype(np.int32)
        first = np.maximum.accumulate(np.where(starts, np.arange(LENGTH), 0), axis=1)
        positions = (np.arange(LENGTH) - first).astype(np.int32)
        weights = np.concatenate([1.0 - starts[:, 1:], np.ones((BATCH, 1))], axis=1).astype(np.float32)
    return {
        "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": segments.astype(np.int32),
        "positions": positions, "weights": weights,
    }  # fmt: skip


def _named(tree: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(jax.device_get(tree)).items()}


def restarted(program: Program, state: Any, tier: str) -> Any:
    """The state as a start finds it that comes after it was saved in a tier."""
    with tempfile.TemporaryDirectory() as name:
        if tier == "disk":
            store: Any = DiskCheckpoints(name)
            store.save(int(state.step), state, program.facts())
        else:
            store = MemorySnapshots(MemoryConfig(path=f"{name}/memory"), name, 1)
            store.prepare(state, 0)
            store.save(int(state.step), state, program.facts())
        store.wait()
        read, _ = restore(program, store)
        store.close()
    return read


def train(settings: Mapping[str, Any]) -> Trained:
    """Trains STEPS steps with these settings."""
    program = program_of(settings)
    state = program.init(seed=3)
    result = Trained([], [], [], {})
    for step in range(STEPS):
        if step == RESTART and settings["restart"] != "none":
            state = restarted(program, state, settings["restart"])
        batch = program.place(batch_of(settings["rows"], step))
        state, metrics = program.step(batch, step + 1)(state, batch, program.votes())
        result.losses.append(float(metrics["loss"]))
        result.norms.append(float(metrics["grad_norm"]))
        result.gradients.append(_named(program.in_order(state.opt_state[0].trace)))
    result.params = _named(program.in_order(state.params))
    jax.clear_caches()  # hundreds of programs, none of which is used again
    return result


@cache
def _on_one_device(**computed: Any) -> Trained:
    return train({**PLAIN, **computed})


def on_one_device(settings: Mapping[str, Any]) -> Trained:
    """The oracle: of the settings those that change what is computed, not how it is laid out."""
    return _on_one_device(**{name: settings[name] for name in COMPUTED})

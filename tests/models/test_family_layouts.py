"""Every family trains through its config on any mesh as on one device, and generates."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import BATCH, LENGTH, VOCAB, batch_of

from dsjax.config import from_dict
from dsjax.mesh import named_leaves
from dsjax.models import FAMILIES
from dsjax.train.assemble import program_for
from dsjax.train.generation import Generator
from dsjax.train.next_tokens import Prompt
from dsjax.train.sampling import Sampling

STEPS, TOLERANCE = 3, 1e-5
LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "fsdp2_context2_tensor2": {"fsdp": 2, "context": 2, "tensor": 2},
    "pipeline2_context2_tensor2": {"pipeline": 2, "context": 2, "tensor": 2},
    "pipeline2_fsdp2_data2": {"pipeline": 2, "fsdp": 2, "data": 2},
}
OF_EXPERTS: dict[str, dict[str, int]] = {
    "expert2_context2_tensor2": {"expert": 2, "context": 2, "tensor": 2},
    "pipeline2_expert4": {"pipeline": 2, "expert": 4},
    "data2_fsdp2_expert2": {"data": 2, "fsdp": 2, "expert": 2},
}
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": VOCAB, "initializer_range": 0.2,
}  # fmt: skip
ROTARY = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
FIELDS: dict[str, dict[str, Any]] = {
    "llama": {**ROTARY, "attention_bias": True, "mlp_bias": True},
    "mistral": {**ROTARY, "sliding_window": 7},
    "qwen2": {**ROTARY, **WINDOWS},
    "qwen3": {**ROTARY, **WINDOWS},
    "gemma2": {
        **ROTARY, "sliding_window": 7, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0,
        "query_pre_attn_scalar": 8,
    },
    "gemma3_text": {**ROTARY, "sliding_window": 7, "sliding_window_pattern": 3, "query_pre_attn_scalar": 8},
    "gpt2": {**SIZES, "embd_pdrop": 0.2, "resid_pdrop": 0.1},
    "olmo2": ROTARY,
    "mixtral": {**ROTARY, "num_local_experts": 4, "router_aux_loss_coef": 0.1},
    "qwen3_moe": {
        **ROTARY, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3, "router_z_loss_coef": 0.01,
    },
    "deepseek_v3": {
        **SIZES, "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 8, "n_group": 4,
        "topk_group": 2, "num_experts_per_tok": 3, "kv_lora_rank": 24, "q_lora_rank": 16, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6, "v_head_dim": 5, "first_k_dense_replace": 1, "num_nextn_predict_layers": 2,
        "router_aux_loss_coef": 0.1,
    },
}  # fmt: skip


def program(family: str, layout: str) -> Any:
    sizes = (LAYOUTS | OF_EXPERTS)[layout]
    config = from_dict(
        {
            "model": {"kind": family, **FIELDS[family]},
            "train": {"steps": STEPS, "global_batch_size": BATCH, "sequence_length": LENGTH},
            "optimizer": {
                "kind": "adamw", "learning_rate": 2e-3, "eps": 1e-3, "schedule": {"warmup_steps": 1},
            },
            "mesh": sizes,
        }
    )  # fmt: skip
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    made, _ = program_for(config, devices)
    made.compiler_options = {"xla_backend_optimization_level": 0}
    return made


def train(family: str, layout: str) -> tuple[list[float], dict[str, np.ndarray], Any, Any]:
    made = program(family, layout)
    state, losses = made.init(seed=3), []
    for step in range(STEPS):
        batch = made.place(batch_of("packed", step))
        state, metrics = made.step(batch)(state, batch, made.votes())
        losses.append(float(metrics["loss"]))
    params = {
        name: np.asarray(leaf)
        for name, leaf in named_leaves(jax.device_get(made.in_order(state.params))).items()
    }
    return losses, params, made, state


@cache
def on_one_device(family: str) -> tuple[list[float], dict[str, np.ndarray], Any, Any]:
    return train(family, "one")


def cases() -> list[Any]:
    """Every family on one of the layouts, in turn, and on all of them where time is not short."""
    found = []
    for i, family in enumerate(FIELDS):
        several = list(OF_EXPERTS if family in ("mixtral", "qwen3_moe", "deepseek_v3") else LAYOUTS)[-3:]
        for layout in several:
            marks = [] if layout == several[i % len(several)] else [pytest.mark.slow]
            found.append(pytest.param(family, layout, marks=marks))
    return found


@pytest.mark.parametrize("family, layout", cases())
def test_a_family_trains_on_a_mesh_as_on_one_device(family: str, layout: str) -> None:
    losses, params, *_ = train(family, layout)
    want_losses, want, *_ = on_one_device(family)
    np.testing.assert_allclose(losses, want_losses, rtol=TOLERANCE)
    for name, value in want.items():
        off = np.max(np.abs(params[name] - value))
        # A bias of keys has no true gradient: what it comes to is rounding alone.
        assert off <= TOLERANCE * max(1e-2, np.max(np.abs(value))), f"{name}: off by {off:.2e}"


@pytest.mark.parametrize("family", FIELDS)
def test_a_family_generates_what_it_finds_likeliest(family: str) -> None:
    _, _, made, state = on_one_device(family)
    prompt = [5, 3, 8, 60]
    found = Generator(made, Sampling(temperature=0)).answers(state, [Prompt(prompt, 4)])
    got = [token for _, token in found if token is not None]
    model = nnx.merge(made.parts.graph, state.params, state.model_state, copy=True)
    model.eval()
    logits = nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray([[*prompt, *got]], jnp.int32))[0]
    assert got == [int(token) for token in jnp.argmax(logits[len(prompt) - 1 : -1], -1)]


def test_these_are_all_families() -> None:
    assert FIELDS.keys() == FAMILIES.keys()

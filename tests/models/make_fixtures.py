"""Makes fixtures/: tiny models of Hugging Face transformers with random weights, and what it computes from them.

Each is a directory as `save_pretrained` writes it (config.json, model.safetensors) and expected.npz beside it: tokens,
logits, and for the first of each family the gradients of the mean next-token cross-entropy.

Run by hand, where torch and transformers are installed (they are not needed to run the tests):

    pip install torch==2.13.0 transformers==5.24.0 && python tests/models/make_fixtures.py [FAMILY...]
"""

from __future__ import annotations

import copy
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

FIXTURES = Path(__file__).parent / "fixtures"
LENGTH = 24
SIZES = {
    "vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24,
    "max_position_embeddings": 32,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 8}
PLAIN = {"rope_type": "default"}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
FULL, NEAR = "full_attention", "sliding_attention"
GPT2 = {"vocab_size": 97, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 40, "attn_pdrop": 0.0}
LATENT = {
    "kv_lora_rank": 24, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 8, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
    "num_key_value_heads": 4,
}  # fmt: skip

# family -> case -> fields besides SIZES; the first case of each has gradients too.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "plain": {"num_key_value_heads": 2, "rms_norm_eps": 1e-3, "head_dim": 6},
        "llama3-tied": {"num_key_value_heads": 1, "rope_parameters": LLAMA3, "tie_word_embeddings": True},
        "linear-biases": {"attention_bias": True, "mlp_bias": True, "rope_parameters": LINEAR},
        "dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": 16, "vocab_size": 128},
        "yarn": {"rope_parameters": YARN, "num_key_value_heads": 2},
    },
    "mistral": {
        "window": {"num_key_value_heads": 1, "sliding_window": 5, "head_dim": 6},
        "whole-tied": {"num_key_value_heads": 4, "sliding_window": None, "tie_word_embeddings": True},
        "yarn": {"num_key_value_heads": 2, "sliding_window": 7, "rope_parameters": YARN},
    },
    "qwen2": {
        "plain": {"num_key_value_heads": 2, "rms_norm_eps": 1e-3, "rope_parameters": {**PLAIN, "rope_theta": 1e6}},
        "windows-tied": {
            "num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
        "types-yarn": {
            "num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 3,
            "layer_types": [NEAR, FULL, NEAR], "rope_parameters": {**YARN, "truncate": False, "beta_fast": 16.0},
        },
    },
    "qwen3": {
        "plain": {"num_key_value_heads": 2, "head_dim": 6},
        "biases-tied": {"num_key_value_heads": 1, "head_dim": 4, "attention_bias": True, "tie_word_embeddings": True},
        "windows": {
            "num_key_value_heads": 4, "head_dim": 10, "use_sliding_window": True, "sliding_window": 4,
            "max_window_layers": 2, "rope_parameters": LINEAR,
        },
    },
    "gemma2": {
        "capped": {
            "num_key_value_heads": 2, "head_dim": 6, "sliding_window": 5, "query_pre_attn_scalar": 13,
            "attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0,
        },
        "plain": {"num_key_value_heads": 1, "head_dim": 4, "sliding_window": 7, "rms_norm_eps": 1e-4},
        "uncapped-untied": {
            "num_key_value_heads": 4, "head_dim": 8, "sliding_window": 4, "tie_word_embeddings": False,
            "attn_logit_softcapping": None, "final_logit_softcapping": None, "layer_types": [FULL, NEAR, NEAR],
            "attention_bias": True, "rope_parameters": LINEAR,
        },
    },
    "gemma3_text": {
        "pattern": {
            "num_key_value_heads": 2, "head_dim": 6, "sliding_window": 5, "sliding_window_pattern": 3,
            "num_hidden_layers": 4, "query_pre_attn_scalar": 9,
        },
        "scaled": {
            "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 6, "layer_types": [FULL, NEAR, FULL],
            "final_logit_softcapping": 2.0,
            "rope_parameters": {FULL: {**LINEAR, "rope_theta": 5e4}, NEAR: {**PLAIN, "rope_theta": 300.0}},
        },
        "near-alone": {"num_key_value_heads": 4, "head_dim": 4, "sliding_window": 4, "tie_word_embeddings": False},
    },
    "gpt2": {
        "plain": {},
        "wide-untied": {"n_inner": 24, "activation_function": "gelu", "tie_word_embeddings": False, "resid_pdrop": 0.0},
        "unscaled": {"scale_attn_weights": False, "layer_norm_epsilon": 1e-3, "activation_function": "relu"},
    },
    "olmo2": {
        "plain": {"num_key_value_heads": 2},
        "tied": {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
        "biases": {"num_key_value_heads": 1, "attention_bias": True, "rms_norm_eps": 1e-3, "rope_parameters": YARN},
    },
    "starcoder2": {
        "plain": {"num_key_value_heads": 2, "sliding_window": 5},
        "no-biases": {"num_key_value_heads": 1, "use_bias": False, "tie_word_embeddings": False},
    },
    "mixtral": {
        "plain": {"num_key_value_heads": 2, "head_dim": 6, "num_local_experts": 4},
        "window-tied": {
            "num_key_value_heads": 1, "sliding_window": 5, "tie_word_embeddings": True, "num_local_experts": 3,
            "num_experts_per_tok": 1, "rope_parameters": LINEAR,
        },
    },
    "qwen3_moe": {
        "plain": {
            "num_key_value_heads": 2, "head_dim": 6, "num_experts": 6, "num_experts_per_tok": 3,
            "moe_intermediate_size": 8,
        },
        "normalised-biases": {
            "num_key_value_heads": 1, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
            "norm_topk_prob": True, "attention_bias": True, "rope_parameters": YARN,
        },
    },
    "deepseek_v3": {
        "plain": {**LATENT, "q_lora_rank": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2},
        "yarn-whole-queries": {
            **LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
            "rope_interleave": False, "norm_topk_prob": False, "attention_bias": True,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
        },
    },
}  # fmt: skip


def drawn(name: str, shape: tuple[int, ...], family: str, rng: np.random.Generator) -> np.ndarray:
    """Weights with which every part of the model tells in its logits."""
    centre, scale = 0.0, 0.3
    if "norm" in name or ".ln_" in name:
        centre, scale = (0.0 if family.startswith("gemma") or name.endswith("bias") else 1.0), 0.1
    return rng.normal(centre, scale, shape).astype(np.float32)


def gradients_of(model: Any) -> dict[str, np.ndarray]:
    """Gradients by the names that a saved model has for their parameters: in memory experts are fused."""
    from safetensors.numpy import load_file

    values = copy.deepcopy(model)
    for own, other in zip(values.parameters(), model.parameters(), strict=True):
        own.data = other.grad
    with tempfile.TemporaryDirectory() as path:
        values.save_pretrained(path)
        return load_file(Path(path) / "model.safetensors")


def make(family: str, case: str, fields: dict[str, Any], gradients: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = GPT2 if family == "gpt2" else SIZES
    config = AutoConfig.for_model(family, **{**sizes, **fields})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    rng = np.random.default_rng(len(family) + len(case))
    with torch.no_grad():
        biases = [(name, value) for name, value in model.named_buffers() if name.endswith("correction_bias")]
        for name, value in [*model.named_parameters(), *biases]:
            value.copy_(torch.tensor(drawn(name, tuple(value.shape), family, rng)))
    # Not the first few: torch gives the vector of a padding token no gradient.
    tokens = torch.tensor(rng.integers(3, config.vocab_size, (2, LENGTH)))
    logits = model(tokens).logits
    saved = {"tokens": tokens.numpy().astype(np.int32), "logits": logits.detach().numpy()}
    if gradients:
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        saved["loss"] = loss.detach().numpy()
        saved |= {f"gradient/{name}": value for name, value in gradients_of(model).items()}
    path = FIXTURES / f"{family}-{case}"
    shutil.rmtree(path, ignore_errors=True)
    model.save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(path / "expected.npz", **saved)
    size = sum(file.stat().st_size for file in path.iterdir())
    print(f"{path.name}: {size / 1024:.0f} KiB, logits up to {np.abs(saved['logits']).max():.2f}")


def main() -> None:
    for family in sys.argv[1:] or CASES:
        for case, fields in CASES[family].items():
            make(family, case, fields, gradients=case == next(iter(CASES[family])))


if __name__ == "__main__":
    main()

"""Makes llama.npz: a tiny Llama's weights and the logits that Hugging Face transformers computes from them.

Run by hand, where torch and transformers are installed (they are not needed to run the tests):

    pip install torch transformers && python tests/models/make_fixtures.py
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
CASES = {
    "default": {},
    "llama3_tied": {"rope_scaling": LLAMA3, "tie_word_embeddings": True},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}},
}
LENGTH = 40


def main() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    draw = np.random.default_rng(0)
    tokens = draw.integers(0, SIZES["vocab_size"], (1, LENGTH))
    saved: dict[str, np.ndarray] = {"tokens": tokens.astype(np.int32)}
    weights: dict[str, torch.Tensor] = {}
    for name, case in CASES.items():
        settings = {**SIZES, **case}
        scaling = dict(settings.pop("rope_scaling", {"rope_type": "default"}))
        scaling["rope_theta"] = settings.pop("rope_theta")
        model = LlamaForCausalLM(
            LlamaConfig(**settings, rope_parameters=scaling, attn_implementation="eager")
        )
        model.eval()
        if not weights:
            for key, value in model.state_dict().items():
                scale = 0.1 if "norm" in key else 0.5
                drawn = draw.normal(1.0 if "norm" in key else 0.0, scale, tuple(value.shape))
                weights[key] = torch.tensor(drawn.astype(np.float16).astype(np.float32))
            saved |= {f"weights/{k}": v.numpy().astype(np.float16) for k, v in weights.items()}
        tied = case.get("tie_word_embeddings")
        head = {"lm_head.weight": weights["model.embed_tokens.weight"]} if tied else {}
        model.load_state_dict({**weights, **head}, strict=True)
        with torch.no_grad():
            saved[f"logits/{name}"] = model(torch.tensor(tokens)).logits[0].numpy()
    saved["cases"] = np.array(json.dumps({name: {**SIZES, **case} for name, case in CASES.items()}))
    path = Path(__file__).parent / "llama.npz"
    np.savez_compressed(path, **saved)
    print(path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()

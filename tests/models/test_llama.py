"""The Llama family against Hugging Face transformers (numbers made by make_fixtures.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsjax.config.schema import ModelConfig
from dsjax.models import build

FIXTURE = dict(np.load(Path(__file__).parent / "llama.npz"))
CASES = json.loads(str(FIXTURE["cases"]))


def hugging_face_weights(name: str) -> np.ndarray:
    return FIXTURE[f"weights/{name}"].astype(np.float32)


def load(model: Any, sizes: dict[str, Any]) -> Any:
    """Puts the fixture's weights into a model."""
    d, h = sizes["hidden_size"], sizes["head_dim"]
    layers = [f"model.layers.{i}" for i in range(sizes["num_hidden_layers"])]

    def stacked(name: str, shape: tuple[int, ...]) -> jnp.ndarray:
        return jnp.stack(
            [hugging_face_weights(f"{layer}.{name}.weight").T.reshape(shape) for layer in layers]
        )

    def padded(weights: np.ndarray) -> np.ndarray:
        # Padding columns hold large numbers: any of them that leaked would be seen.
        return np.pad(
            weights, ((0, model.embed.embedding.shape[0] - len(weights)), (0, 0)), constant_values=50.0
        )

    own = model.layers
    own.attention_norm.scale[...] = stacked("input_layernorm", (d,))
    own.mlp_norm.scale[...] = stacked("post_attention_layernorm", (d,))
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(own.attention, name).kernel[...] = stacked(f"self_attn.{name}", (d, -1, h))
    own.attention.o_proj.kernel[...] = stacked("self_attn.o_proj", (-1, h, d))
    for name in ("gate_proj", "up_proj", "down_proj"):
        kernel = getattr(own.mlp, name).kernel
        kernel[...] = stacked(f"mlp.{name}", kernel.shape[1:])
    model.embed.embedding[...] = jnp.asarray(padded(hugging_face_weights("model.embed_tokens.weight")))
    model.norm.scale[...] = jnp.asarray(hugging_face_weights("model.norm.weight"))
    if model.head is not None:
        model.head.kernel[...] = jnp.asarray(padded(hugging_face_weights("lm_head.weight")).T)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_hugging_face(case: str) -> None:
    fields = CASES[case]
    spec = build(ModelConfig(kind="llama", **fields), platform="cpu", vocab_size_hint=None, remat="none")
    model = load(spec.init(nnx.Rngs(0)), fields)
    logits = jax.jit(lambda tokens: model(tokens))(FIXTURE["tokens"])
    expected = FIXTURE[f"logits/{case}"]
    assert logits.shape == (1, *expected.shape) and logits.dtype == jnp.float32
    # Rounding of a sum grows with its terms, so the error of every logit scales with the largest one. Two
    # fp32 programs that order some 30 dependent sums of about 64 terms differ by 30 * sqrt(64) * 2^-24 =
    # 1.4e-5 of it typically; 1e-4 leaves room for the worst of thousands of entries.
    np.testing.assert_allclose(logits[0], expected, atol=1e-4 * np.abs(expected).max(), rtol=0)

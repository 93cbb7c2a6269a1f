"""Every family against Hugging Face transformers: logits, gradients, weights there and back, configs old and new."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixture import FIXTURES, NAMES, expected, load, spec_of, tensors_of, worst
from flax import nnx

from dsjax.config.schema import ModelConfig
from dsjax.errors import ConfigError
from dsjax.mesh import Layout, is_matrix, make_mesh, named_leaves
from dsjax.models import FAMILIES, build
from dsjax.precision import Policy
from dsjax.train.losses import language_model_loss

WITH_GRADIENTS = [name for name in NAMES if "loss" in expected(name)]


def test_every_family_has_fixtures_and_one_of_gradients() -> None:
    families = [
        json.loads((FIXTURES / name / "config.json").read_text())["model_type"] for name in WITH_GRADIENTS
    ]
    assert sorted(families) == sorted(FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_hugging_face(name: str) -> None:
    model, _ = load(spec_of(name), tensors_of(name))
    want = expected(name)
    logits = nnx.jit(lambda model, tokens: model(tokens))(model, want["tokens"])
    assert logits.shape == want["logits"].shape and logits.dtype == jnp.float32
    assert np.abs(want["logits"]).max() > 1
    assert worst(logits, want["logits"]) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_weights_go_there_and_back_bit_for_bit(name: str) -> None:
    tensors = tensors_of(name)
    spec = spec_of(name)
    model, weights = load(spec, tensors)
    saved = nnx.state(model, nnx.Any(nnx.Param, *spec.family.saved))
    back = weights.to_theirs(named_leaves(jax.device_get(saved)))
    assert back.keys() == tensors.keys()
    for key, value in tensors.items():
        np.testing.assert_array_equal(back[key].view(np.uint32), value.view(np.uint32), err_msg=key)


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_equal_those_of_hugging_face(name: str) -> None:
    """Through the loss that is trained: the chunked cross-entropy."""
    spec, want = spec_of(name), expected(name)
    model, weights = load(spec, tensors_of(name))
    tokens = want["tokens"]
    batch = {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, 1),
        "positions": np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape),
        "segment_ids": np.ones_like(tokens),
        "weights": np.ones(tokens.shape, np.float32) * (np.arange(tokens.shape[1]) < tokens.shape[1] - 1),
    }
    graph, params, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]

    def mean(params: Any) -> jax.Array:
        total, weight, *_ = language_model_loss(chunk=16)(nnx.merge(graph, params, rest, copy=True), batch)
        return total / weight

    loss, gradients = jax.jit(jax.value_and_grad(mean))(params)
    np.testing.assert_allclose(loss, want["loss"], rtol=1e-5)
    others = {path: np.zeros(shape) for path, shape in weights.shapes.items()}
    got = weights.to_theirs({**others, **named_leaves(jax.device_get(gradients))})
    theirs = {
        key.removeprefix("gradient/"): value
        for key, value in want.items()
        if key.startswith("gradient/") and not key.endswith("correction_bias")
    }
    assert {key for key in got if not key.endswith("correction_bias")} == theirs.keys()
    for key, value in theirs.items():
        assert worst(got[key], value) < 5e-4 * max(1e-3, np.abs(value).max()), key


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_every_parameter_has_named_dimensions(name: str) -> None:
    spec = spec_of(name)
    params = nnx.state(nnx.eval_shape(lambda: spec.init(nnx.Rngs(0))), nnx.Param)
    layout = Layout(make_mesh({"fsdp": 8}), spec.param_axes)
    layout.check(params)
    for path, leaf in named_leaves(params).items():
        names = layout.names_of(path)
        assert names is not None and len(names) == len(leaf.shape), path


def older(values: dict[str, Any]) -> dict[str, Any]:
    """A config.json as transformers 4 wrote it."""
    values = dict(values)
    ropes = values.pop("rope_parameters", None)
    if ropes and "full_attention" in ropes:
        values["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
        ropes = ropes["full_attention"]
    if ropes:
        values["rope_theta"] = ropes.pop("rope_theta")
        scaled = ropes["rope_type"] != "default"
        values["rope_scaling"] = ropes if scaled else None
    values["torch_dtype"] = values.pop("dtype")
    return values


@pytest.mark.parametrize("name", NAMES)
def test_configs_of_older_versions_mean_the_same(name: str, tmp_path: Path) -> None:
    values = json.loads((FIXTURES / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(older(values)))
    old, new = build(ModelConfig(config=str(tmp_path)), platform="cpu").family, spec_of(name).family
    assert rotary(old) == rotary(new)
    assert old.frame().kinds == new.frame().kinds and old.shapes() == new.shapes()


def rotary(family: Any) -> Any:
    default = {"rope_theta": None, "rope_type": "default"}
    return [
        (r.head_dim, r.theta, {**default, **dict(r.scaling), "rope_theta": None})
        for r in family.frame().rotary
    ]


def changed(tmp_path: Path, name: str, **fields: Any) -> ModelConfig:
    values = json.loads((FIXTURES / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, **fields}))
    return ModelConfig(config=str(tmp_path))


@pytest.mark.parametrize(
    "name, fields, line",
    [
        (
            "llama-plain",
            {"quantization_config": {"bits": 4}},
            "has quantization_config .* is not supported for llama",
        ),
        ("llama-plain", {"hidden_act": "gelu"}, 'model.hidden_act: takes silu, got "gelu"'),
        ("llama-plain", {"partial_rotary_factor": 0.5}, "has partial_rotary_factor 0.5"),
        ("mistral-window", {"attention_bias": True}, "model.attention_bias: takes false, got true"),
        ("qwen2-plain", {"layer_types": ["full_attention"]}, "names 1 layers, model.num_hidden_layers is 3"),
        ("qwen2-plain", {"layer_types": ["sliding_attention"] * 3}, "no window is set"),
        (
            "qwen3-plain",
            {"layer_types": ["chunked_attention"] * 3},
            "model.layer_types: takes a list of full_att",
        ),
        (
            "gemma2-plain",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention: takes false, got",
        ),
        (
            "gemma3_text-scaled",
            {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping: takes null, got 50",
        ),
        (
            "gemma3_text-scaled",
            {"rope_parameters": {"rope_type": "linear"}},
            "rope_parameters.rope_type: unknown",
        ),
        (
            "gpt2-plain",
            {"attn_pdrop": 0.1},
            "model.attn_pdrop: takes 0, as there is no such dropout here, got 0.1",
        ),
        ("gpt2-plain", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx: takes false, got true"),
        ("gpt2-plain", {"n_head": 5}, "model.n_head: 5 does not divide model.n_embd 16"),
        ("olmo2-plain", {"clip_qkv": 8.0}, "has clip_qkv 8.0"),
        ("qwen2-plain", {"use_mrope": True}, "model.use_mrope: takes false, got true"),
        (
            "gemma2-plain",
            {"sliding_window_size": 8},
            "model.sliding_window_size: 8, and model.sliding_window 7",
        ),
        ("llama-yarn", {"rope_theta": 5.0}, "model.rope_theta: 5, and 300 in the rope parameters"),
        ("deepseek_v3-plain", {"moe_layer_freq": 2}, "model.moe_layer_freq: takes 1"),
        ("deepseek_v3-plain", {"topk_method": "greedy"}, "model.topk_method: takes noaux_tc"),
        ("mixtral-plain", {"router_jitter_noise": 0.1}, "model.router_jitter_noise: takes 0, got 0.1"),
        ("mixtral-plain", {"num_experts_per_tok": 9}, "model.num_experts_per_tok: 9 of 4 experts"),
        (
            "qwen3_moe-plain",
            {"decoder_sparse_step": 2},
            "model.decoder_sparse_step: takes 1: a mixture in every",
        ),
        ("qwen3_moe-plain", {"mlp_only_layers": [0]}, "model.mlp_only_layers: takes an empty list"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    name: str, fields: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=line):
        build(changed(tmp_path, name, **fields), platform="cpu")


def test_the_users_fields_win_over_the_files(tmp_path: Path) -> None:
    config = ModelConfig(config=str(FIXTURES / "gpt2-plain"), num_hidden_layers=5)
    assert config.kind == "gpt2" and build(config, platform="cpu").family.n_layer == 5


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_packed_documents_compute_what_they_compute_alone(name: str) -> None:
    """Rotary or learned, positions begin anew in each."""
    model, _ = load(spec_of(name), tensors_of(name))
    forward = nnx.jit(lambda model, tokens, positions, segments: model(
        tokens, positions_bs=positions, segment_ids_bs=segments
    ))  # fmt: skip
    tokens, first = expected(name)["tokens"][:1], 10
    rest = tokens.shape[1] - first
    places = np.concatenate([np.arange(first), np.arange(rest)])[None]
    segments = np.repeat([1, 2], [first, rest])[None]
    packed = forward(model, tokens, places, segments)
    alone = [
        forward(model, part, np.arange(part.shape[1])[None], np.ones_like(part))
        for part in (tokens[:, :first], tokens[:, first:])
    ]
    assert worst(packed, np.concatenate(alone, 1)) < 1e-4


def test_embeddings_are_scaled_by_what_their_type_makes_of_the_factor() -> None:
    fields = {**json.loads((FIXTURES / "gemma2-plain" / "config.json").read_text()), "hidden_size": 24}
    kept = {name: value for name, value in fields.items() if name in FAMILIES["gemma2"].model_fields}
    spec = build(ModelConfig(kind="gemma2", **kept), platform="cpu")
    model = spec.init(nnx.Rngs(0))
    Policy(jnp.bfloat16).apply(model)
    tokens = jnp.arange(8)[None]
    got = model.embedded(tokens, spec.trunk.where(tokens, None, False))
    row = model.embed.embedding[...][:8].astype(jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got[0], row * jnp.asarray(4.90625, jnp.bfloat16))  # sqrt(24) is 4.89898


def test_biases_of_heads_are_no_matrices() -> None:
    axes = spec_of("qwen2-plain").param_axes
    assert not is_matrix(axes["layers/attention/q_proj/bias"], 3)
    assert not is_matrix(spec_of("olmo2-plain").param_axes["layers/attention/k_norm/scale"], 3)
    assert is_matrix(axes["layers/attention/q_proj/kernel"], 4) and is_matrix(
        axes["layers/mlp/up_proj/kernel"], 3
    )

"""Models by config: families, Hugging Face configs, the user's own; what is refused and in which words."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsjax.config.schema import ModelConfig
from dsjax.errors import ConfigError, InputError
from dsjax.mesh import Layout, make_mesh, named_leaves
from dsjax.models import ModelSpec, build
from dsjax.precision import Policy

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48,
}  # fmt: skip


def llama(hint: int | None = 300, length: int = 16, **fields: Any) -> ModelSpec:
    config = ModelConfig(kind="llama", **{**SIZES, **fields})
    return build(config, platform="cpu", vocab_size_hint=hint, remat="none", max_length=length)


def test_vocabulary_is_the_tokenizers_and_its_padding_is_not_seen() -> None:
    spec = llama()
    model = spec.init(nnx.Rngs(0))
    assert spec.vocab_size == model.vocab_size == 300
    assert model.unembedding().shape == (32, 384)
    assert model(jnp.zeros((1, 4), jnp.int32)).shape == (1, 4, 300)


def test_every_parameter_has_named_dimensions_that_fit() -> None:
    spec = llama()
    params = nnx.state(nnx.eval_shape(lambda: spec.init(nnx.Rngs(0))), nnx.Param)
    layout = Layout(make_mesh({"fsdp": 4, "tensor": 2}), spec.param_axes)
    layout.check(params)
    for path, leaf in named_leaves(params).items():
        names = layout.names_of(path)
        assert names is not None and len(names) == len(leaf.shape), path
    with pytest.raises(ConfigError, match=r"k_proj.*kv_heads, 2.*mesh.tensor 4"):
        Layout(make_mesh({"fsdp": 2, "tensor": 4}), spec.param_axes).check(params)


def test_half_precision_keeps_norms_and_logits_in_fp32() -> None:
    model = llama().init(nnx.Rngs(0))
    Policy(jnp.bfloat16).apply(model)
    tokens = jnp.zeros((1, 4), jnp.int32)
    assert model.hidden(tokens).dtype == jnp.bfloat16
    assert model(tokens).dtype == jnp.float32
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def test_xavier_uniform_draws_by_the_size_of_the_matrix() -> None:
    model = llama(init="xavier_uniform").init(nnx.Rngs(0))
    query = np.asarray(model.layers.attention.q_proj.kernel[...])
    limit = np.sqrt(6 / (32 + 32))
    assert 0.97 * limit < np.abs(query).max() <= limit
    np.testing.assert_allclose(query.std(), limit / np.sqrt(3), rtol=0.05)
    assert not np.allclose(query[0], query[1])


def test_flops_count_each_score_of_a_causal_mask_once() -> None:
    matrices = 2 * (2 * 32 * (32 + 16) + 3 * 32 * 48) + 32 * 300
    scores = 2 * 32 * (1 + 2 + 3 + 4) / 4
    assert llama().flops_per_token(4) == 6 * matrices + 12 * scores
    near = 2 * 32 * (1 + 2 + 2 + 2) / 4
    assert llama(sliding_window=2).flops_per_token(4) == 6 * matrices + 12 * near


@pytest.mark.parametrize(
    "fields, line",
    [
        ({"hiden_size": 8}, "model.hiden_size: unknown key (got 8); did you mean model.hidden_size?"),
        ({"hidden_size": "32"}, 'model.hidden_size: takes an integer >= 1, got "32"'),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "5 does not divide model.hidden_size 32"),
        ({"num_key_value_heads": 3}, "model.num_key_value_heads: 3 does not divide"),
        ({"head_dim": 7}, "model.head_dim: rotary positions need an even number, got 7"),
        ({"hidden_act": "gelu"}, "model.hidden_act: takes silu, got \"gelu\""),
        ({"attention_dropout": 0.1}, "attention_dropout: takes 0, as there is no such dropout here, got 0.1"),
        ({"vocab_size": 100}, "model.vocab_size: 100 is smaller than the tokenizer's 300 tokens"),
        ({"max_position_embeddings": 8}, "train.sequence_length: 16 is more than"),
        ({"rope_scaling": {"rope_type": "magic"}}, "model.rope_scaling.rope_type: takes default, linear"),
        ({"rope_scaling": {"rope_type": "linear"}}, "model.rope_scaling.factor: is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor: takes a number > 0, got -1"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "facto": 1}}, "rope_scaling.facto: unknown key"),
    ],
)  # fmt: skip
def test_impossible_models_are_refused_in_one_line(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        llama(**fields)
    assert len(raised.value.faults) == 1 and line in raised.value.faults[0]


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ConfigError, match=r"model\.hidden_size: is missing; it takes an integer >= 1"):
        build(ModelConfig(kind="llama"), platform="cpu")


def test_an_unknown_family_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="unknown family lama; did you mean llama"):
        build(ModelConfig(kind="lama"), platform="cpu")


def test_a_hugging_face_config_is_read_and_overridden(tmp_path: Path) -> None:
    values = {
        **SIZES,
        "model_type": "llama",
        "vocab_size": 512,
        "dtype": "bfloat16",
        "rope_scaling": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    for path in (tmp_path, tmp_path / "config.json"):
        config = ModelConfig(kind="llama", config=str(path), num_hidden_layers=3)
        spec = build(config, platform="cpu", vocab_size_hint=300)
        assert spec.vocab_size == 512
        assert spec.init(nnx.Rngs(0)).layers.mlp_norm.scale.shape == (3, 32)


def test_a_config_json_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"

    def refused() -> str:
        with pytest.raises((ConfigError, InputError)) as raised:
            build(ModelConfig(kind="llama", config=str(path)), platform="cpu")
        return str(raised.value)

    assert "does not exist" in refused()
    path.write_text("{broken")
    assert "cannot be read as JSON" in refused()
    path.write_text(json.dumps({**SIZES, "model_type": "gpt2"}))
    assert 'has model_type "gpt2", but model.kind is llama' in refused()


# ---- the user's own model -------------------------------------------------------------------------

MODULE = """
from flax import nnx

class Net(nnx.Module):
    def __init__(self, width: int, depth: int = 2, *, rngs):
        if width < 0:
            raise ValueError("no such width")
        self.linear = nnx.Linear(width, width, rngs=rngs)

def by_rngs(width, rngs):
    return Net(width, rngs=rngs)

def by_init(width):
    return lambda rngs: Net(width, rngs=rngs)

def by_mapping(width):
    return {"init": lambda rngs: Net(width, rngs=rngs), "loss": lambda model, batch: (0.0, 1.0),
            "param_axes": {"linear/kernel": ("embed", "mlp")}}

def made(width):
    return Net(width, rngs=nnx.Rngs(0))

def wrong(width):
    return 7

def strange(width):
    return {"init": by_rngs, "lose": 1}

def not_a_module(width, rngs):
    return width

def broken(width):
    return [][width]

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"users_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def users(kind: str, **fields: Any) -> ModelSpec:
    return build(ModelConfig(kind=kind, **fields), platform="cpu", vocab_size_hint=300, max_length=16)


@pytest.mark.parametrize("function", ["by_rngs", "by_init", "by_mapping", "Net"])
def test_a_users_model_is_made_from_the_configs_fields(module: str, function: str) -> None:
    spec = users(f"{module}:{function}", width=6)
    assert spec.init(nnx.Rngs(0)).linear.kernel.shape == (6, 6)
    assert (spec.loss is not None) == (function == "by_mapping") == bool(spec.param_axes)
    assert not spec.has_hidden and not spec.remat_by_layer and spec.flops_per_token(8) is None


@pytest.mark.parametrize(
    "function, fields, line",
    [
        ("by_rng", {"width": 6}, "no function by_rng in .*; did you mean .*:by_rngs"),
        ("number", {}, "int, not a function, number"),
        ("by_init", {"widht": 6}, "model.widht: .* takes no widht; did you mean model.width"),
        ("by_init", {}, "model.width: is missing"),
        ("made", {"width": 6}, "made already; give it an `rngs` parameter"),
        ("wrong", {"width": 6}, r"returned int; it returns a function init\(rngs\)"),
        ("strange", {"width": 6}, "returned lose; it may return init, loss, stages, param_axes"),
        ("not_a_module", {"width": 6}, "made a int, not a flax.nnx.Module"),
        ("broken", {"width": 6}, r"failed at .*users_.*\.py:\d+: IndexError: list index out of range"),
        ("by_rngs", {"width": -1}, r"failed at .*\.py:\d+: ValueError: no such width"),
    ],
)
def test_what_is_wrong_with_a_users_model_is_said(
    module: str, function: str, fields: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError, match=line):
        users(f"{module}:{function}", **fields)


def test_a_module_that_is_not_there_or_does_not_import(module: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no module nowhere_at_all in "):
        users("nowhere_at_all.net:build")
    (tmp_path / f"{module}_b.py").write_text("import also_nowhere\n")
    with pytest.raises(ConfigError, match=r"failed at .*_b.py:1: ModuleNotFoundError: .*also_nowhere"):
        users(f"{module}_b:build")
    (tmp_path / f"{module}_c.py").write_text("def build(:\n")
    with pytest.raises(ConfigError, match=r"failed at .*_c.py:1: SyntaxError"):
        users(f"{module}_c:build")

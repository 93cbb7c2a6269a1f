"""The stack of layers: remat policies, unrolling, compile size and memory, layouts."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from meshes import layout

from dsjax.config.schema import ModelConfig
from dsjax.mesh import use_layout
from dsjax.models import build
from dsjax.models.cross_entropy import linear_cross_entropy
from dsjax.train.losses import language_model_loss

SIZES = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64,
    "vocab_size": 50,
}  # fmt: skip


def tokens(rows: int = 2, length: int = 16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, 50, (rows, length)), jnp.int32)


def loss_of(remat: str, layers: int, platform: str = "cpu", dropout: float = 0.0) -> tuple[Any, Any]:
    """(loss of parameters and tokens, parameters)."""
    config = ModelConfig(kind="llama", num_hidden_layers=layers, dropout=dropout, **SIZES)
    spec = build(config, platform=platform, remat=remat, max_length=16)
    model = spec.init(nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, tokens_bs: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params, rest, copy=True)
        hidden = model.hidden(tokens_bs)
        weights = jnp.ones(tokens_bs.shape)
        return linear_cross_entropy(hidden, model.unembedding(), tokens_bs, weights, vocab_size=50)

    return loss, params


def assert_same(got: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * float(jnp.abs(b).max()), rtol=0)


@cache
def undisturbed() -> Any:
    loss, params = loss_of("none", 3, platform="gpu", dropout=0.2)
    return jax.jit(jax.value_and_grad(loss))(params, tokens())


@pytest.mark.parametrize("remat", ["full", "dots", "every_2", "every_7"])
def test_recomputing_changes_nothing_dropout_included(remat: str) -> None:
    loss, params = loss_of(remat, 3, dropout=0.2)
    assert_same(jax.jit(jax.value_and_grad(loss))(params, tokens()), undisturbed())


def test_unrolled_layers_give_the_same() -> None:
    loss, params = loss_of("none", 3, platform="cpu", dropout=0.2)
    assert "while" not in str(jax.make_jaxpr(loss)(params, tokens()))
    assert_same(jax.jit(jax.value_and_grad(loss))(params, tokens()), undisturbed())


def test_the_program_does_not_grow_with_depth() -> None:
    def lines(layers: int) -> int:
        loss, params = loss_of("none", layers, platform="gpu")
        return jax.jit(jax.grad(loss)).lower(params, tokens()).as_text().count("\n")

    assert lines(12) < 1.02 * lines(3)


def test_layers_drop_different_things_and_nothing_in_evaluation() -> None:
    config = ModelConfig(kind="llama", num_hidden_layers=2, dropout=0.5, **SIZES)
    model = build(config, platform="cpu", max_length=16).init(nnx.Rngs(0))
    keys = jax.random.key_data(model.layers.dropout.rngs.key[...])
    assert not np.array_equal(keys[0], keys[1])
    model.eval()
    np.testing.assert_array_equal(model(tokens()), model(tokens()))
    model.train()
    assert not np.array_equal(model(tokens()), model(tokens()))


def activation_bytes(remat: str) -> int:
    """Temporary bytes of the gradient, nearly all of them activations with so many tokens."""
    loss, params = loss_of(remat, 24, platform="gpu")
    compiled = jax.jit(jax.grad(loss)).lower(params, tokens(32, 64)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_keeping_one_layer_input_in_four_takes_a_quarter_of_the_activations() -> None:
    everything, quarter = activation_bytes("none"), activation_bytes("every_4")
    assert 0.15 < quarter / everything < 0.33


@pytest.mark.parametrize("name", ["data2_fsdp4", "fsdp2_context2_tensor2"])
def test_packed_documents_train_the_same_on_every_mesh(name: str) -> None:
    rows, length = 8, 16
    config = ModelConfig(kind="llama", num_hidden_layers=2, **SIZES)
    spec = build(config, platform="cpu", max_length=length)
    graph, params, rest = nnx.split(spec.init(nnx.Rngs(0)), nnx.Param, ...)
    draw = np.random.default_rng(1)
    cut = draw.integers(1, length, (rows, 1))
    place = np.arange(length)[None].repeat(rows, 0)
    batch = {
        "tokens": tokens(rows, length),
        "targets": jnp.asarray(draw.integers(0, 50, (rows, length)), jnp.int32),
        "weights": jnp.asarray(draw.uniform(size=(rows, length)) > 0.3, jnp.float32),
        "positions": jnp.asarray(np.where(place < cut, place, place - cut), jnp.int32),
        "segment_ids": jnp.asarray(np.where(place < cut, 1, 2), jnp.int32),
    }

    def run(on: Any) -> Any:
        def loss(params: Any, batch: Any) -> jax.Array:
            return language_model_loss(16)(nnx.merge(graph, params, rest, copy=True), batch)[0]

        with use_layout(on):
            places = None if on is None else (None, on.param_shardings(params))
            return jax.device_get(jax.jit(jax.value_and_grad(loss), out_shardings=places)(params, batch))

    on = layout(name, param_axes=spec.param_axes)
    assert_same(run(on), run(None), 3e-6)

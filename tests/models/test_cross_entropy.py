"""The chunked linear cross-entropy against the plain one."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import MESHES, layout

from dsjax.mesh import use_layout
from dsjax.models.cross_entropy import linear_cross_entropy

ROWS, LENGTH, FEATURES, VOCAB, PADDED = 8, 12, 16, 29, 32


@pytest.fixture(scope="module")
def arrays() -> tuple[jax.Array, ...]:
    draw = np.random.default_rng(0)
    weights = draw.uniform(0.5, 2.0, (ROWS, LENGTH)) * (draw.uniform(size=(ROWS, LENGTH)) > 0.3)
    kernel = draw.normal(size=(FEATURES, PADDED))
    kernel[:, VOCAB:] = 50.0  # would be seen at once if it leaked
    return (
        jnp.asarray(draw.normal(size=(ROWS, LENGTH, FEATURES)), jnp.float32),
        jnp.asarray(kernel, jnp.float32),
        jnp.asarray(draw.integers(0, VOCAB, (ROWS, LENGTH)), jnp.int32),
        jnp.asarray(weights, jnp.float32),
    )


def plain(hidden: Any, kernel: Any, targets: Any, weights: Any, cap: Any = None) -> jax.Array:
    logits = (hidden @ kernel)[..., :VOCAB]
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
    return jnp.sum(losses * weights)


def ours(*arrays: Any, chunk: int = 7, cap: float | None = None) -> jax.Array:
    # A factor as of a loss scale: the gradient is made before it is known.
    return 3.0 * linear_cross_entropy(*arrays, vocab_size=VOCAB, chunk=chunk, cap=cap)


def with_gradients(function: Any, arrays: Any) -> Any:
    loss, gradients = jax.jit(jax.value_and_grad(function, (0, 1)))(*arrays)
    return loss, *gradients


def assert_same(got: Any, expected: Any) -> None:
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * float(jnp.abs(b).max()), rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 96, 1000])
def test_loss_and_gradients_equal_the_plain_ones(arrays: Any, chunk: int) -> None:
    expected = with_gradients(lambda *a: 3.0 * plain(*a), arrays)
    assert_same(with_gradients(partial(ours, chunk=chunk), arrays), expected)
    np.testing.assert_allclose(jax.jit(partial(ours, chunk=chunk))(*arrays), expected[0], rtol=1e-6)


@pytest.mark.parametrize("name", [None, *MESHES])
def test_capped_logits_and_their_gradients(arrays: Any, name: str | None) -> None:
    expected = with_gradients(lambda *a: 3.0 * plain(*a, cap=2.5), arrays)
    with use_layout(layout(name) if name else None):
        assert_same(with_gradients(partial(ours, cap=2.5), arrays), expected)
        np.testing.assert_allclose(jax.jit(partial(ours, cap=2.5))(*arrays), expected[0], rtol=1e-6)


@pytest.mark.parametrize("name", MESHES)
def test_every_layout_gives_the_same(arrays: Any, name: str) -> None:
    expected = with_gradients(lambda *a: 3.0 * plain(*a), arrays)
    with use_layout(layout(name)):
        assert_same(with_gradients(ours, arrays), expected)
        np.testing.assert_allclose(jax.jit(ours)(*arrays), expected[0], rtol=1e-6)


def test_rows_that_do_not_divide_over_the_mesh(arrays: Any) -> None:
    hidden, kernel, targets, weights = arrays
    some = (hidden[:3], kernel, targets[:3], weights[:3])
    expected = with_gradients(lambda *a: 3.0 * plain(*a), some)
    with use_layout(layout("data2_fsdp4")):
        assert_same(with_gradients(ours, some), expected)


def test_padding_of_the_vocabulary_gets_no_gradient(arrays: Any) -> None:
    kernel_gradient = with_gradients(ours, arrays)[2]
    assert not np.any(np.asarray(kernel_gradient)[:, VOCAB:])


def test_a_token_without_weight_adds_nothing_whatever_it_holds(arrays: Any) -> None:
    hidden, kernel, targets, weights = arrays
    dead = np.asarray(weights) == 0
    garbage = (
        jnp.where(dead[..., None], jnp.nan, hidden), kernel, jnp.where(dead, 10**6, targets), weights
    )  # fmt: skip
    got, expected = with_gradients(ours, garbage), with_gradients(ours, arrays)
    assert_same(got, expected)


def test_a_target_outside_the_vocabulary_is_seen(arrays: Any) -> None:
    hidden, kernel, targets, weights = arrays
    wrong = targets.at[0, 0].set(VOCAB)
    assert np.isnan(ours(hidden, kernel, wrong, weights.at[0, 0].set(1.0)))


def test_half_precision_sums_in_fp32(arrays: Any) -> None:
    half = (arrays[0].astype(jnp.bfloat16), *arrays[1:])
    got = jax.jit(partial(linear_cross_entropy, vocab_size=VOCAB, dtype=jnp.bfloat16, chunk=7))(*half)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, plain(*arrays), rtol=1e-2)


def test_no_array_of_all_tokens_and_the_vocabulary_exists() -> None:
    tokens, features, vocab, chunk = 1024, 16, 640, 128
    arguments = (
        jax.ShapeDtypeStruct((1, tokens, features), jnp.float32),
        jax.ShapeDtypeStruct((features, vocab), jnp.float32),
        jax.ShapeDtypeStruct((1, tokens), jnp.int32),
        jax.ShapeDtypeStruct((1, tokens), jnp.float32),
    )
    loss = partial(linear_cross_entropy, vocab_size=vocab - 1, chunk=chunk)
    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arguments).compile()
    shapes = [
        [int(n) for n in dims.split(",")] for dims in re.findall(r"\w+\[([\d,]+)\]", compiled.as_text())
    ]
    assert max(np.prod(shape) for shape in shapes) == chunk * vocab
    assert compiled.memory_analysis().temp_size_in_bytes < tokens * vocab * 4


def test_kernel_gradient_is_scattered_over_fsdp_once() -> None:
    """One reduce-scatter of the kernel's gradient, after the loop over chunks and not in it."""
    arguments = (
        jax.ShapeDtypeStruct((8, 16, 32), jnp.float32),
        jax.ShapeDtypeStruct((32, 128), jnp.float32),
        jax.ShapeDtypeStruct((8, 16), jnp.int32),
        jax.ShapeDtypeStruct((8, 16), jnp.float32),
    )
    loss = partial(linear_cross_entropy, vocab_size=128, chunk=4)
    with use_layout(layout("data2_fsdp4")):
        text = jax.jit(jax.grad(loss, 1)).lower(*arguments).compile().as_text()
    assert len(re.findall(r"= \S+ reduce-scatter\(", text)) == 1
    entry = text[text.index("ENTRY") :]
    assert "reduce-scatter(" in entry
    assert not re.findall(r"= \S+ all-gather\(", text)

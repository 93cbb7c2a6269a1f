"""Attention against its definition: masks, segments, odd lengths, layouts, memory."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import MESHES, layout

from dsjax.mesh import use_layout, zigzag_order
from dsjax.models import cudnn_attention
from dsjax.models.attention import attention
from dsjax.models.chunked_attention import Mask, Part

HEADS, KV_HEADS, HEAD_DIM = 4, 4, 8


def inputs(rows: int, length: int, kv_heads: int = KV_HEADS) -> tuple[jax.Array, ...]:
    draw = np.random.default_rng(length)
    shapes = [(rows, length, n, HEAD_DIM) for n in (HEADS, kv_heads, kv_heads, HEADS)]
    return tuple(jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in shapes)


def documents(rows: int, length: int) -> jax.Array:
    """Segment ids of packed documents, ending in padding (0)."""
    draw = np.random.default_rng(7)
    ids = np.sort(draw.integers(1, 5, (rows, length)), 1)
    ids[:, -length // 8 :] = 0
    return jnp.asarray(ids, jnp.int32)


def plain(
    q: Any,
    k: Any,
    v: Any,
    segments: Any = None,
    causal: bool = True,
    window: int | None = None,
    cap: Any = None,
) -> jax.Array:
    """The definition, with the whole score matrix."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    place = np.arange(q.shape[1])
    distance = place[:, None] - place[None]
    seen = np.ones_like(distance, bool)
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= abs(distance) < window
    seen = jnp.asarray(seen)[None]
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None, :])
    scores = jnp.einsum("bsnh,blnh->bnsl", q, k) / math.sqrt(q.shape[-1])
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    p = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), -1)
    return jnp.einsum("bnsl,blnh->bsnh", p, v)


def with_gradients(function: Any, q: Any, k: Any, v: Any, weight: Any) -> tuple[jax.Array, ...]:
    def total(q: Any, k: Any, v: Any) -> tuple[jax.Array, jax.Array]:
        out = function(q, k, v)
        return jnp.sum(out * weight), out

    gradients, out = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(q, k, v)
    return out, *gradients


def assert_same(got: Any, expected: Any, tolerance: float = 2e-6) -> None:
    for a, b, name in zip(got, expected, ("out", "dq", "dk", "dv"), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * (1 + float(jnp.abs(b).max())), rtol=0, err_msg=name)


@pytest.mark.parametrize("length", [1, 300])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "causal, window, cap",
    [(True, None, None), (True, 50, None), (False, None, 0.5), (False, 9, None), (True, 50, 1.5)],
)
def test_chunked_attention_equals_its_definition(
    length: int, packed: bool, causal: bool, window: int | None, cap: float | None
) -> None:
    q, k, v, weight = inputs(2, length, kv_heads=2)
    segments = documents(2, length) if packed else None
    ours = partial(attention, segment_ids_bs=segments, causal=causal, window=window, cap=cap)
    expected = partial(plain, segments=segments, causal=causal, window=window, cap=cap)
    assert_same(with_gradients(ours, q, k, v, weight), with_gradients(expected, q, k, v, weight))


def test_long_sequences_loop_over_chunks_of_shared_keys() -> None:
    q, k, v, weight = inputs(1, 1400, kv_heads=1)
    segments = documents(1, 1400)
    ours = partial(attention, segment_ids_bs=segments, window=700)
    expected = partial(plain, segments=segments, window=700)
    assert_same(with_gradients(ours, q, k, v, weight), with_gradients(expected, q, k, v, weight), 5e-6)


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("zigzag", [True, False])
def test_every_layout_gives_the_same(name: str, zigzag: bool) -> None:
    length = 48
    q, k, v, weight = inputs(8, length)
    segments = documents(8, length)
    expected = with_gradients(partial(plain, segments=segments, window=30), q, k, v, weight)
    ranks = MESHES[name].get("context", 1)
    order = zigzag_order(length, ranks) if zigzag else np.arange(length)
    with use_layout(layout(name)):
        ours = partial(attention, segment_ids_bs=segments[:, order], zigzag=zigzag, window=30)
        got = with_gradients(ours, *(x[:, order] for x in (q, k, v, weight)))
    assert_same([x[:, np.argsort(order)] for x in got], expected)


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_the_kind_of_a_layer_picks_its_window_on_every_layout(name: str, kind: int) -> None:
    length, windows = 48, (30, None, 5)
    q, k, v, weight = inputs(8, length)
    segments = documents(8, length)
    expected = with_gradients(
        partial(plain, segments=segments, window=windows[kind], cap=1.5), q, k, v, weight
    )
    order = zigzag_order(length, MESHES[name].get("context", 1))
    with use_layout(layout(name)):
        ours = partial(attention, segment_ids_bs=segments[:, order], zigzag=True, window=windows, cap=1.5)
        ours = jax.jit(partial(ours, kind=jnp.asarray(kind)))
        got = with_gradients(ours, *(x[:, order] for x in (q, k, v, weight)))
    assert_same([x[:, np.argsort(order)] for x in got], expected)


def test_a_batch_and_length_that_do_not_divide_are_whole_on_each_device() -> None:
    q, k, v, weight = inputs(3, 21)
    expected = with_gradients(plain, q, k, v, weight)
    with use_layout(layout("fsdp2_context4")):
        assert_same(with_gradients(attention, q, k, v, weight), expected)


def temporary_bytes(length: int) -> int:
    q = jax.ShapeDtypeStruct((1, length, 4, 16), jnp.float32)
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def total(q: Any, k: Any, v: Any, segments: Any) -> jax.Array:
        return jnp.sum(attention(q, k, v, segment_ids_bs=segments))

    compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(q, q, q, segments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_grows_with_the_sequence_not_with_its_square() -> None:
    short, long = temporary_bytes(1024), temporary_bytes(4096)
    assert long < 5 * short
    assert long < 4 * 4096 * 4096  # one fp32 head's scores, of four


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rank", [None, 1])
def test_sections_for_cudnn_equal_the_definition(packed: bool, rank: int | None) -> None:
    """The masks that cuDNN gets as a bias, through JAX's own implementation of the same call."""
    length = 64
    q, k, v, weight = inputs(2, length, kv_heads=2)
    segments = documents(2, length) if packed else None
    rows = np.arange(length)
    parts = [Part(0, 0, length)]
    if rank is not None:  # a rank of a zigzag order over two
        parts = [Part(0, 16, 16), Part(16, 32, 16)]
        rows = np.concatenate([np.arange(16, 32), np.arange(32, 48)])

    def ours(q: Any, k: Any, v: Any) -> jax.Array:
        own = None if segments is None else segments[:, rows]
        return cudnn_attention.attend(
            q[:, rows], k, v, own, segments,
            parts=parts, mask=Mask(True, 20), scale=HEAD_DIM**-0.5, chunk=8, implementation="xla",
        )  # fmt: skip

    def expected(q: Any, k: Any, v: Any) -> jax.Array:
        return plain(q, k, v, segments, window=20)[:, rows]

    weight = weight[:, rows]
    assert_same(with_gradients(ours, q, k, v, weight), with_gradients(expected, q, k, v, weight))


def test_cudnn_takes_half_precision_of_even_lengths_only() -> None:
    def fits(dtype: Any, length: int, head_dim: int) -> bool:
        x = jax.ShapeDtypeStruct((1, length, 2, head_dim), dtype)
        return cudnn_attention.fits(x, x, x)

    assert fits(jnp.bfloat16, 64, 128)
    assert not fits(jnp.float32, 64, 128)
    assert not fits(jnp.bfloat16, 63, 128)
    assert not fits(jnp.bfloat16, 64, 256)
    x = jax.ShapeDtypeStruct((1, 30, 2, 64), jnp.bfloat16)
    assert not cudnn_attention.fits(x, x, x, [Part(0, 0, 15), Part(15, 45, 15)])


@pytest.mark.parametrize("window", [20, 21])
def test_cudnn_gets_even_numbers_of_keys(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def seen(q: Any, k: Any, v: Any, **rest: Any) -> jax.Array:
        found.append(k.shape[1])
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", seen)
    q, k, v, _ = inputs(2, 64)
    parts = [Part(0, 0, 64)]
    cudnn_attention.attend(
        q, k, v, documents(2, 64), documents(2, 64), parts=parts, mask=Mask(True, window), scale=1.0, chunk=8
    )
    assert found and all(width % 2 == 0 and width <= window + 8 for width in found)

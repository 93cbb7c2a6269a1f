"""Tokens after tokens that are kept: every family's logits are those of the whole sequence."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixture import NAMES, expected, load, spec_of, tensors_of, worst
from flax import nnx

from dsjax.mesh import Layout, make_mesh, use_layout
from dsjax.models.decoding import attach, cache_shapes, written

CHUNK, PLACES = 8, 40
MESHES = {"fsdp2_tensor2": {"fsdp": 2, "tensor": 2}, "data2_expert2": {"data": 2, "expert": 2}}
MIXTURES = [name for name in NAMES if name.endswith("-plain") and "m" in name and ("mix" in name or "moe" in name)]


@partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def passed(graph: Any, state: Any, caches: Any, tokens: Any, start: Any, counts: Any, frequencies: Any) -> Any:
    model = nnx.merge(graph, state, copy=True)
    attach(model, caches)
    hidden = model.decoded(tokens, start, counts.astype(jnp.int32), frequencies)
    return model.logits(hidden), written(model, caches, start)


def decoded(model: Any, tokens: np.ndarray, prompts: list[int], layout: Layout | None = None) -> np.ndarray:
    """Logits [b, s, V]: prompts of these lengths in chunks, then each row's further tokens one by one."""
    rows, length = tokens.shape
    graph, state = nnx.split(model)
    frequencies = tuple(
        jnp.asarray(np.tile(r.frequencies(length)[0], (rows, 1))) for r in model.frame.rotary
    )
    shapes = cache_shapes(model, rows, PLACES, layout)
    caches = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), shapes)
    found = np.zeros((*tokens.shape, model.vocab_size), np.float32)
    size = np.array(prompts)
    for start in range(0, max(prompts), CHUNK):
        places = start + np.arange(CHUNK)
        counts = places < size[:, None]
        part = np.where(counts, np.pad(tokens, ((0, 0), (0, CHUNK)))[:, start : start + CHUNK], 1)
        logits, caches = passed(graph, state, caches, part, np.full(rows, start), counts, frequencies)
        for row, i in zip(*np.nonzero(counts), strict=True):
            found[row, start + i] = logits[row, i]
    while np.any(size < length):
        counts = size < length
        part = tokens[np.arange(rows), np.minimum(size, length - 1)][:, None]
        logits, caches = passed(graph, state, caches, part, size, counts[:, None], frequencies)
        found[counts, size[counts]] = logits[counts, 0]
        size = size + counts
    return found


def whole(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits of the whole sequence, without a cache."""
    graph, state = nnx.split(model)
    run = jax.jit(
        lambda state: nnx.merge(graph, state, copy=True)(tokens),
        compiler_options={"xla_backend_optimization_level": 0},
    )
    return np.asarray(run(state))


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_tokens_after_kept_ones_are_those_of_the_whole_sequence(name: str) -> None:
    model, _ = load(spec_of(name), tensors_of(name))
    tokens = np.asarray(expected(name)["tokens"])
    tokens = np.concatenate([tokens, tokens[:, ::-1]])[:3]
    want = whole(model, tokens)
    got = decoded(model, tokens, [tokens.shape[1] - 3, 1, 11][: len(tokens)])
    assert worst(got, want) < 1e-5 * np.abs(want).max()

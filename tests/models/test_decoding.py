"""Tokens after tokens that are kept: every family's logits are those of the whole sequence."""

from __future__ import annotations

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
OPTIONS = {"xla_backend_optimization_level": 0}
# Beside one of each family: a window in some layers, in all, with rotary positions of its own; NTK; a single key head.
OTHERS = {"qwen2-windows-tied", "mistral-window", "gemma3_text-pattern", "llama-dynamic"}
MESHES = {
    "fsdp2_tensor2": {"fsdp": 2, "tensor": 2},
    "tensor4": {"tensor": 4},
    "data2_expert2": {"data": 2, "expert": 2},
}


def inputs(name: str, rows: int) -> tuple[Any, np.ndarray, list[int]]:
    """A model, tokens, and how many of each row's are its prompt."""
    model, _ = load(spec_of(name), tensors_of(name))
    model.unroll = False
    tokens = np.asarray(expected(name)["tokens"])
    tokens = np.concatenate([tokens, tokens[:, ::-1]])[:rows]
    return model, tokens, [tokens.shape[1] - 3, 1, 11, 8][: len(tokens)]


def whole(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits of the whole sequence, without a cache."""
    graph, state = nnx.split(model)
    run = jax.jit(lambda state: nnx.merge(graph, state, copy=True)(tokens), compiler_options=OPTIONS)
    return np.asarray(run(state))


def decoded(model: Any, tokens: np.ndarray, prompts: list[int], layout: Layout | None = None) -> np.ndarray:
    """The same with one: prompts of these lengths in chunks, then each row's further tokens one by one."""
    rows, length = tokens.shape
    graph, state = nnx.split(model)

    def passed(state: Any, caches: Any, tokens: Any, start: Any, counts: Any) -> Any:
        model = nnx.merge(graph, state, copy=True)
        attach(model, caches)
        of_rows = tuple(jnp.tile(r.frequencies(length)[0], (rows, 1)) for r in model.frame.rotary)
        hidden = model.decoded(tokens, start, counts.astype(jnp.int32), of_rows)
        return model.logits(hidden), written(model, caches, start)

    run = jax.jit(passed, donate_argnums=1, compiler_options=OPTIONS)
    shapes = cache_shapes(model, rows, PLACES, layout)
    caches = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), shapes)
    found = np.zeros((*tokens.shape, model.vocab_size), np.float32)
    size = np.array(prompts)
    with use_layout(layout):
        for start in range(0, max(prompts), CHUNK):
            counts = start + np.arange(CHUNK) < size[:, None]
            part = np.where(counts, np.pad(tokens, ((0, 0), (0, CHUNK)))[:, start : start + CHUNK], 1)
            logits, caches = run(state, caches, part, np.full(rows, start), counts)
            logits = np.asarray(logits)
            for row, i in zip(*np.nonzero(counts), strict=True):
                found[row, start + i] = logits[row, i]
        while np.any(counts := size < length):
            part = tokens[np.arange(rows), np.minimum(size, length - 1)][:, None]
            logits, caches = run(state, caches, part, size, counts[:, None])
            found[counts, size[counts]] = np.asarray(logits)[counts, 0]
            size = size + counts
    return found


def one_of_each() -> list[Any]:
    families: set[str] = set()
    found = []
    for name in NAMES:
        family = name.partition("-")[0]
        fast = family not in families or name in OTHERS
        families.add(family)
        found.append(pytest.param(name, marks=[] if fast else [pytest.mark.slow]))
    return found


@pytest.mark.parametrize("name", one_of_each())
def test_logits_of_tokens_after_kept_ones_are_those_of_the_whole_sequence(name: str) -> None:
    model, tokens, prompts = inputs(name, 3)
    want = whole(model, tokens)
    assert worst(decoded(model, tokens, prompts), want) < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize(
    "name, mesh",
    [
        ("gemma2-capped", "fsdp2_tensor2"),
        ("deepseek_v3-plain", "fsdp2_tensor2"),
        ("qwen3-windows", "tensor4"),
        ("mixtral-plain", "data2_expert2"),
    ],
)
def test_on_a_mesh_too(name: str, mesh: str) -> None:
    model, tokens, prompts = inputs(name, 4)
    want = whole(model, tokens)
    layout = Layout(make_mesh(MESHES[mesh], jax.devices()[:4]), spec_of(name).param_axes)
    got = decoded(model, tokens, prompts, layout)
    assert worst(got, want) < 1e-5 * np.abs(want).max()

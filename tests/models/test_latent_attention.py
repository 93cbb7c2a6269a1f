"""Latent attention: little is kept of a token, heads are cut all the same; tokens further ahead stay in documents."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fixture import load, spec_of, tensors_of
from flax import nnx
from test_family_layouts import FIELDS

from dsjax.config import from_dict
from dsjax.mesh import Layout, make_mesh, use_layout
from dsjax.models import build
from dsjax.models.decoding import attach, cache_shapes
from dsjax.train.losses import language_model_loss


def test_layers_that_look_ahead_are_saved_after_the_last_layer_and_copies_beside_them_passed_over() -> None:
    spec = build(from_dict({"model": {"kind": "deepseek_v3", **FIELDS["deepseek_v3"]}}).model, platform="cpu")
    weights, rng = spec.family.weights(), np.random.default_rng(0)
    theirs = {name: rng.normal(size=shape).astype(np.float32) for name, shape in weights.tensors.items()}
    for name in (
        "eh_proj.weight",
        "enorm.weight",
        "shared_head.norm.weight",
        "mlp.gate.e_score_correction_bias",
    ):
        assert f"model.layers.3.{name}" in theirs and f"model.layers.4.{name}" in theirs
    copies = {f"model.layers.{i}.embed_tokens.weight": theirs["model.embed_tokens.weight"] for i in (3, 4)}
    ours = weights.from_theirs(
        theirs | copies | {"model.layers.3.shared_head.head.weight": theirs["lm_head.weight"]}
    )
    assert ours["ahead/proj/kernel"].shape == (2, 64, 32)
    np.testing.assert_array_equal(ours["ahead/proj/kernel"][1], theirs["model.layers.4.eh_proj.weight"].T)
    back = weights.to_theirs(ours)
    assert back.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(back[name], value)


def _one_by_one(model: Any, batch: dict[str, np.ndarray], weight: float) -> float:
    """The loss from whole logits: of depth k, token i + 1 + k from states i and the tokens up to i + k."""
    where = model.frame.where(batch["positions"], batch["segment_ids"], False)
    hidden = model.hidden(
        batch["tokens"], positions_bs=batch["positions"], segment_ids_bs=batch["segment_ids"]
    )
    kernel, size = model.unembedding(), batch["tokens"].shape[1]
    depth = model.frame.ahead.count
    ahead = [np.roll(batch["targets"], -k, axis=1) for k in range(depth + 1)]
    states, _, _ = model.further(hidden, jnp.stack(ahead[:depth], -1), where)
    total = 0.0
    for k, x in enumerate([hidden, *states]):
        scores = jax.nn.log_softmax((x @ kernel)[..., : model.vocab_size])
        for row, i in np.ndindex(batch["tokens"].shape):
            inside = i + k < size and batch["segment_ids"][row, i + k] == batch["segment_ids"][row, i]
            if inside and batch["weights"][row, i + k] > 0:
                total -= float(scores[row, i, ahead[k][row, i]]) * (1.0 if k == 0 else weight / depth)
    return total


def test_tokens_further_ahead_count_within_their_document() -> None:
    fields = {**FIELDS["deepseek_v3"], "router_aux_loss_coef": 0.0, "mtp_loss_weight": 0.5}
    spec = build(from_dict({"model": {"kind": "deepseek_v3", **fields}}).model, platform="cpu", max_length=16)
    model = spec.init(nnx.Rngs(1))
    rng = np.random.default_rng(2)
    segments = np.repeat(np.array([[1, 1, 2, 3], [1, 2, 2, 0]], np.int32), 4, axis=1)
    last = np.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    tokens = rng.integers(0, 60, (2, 16)).astype(np.int32)
    batch = {
        "tokens": tokens, "targets": np.roll(tokens, -1, 1), "segment_ids": segments,
        "positions": np.tile(np.arange(16, dtype=np.int32), (2, 1)),
        "weights": ((segments > 0) & ~last).astype(np.float32),
    }  # fmt: skip
    total, weight, extras = language_model_loss(chunk=16)(model, batch)
    np.testing.assert_allclose(float(total), _one_by_one(model, batch, 0.5), rtol=1e-5)
    assert float(weight) == batch["weights"].sum()
    assert float(extras["ahead_loss"][1]) < 2 * float(weight)
    model.eval()
    alone, *_ = language_model_loss(chunk=16)(model, batch)
    assert float(alone) < float(total)


def test_the_absorbed_form_is_cut_over_heads_although_they_share_one_key() -> None:
    model, _ = load(spec_of("deepseek_v3-plain"), tensors_of("deepseek_v3-plain"))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 97, (2, 24)), jnp.int32)
    graph, state = nnx.split(model)
    layout = Layout(make_mesh({"tensor": 4}, jax.devices()[:4]), spec_of("deepseek_v3-plain").param_axes)
    shapes = cache_shapes(model, 2, 40, layout)
    # What is kept of a token does not grow with the heads: a latent vector and one key with positions.
    assert {s.shape[1:] for kept in shapes.values() for s in kept.values()} == {(2, 1, 40, 24 + 4)}

    def hidden(state: Any, caches: Any) -> jax.Array:
        model = nnx.merge(graph, state, copy=True)
        attach(model, caches)
        of_rows = tuple(jnp.tile(r.frequencies(24)[0], (2, 1)) for r in model.frame.rotary)
        return model.decoded(tokens, jnp.zeros((2,), jnp.int32), jnp.ones_like(tokens), of_rows)

    with use_layout(layout):
        compiled = jax.jit(hidden).lower(state, shapes).compile()
    # Scores are of a quarter of the heads on each device: [b, 1, heads, tokens at hand, places and those].
    sizes = {tuple(map(int, s.split(","))) for s in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())}
    scores = [size for size in sizes if size[-2:] == (24, 64)]
    assert scores and all(np.prod(size) <= 2 * 24 * 64 for size in scores), scores

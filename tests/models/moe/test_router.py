"""Choices, gates and losses of routers, against their definitions in numpy."""

from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsjax.models.layers import normal
from dsjax.models.moe.router import (
    LOAD,
    Router,
    RouterBias,
    Routing,
    balance_loss,
    balanced,
    entropy,
    load_of,
    z_loss,
)
from dsjax.models.spec import Tally
from dsjax.models.variables import LayerNumber

B, S, D, E, K = 3, 10, 12, 8, 2


def routed(routing, counts=None, bias=None):
    router = Router(D, routing, init=normal(1.0), rngs=nnx.Rngs(0))
    if bias is not None:
        router.bias[...] = bias
    x = jax.random.normal(jax.random.key(1), (B, S, D))
    return router(x, jnp.ones((B, S)) if counts is None else counts), x, router


def test_softmax_over_the_chosen():
    got, x, router = routed(Routing(E, K))
    logits = np.asarray(x @ router.kernel[...])
    best = np.argsort(-logits, -1)[..., :K]
    assert np.array_equal(np.sort(got.choices), np.sort(best))
    chosen = np.take_along_axis(logits, np.asarray(got.choices), -1)
    np.testing.assert_allclose(got.gates, jax.nn.softmax(chosen, -1), rtol=1e-5)


def test_softmax_over_all():
    got, x, router = routed(Routing(E, K, normalised=False))
    p = np.asarray(jax.nn.softmax(x @ router.kernel[...], -1))
    np.testing.assert_allclose(got.gates, -np.sort(-p, -1)[..., :K], rtol=1e-5)


def test_sigmoid_chooses_by_biased_scores_within_the_best_groups_and_weighs_by_raw_ones():
    bias = jnp.linspace(-0.4, 0.4, E)
    routing = Routing(E, K, "sigmoid", groups=4, kept=2, scale=2.5, biased=True)
    got, x, router = routed(routing, bias=bias)
    s = np.asarray(jax.nn.sigmoid(x @ router.kernel[...]))
    for b in range(B):
        for t in range(S):
            wanted = s[b, t] + np.asarray(bias)
            groups = np.argsort(-wanted.reshape(4, 2).sum(-1))[:2]
            allowed = [e for e in range(E) if e // 2 in groups]
            best = sorted(allowed, key=lambda e: -wanted[e])[:K]
            assert got.choices[b, t].tolist() == best
            raw = s[b, t][best]
            np.testing.assert_allclose(got.gates[b, t], 2.5 * raw / raw.sum(), rtol=1e-5)


def test_the_bias_gets_no_gradient_and_the_kernel_does():
    router = Router(D, Routing(E, K, "sigmoid", biased=True), init=normal(1.0), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (B, S, D))
    grads = nnx.grad(lambda r: jnp.sum(r(x, jnp.ones((B, S))).gates[..., 0]))(router)
    assert float(jnp.max(jnp.abs(grads["kernel"][...]))) > 0


def test_losses_are_sums_over_sequences_and_padding_does_not_count():
    counts = jnp.asarray(np.arange(S) < np.array([[S], [4], [0]]), jnp.float32)
    got, _, _ = routed(Routing(E, K), counts)
    assert (got.choices[counts == 0] == E).all()
    p, logits = np.asarray(got.scores), np.asarray(got.logits)
    want = 0.0
    for b, n in enumerate((S, 4, 0)):
        if n:
            rows = np.bincount(np.asarray(got.choices[b, :n]).ravel(), minlength=E)
            want += n * E * np.sum(rows / n * p[b, :n].mean(0))
    np.testing.assert_allclose(balance_loss(got, counts), want, rtol=1e-5)
    live = np.asarray(counts) > 0
    np.testing.assert_allclose(
        z_loss(got, counts), np.sum(np.log(np.exp(logits).sum(-1))[live] ** 2), rtol=1e-5
    )
    np.testing.assert_allclose(entropy(got, counts), -np.sum((p * np.log(p))[live]), rtol=1e-5)
    parts = [
        balance_loss(jax.tree.map(itemgetter(slice(b, b + 1)), got), counts[b : b + 1]) for b in range(B)
    ]
    np.testing.assert_allclose(balance_loss(got, counts), sum(parts), rtol=1e-6)


def test_even_use_costs_the_number_of_choices_a_token():
    routing = Routing(E, K)
    got, _, _ = routed(routing)
    even = got._replace(wanted=jnp.arange(B * S * K).reshape(B, S, K) % E, scores=jnp.full((B, S, E), 1 / E))
    even = jax.tree.map(lambda a: a[:, :8], even)
    np.testing.assert_allclose(balance_loss(even, jnp.ones((B, 8))), K * B * 8, rtol=1e-6)


def test_capacity_drops_the_later_rows_of_an_expert():
    got, _, _ = routed(Routing(E, K, capacity=1.0))
    most = Routing(E, K, capacity=1.0).most(S)
    assert most == 3
    assert int(load_of(got.choices, E).max()) <= most
    assert int(load_of(got.wanted, E).max()) > most
    kept = got.choices == got.wanted
    assert ((got.choices == E) | kept).all()
    for b in range(B):
        seen = np.zeros(E, int)
        for e, is_kept in zip(np.asarray(got.wanted[b]).ravel(), np.asarray(kept[b]).ravel(), strict=True):
            assert is_kept == (seen[e] < most)
            seen[e] += 1


@pytest.mark.parametrize("groups", [1, 4])
def test_choices_of_a_token_are_different_experts(groups):
    got, _, _ = routed(Routing(E, K, "sigmoid", groups=groups, kept=2))
    assert (got.choices[..., 0] != got.choices[..., 1]).all()


def test_the_bias_moves_towards_experts_with_fewer_rows():
    class Block(nnx.Module):
        def __init__(self):
            self.number = LayerNumber(jnp.asarray([1, 0]))
            self.router = nnx.Module()
            self.router.bias = RouterBias(jnp.zeros((2, 3)))

    state = nnx.state(Block())
    loads = jnp.asarray([[4.0, 1.0, 1.0], [2.0, 2.0, 2.0]])
    after = balanced(1e-3)(state, {LOAD: Tally(loads, jnp.ones(()))})
    np.testing.assert_allclose(after["router"]["bias"][...], [[0, 0, 0], [-1e-3, 1e-3, 1e-3]])
    assert after["number"][...].tolist() == [1, 0]

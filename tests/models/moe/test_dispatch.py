"""Rows to experts and back, against each token's experts computed one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dsjax.mesh import make_mesh
from dsjax.models.moe.dispatch import mixture, plan
from dsjax.models.moe.experts import Network, Weights, block_rows, forward, sorted_rows

D, M, E, K = 16, 24, 8, 2


def weights_of(key, dtype=jnp.float32):
    shapes = ((E, D, M), (E, D, M), (E, M, D))
    keys = jax.random.split(key, 3)
    return Weights(*(jax.random.normal(k, s, dtype) * 0.3 for k, s in zip(keys, shapes, strict=True)))


def one_by_one(x, gates, choices, weights):
    """Every expert of every token; those not chosen weighed with 0."""
    share = jnp.sum(jax.nn.one_hot(choices, E) * gates[..., None], axis=1)
    hidden = jax.nn.silu(jnp.einsum("td,edm->tem", x, weights.gate)) * jnp.einsum(
        "td,edm->tem", x, weights.up
    )
    return jnp.einsum("tem,emd,te->td", hidden, weights.down, share)


def routed(tokens, how, seed=0):
    """x, gates and choices: spread evenly at random, all to one expert, or a third of the tokens nowhere."""
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (tokens, D))
    gates = jax.nn.softmax(jax.random.normal(keys[1], (tokens, K)))
    scores = jax.random.normal(keys[2], (tokens, E))
    if how == "skewed":
        scores = scores.at[:, 5].add(100.0).at[:, 4].add(50.0)
    choices = jax.lax.top_k(scores, K)[1]
    if how == "padded":
        choices = jnp.where((jnp.arange(tokens) % 3 == 0)[:, None], E, choices)
    return x, gates, choices


def loss(function):
    return lambda x, gates, choices, weights: jnp.sum(jnp.sin(function(x, gates, choices, weights)))


def close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * float(jnp.max(jnp.abs(b))))


@pytest.mark.parametrize("how", ["even", "skewed", "padded"])
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_one_device(how, tokens):
    x, gates, choices = routed(tokens, how)
    weights, here = weights_of(jax.random.key(9)), plan(tokens, K, E, 1, 1.25, Network(jax.nn.silu))

    def ours(*args):
        return mixture(*args, here)

    close(jax.jit(ours)(x, gates, choices, weights), one_by_one(x, gates, choices, weights))
    grads = [jax.jit(jax.grad(loss(f), (0, 1, 3)))(x, gates, choices, weights) for f in (ours, one_by_one)]
    close(*grads)


@pytest.mark.parametrize("how", ["even", "skewed", "padded"])
@pytest.mark.parametrize("headroom", [0.3, 1.0, 1.25, 8.0])
@pytest.mark.parametrize("peers", [2, 4])
def test_over_peers(peers, headroom, how):
    mesh = make_mesh({"expert": peers, "fsdp": 1}, jax.devices()[:peers])
    x, gates, choices = routed(40 * peers, how)
    weights, there = weights_of(jax.random.key(9)), plan(40, K, E, peers, headroom, Network(jax.nn.silu))
    ours = jax.shard_map(
        lambda *args: mixture(*args, there),
        mesh=mesh,
        in_specs=P("expert"),
        out_specs=P("expert"),
        check_vma=False,
    )
    close(jax.jit(ours)(x, gates, choices, weights), one_by_one(x, gates, choices, weights))
    grads = [jax.jit(jax.grad(loss(f), (0, 1, 3)))(x, gates, choices, weights) for f in (ours, one_by_one)]
    close(*grads)


def test_memory_does_not_depend_on_the_routing():
    """Room for a round is what the plan says, however many rows one peer gets."""
    there = plan(4096, K, E, 4, 1.25, Network(jax.nn.silu))
    assert there.room == 2560
    assert there.rounds is None


def test_rows_of_no_expert_are_sorted_last():
    rows = sorted_rows(jnp.asarray([2, E, 0, 2, E + 1, 1]), E)
    assert rows.order.tolist() == [2, 5, 0, 3, 1, 4]
    assert rows.edges.tolist() == [0, 1, 2, 4, 4, 4, 4, 4, 4]
    assert rows.places[rows.order].tolist() == list(range(6))


@pytest.mark.parametrize(
    ("rows", "experts", "block"),
    [(1, 8, 1), (100, 8, 100), (8192, 8, 1024), (8192, 32, 512), (1 << 20, 8, 2048)],
)
def test_blocks_are_small_beside_what_an_expert_gets(rows, experts, block):
    assert block_rows(rows, experts) == block


def test_products_are_added_up_in_fp32():
    x = jnp.full((1, D), 1.0, jnp.bfloat16)
    ones = Weights(jnp.ones((1, D, 300)), jnp.ones((1, D, 300)), jnp.full((1, 300, D), 2.0**-8))
    ones = jax.tree.map(lambda w: w.astype(jnp.bfloat16), ones)
    edges = jnp.asarray([0, 1], jnp.int32)
    got = forward(x, jnp.zeros((1,), jnp.int32), edges, 1, ones, Network(jnp.ones_like))[0, 0]
    assert got == 300 * D * 2.0**-8  # in bf16 the sum would stop growing at 256

"""The benchmark of mixtures compares what computes the same, and counts what it moves."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.moe import PEERS, Size, contenders, measured, one_hot, over_ideal, routed
from dsjax.models.layers import normal
from dsjax.models.moe import Mixture, MixtureConfig, Routing

SIZE = Size(PEERS, 64, 16, 24, 8, 2)


def test_cases_have_the_keys_of_the_contract():
    cases = measured(SIZE, 1, rounds=1, steps=1)
    assert [case["dispatch"].partition(",")[0] for case in cases] == ["dense", "dropless", "one-hot"]
    for case in cases:
        assert case.keys() == {"dispatch", "tokens_per_second", "ratio_to_dense", "dispatch_bytes_over_ideal"}
        assert case["tokens_per_second"] > 0


def test_bytes_are_those_of_the_rounds():
    (dropless,) = [c for c in contenders(SIZE, PEERS) if c.name == "dropless"]
    rounds, moving = routed(SIZE, dropless)
    assert 0 < moving < SIZE.tokens * SIZE.choices
    # Room for 1.25 of an even share, five rows for four that must move, and gates beside them.
    assert 1.2 * rounds < over_ideal(SIZE, dropless) < 2.2 * rounds


def test_the_one_hot_form_is_the_same_mixture_where_nothing_is_dropped():
    config = MixtureConfig(16, 24, Routing(2, 1), 1)
    mixture = Mixture(config, init=lambda i, o: normal(0.3), rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 16)), jnp.float32)
    np.testing.assert_allclose(one_hot(mixture, x), mixture(x, None)[0], atol=1e-5)

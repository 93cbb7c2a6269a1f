"""Residuals are what a parameter is owed, wherever and however they lie."""

from __future__ import annotations

import itertools
import json

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dsjax.config.exchange import GradSyncConfig
from dsjax.grad_sync import Exchange, Route, Tensor, make_codec
from dsjax.grad_sync.residuals import exchange_of, facts_of, laid, meaning, regrouped, shapes

TENSORS = {
    "plain": Tensor((6, 10), P(), (), (6,), True),
    "cut": Tensor((6, 10), P("fsdp", "tensor"), (("fsdp", 2), ("tensor", 5)), (3,), True),
    "both": Tensor((3, 8), P(None, ("tensor", "fsdp")), (("tensor", 2), ("fsdp", 2)), (3,), True),
    "groups": Tensor((5, 3, 4), P(None, None, "fsdp"), (("fsdp", 2),), (1, 2, 2), True),
}
ROUTES = [(2,), (2, 3), (2, 2, 3), (1,), (3, 2)]


def exchange_for(parts, **settings):
    config = GradSyncConfig(**{"codec": "int4", "block": 16, **settings})
    return Exchange(Route("", parts), make_codec(config), TENSORS, config)


@pytest.mark.parametrize("codec, path, parts", itertools.product(("int4", "topk"), TENSORS, ROUTES))
def test_meaning_and_laid_are_opposites(codec, path, parts):
    exchange = exchange_for(parts, codec=codec)
    for name, part in shapes(exchange).items():
        groups = parts[-1] if name == "sent" else 1
        numbers = np.random.default_rng(0).normal(size=(groups, *TENSORS[path].shape)).astype(np.float32)
        residual = laid(exchange, name, path, numbers)
        assert residual.shape == part[path].shape
        np.testing.assert_array_equal(meaning(exchange, name, path, residual), numbers)
        # Nothing is owed twice.
        np.testing.assert_allclose(np.asarray(residual).sum(), numbers.sum(), rtol=1e-4)


def test_other_groups_owe_the_same_in_all():
    numbers = np.random.default_rng(0).normal(size=(4, 3, 2)).astype(np.float32)
    assert regrouped(numbers, 4) is numbers
    for groups in (1, 2, 6):
        other = regrouped(numbers, groups)
        assert other.shape == (groups, 3, 2)
        np.testing.assert_allclose(np.asarray(other).sum(0), numbers.sum(0), rtol=1e-5)


def test_facts_say_all_that_is_needed():
    exchange = exchange_for((2, 2))
    again = exchange_of(json.loads(json.dumps(facts_of(exchange))))
    assert jax.tree.map(lambda s: s.shape, shapes(again)) == jax.tree.map(lambda s: s.shape, shapes(exchange))
    numbers = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
    residual = laid(exchange, "sent", "both", numbers)
    np.testing.assert_array_equal(meaning(again, "sent", "both", residual), numbers)
    assert facts_of(exchange_for((2,), error_feedback=False)) is None

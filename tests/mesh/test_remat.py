"""What recomputation of everything but products keeps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax._src.ad_checkpoint import saved_residuals

from dsjax.mesh.remat import PRODUCTS


@pytest.mark.parametrize("rank, kept", [(2, False), (8, False), (9, True), (64, True)])
def test_a_product_much_wider_than_its_input_is_made_again(rank, kept):
    def adapted(x, w, a, b):
        narrow = x @ a
        return jnp.sin(x @ w + (narrow @ b).reshape(5, 8, 8).reshape(5, 64))

    operands = [jnp.ones(shape) for shape in ((5, 64), (64, 64), (64, rank), (rank, 64))]
    saved = saved_residuals(jax.checkpoint(adapted, policy=PRODUCTS), *operands)
    made = [aval.shape for aval, where in saved if "argument" not in where]
    assert (5, rank) in made
    assert made.count((5, 64)) == (2 if kept else 1) + (rank == 64)


def test_products_with_several_inner_dimensions_count_whole():
    def heads(x, w):
        return jnp.sin(jnp.einsum("tnh,nhd->td", x, w))

    saved = saved_residuals(jax.checkpoint(heads, policy=PRODUCTS), jnp.ones((5, 4, 2)), jnp.ones((4, 2, 60)))
    assert (5, 60) in [aval.shape for aval, _ in saved]

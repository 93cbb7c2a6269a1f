"""What recomputation of everything but products keeps."""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

_NAME = "dsjax_product"


def kept(product: jax.Array) -> jax.Array:
    """Marks the result of a product that is not jax's own."""
    return checkpoint_name(product, _NAME)


PRODUCTS = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(_NAME),
)
"""The policy of `jax.checkpoint` that keeps results of products without batch dimensions."""

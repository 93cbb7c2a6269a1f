"""What recomputation of everything but products keeps."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

_NAME = "dsjax_product"
_WITHOUT_BATCHES = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
# Where a result is so many times as wide as what is multiplied, it is made again for a small part of what the other
# products cost, and its input is kept as the result of another product: low-rank adapters, and latent attention's ways
# up, which DeepSeek-V3 makes again too (DeepSeek-AI 2024, 3.2.3).
_WIDER = 8


def kept(product: jax.Array) -> jax.Array:
    """Marks the result of a product that is not jax's own."""
    return checkpoint_name(product, _NAME)


def _products(primitive: Any, *operands: Any, **params: Any) -> Any:
    if not _WITHOUT_BATCHES(primitive, *operands, **params) or len(operands) != 2:
        return False
    rhs = operands[1]
    (_, contracted), _ = params["dimension_numbers"]
    inner = math.prod(rhs.shape[axis] for axis in contracted)
    return _WIDER * inner**2 > math.prod(rhs.shape)


PRODUCTS = jax.checkpoint_policies.save_from_both_policies(
    _products,
    jax.checkpoint_policies.save_only_these_names(_NAME),
)
"""The policy of `jax.checkpoint` that keeps results of products without batch dimensions, but for wide ones."""

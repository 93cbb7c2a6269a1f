"""What a mixture of experts adds to the formulas, where routers spread rows evenly.

Letters in comments: d hidden, m columns of an expert.
"""

from __future__ import annotations

import math

from dsjax.mesh.axes import SHARD_AXES
from dsjax.models.moe.experts import block_rows
from dsjax.plan.laid import Laid
from dsjax.plan.sizes import Sizes

SHARDS = tuple(axis for axis in SHARD_AXES if axis != "expert")
"""Axes over which experts' matrices are gathered where they are used."""
AGAIN = 11 / 9
"""Products that run over those of a forward and a backward: the backward makes two of three again, whatever `remat`."""
TIMES_SENT = 5
"""Rows sent in a layer and microbatch: there and back, and backward with the gradient beside the input."""

# Bytes of memory traffic that products do not cover, as XLA's programs for GPUs have it: of a block for each element of
# a matrix of its expert (gradients written, read and added to), of an expert for the same, of a row for each m and d.
_OF_A_BLOCK, _OF_AN_EXPERT, _OF_M, _OF_D = 40, 45, 60, 130


def used(laid: Laid) -> float:
    """Bytes of a layer's experts that a device computes with."""
    return laid.item * laid.sizes.experts / laid.mesh["expert"] / laid.tensor


def flops_per_token(sizes: Sizes) -> float:
    """Model FLOPs of experts a token, forward and backward."""
    return 18.0 * sizes.layers * sizes.choices * sizes.hidden * sizes.hidden_of_expert * sizes.share


def rows_sent(laid: Laid) -> float:
    """Bytes of a device's rows on their way to their experts, with the room that uneven ones may take."""
    sizes = laid.sizes
    return laid.item * sizes.headroom * sizes.choices * laid.tokens_a_device * sizes.hidden * sizes.share


def moved(laid: Laid) -> float:
    """Bytes of memory traffic of a layer's experts on a device in a microbatch, forward and backward."""
    sizes = laid.sizes
    if not sizes.experts:
        return 0.0
    element, columns = (
        sizes.hidden * sizes.hidden_of_expert / laid.tensor,
        sizes.hidden_of_expert / laid.tensor,
    )
    count = sizes.count // laid.mesh["expert"]
    rows = sizes.choices * laid.tokens_a_device
    block = block_rows(math.ceil(rows * sizes.headroom), count)
    blocks = count * math.ceil(rows / count / block)
    of_matrices = element * (blocks * _OF_A_BLOCK + count * _OF_AN_EXPERT)
    return sizes.share * (of_matrices + rows * (_OF_M * columns + _OF_D * sizes.hidden))


def temporary(laid: Laid) -> float:
    """Bytes that are live in the backward pass of a mixture beside its weights: sums of their gradients, and rows."""
    sizes = laid.sizes
    if not sizes.experts:
        return 0.0
    sums = 4 * sizes.experts / sizes.share / laid.mesh["expert"] / laid.tensor
    rows = sizes.choices * laid.tokens_a_device * (sizes.headroom if laid.mesh["expert"] > 1 else 1)
    # Of each row its input and its gradient, sent and received, and the gradient of its input on its way back.
    return sums + laid.item * rows * 6 * sizes.hidden + 4 * 2 * laid.tokens_a_device * sizes.hidden

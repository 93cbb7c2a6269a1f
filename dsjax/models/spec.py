"""What a trainer needs to know of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flax import nnx


@dataclass(frozen=True)
class ModelSpec:
    """A model that can be made, and what a trainer needs to know of it.

    Attributes:
      init: makes the module from `nnx.Rngs`; may be traced abstractly.
      param_axes: path pattern -> logical names of a parameter's dimensions.
      loss: the model's own ``loss(model, batch) -> (sum, weight[, extras])``; None: the language model's.
      vocab_size: tokens that it knows; None where it is not a language model of ours.
      flops_per_token: sequence length -> model FLOPs a token, forward and backward; None: not known.
      cross_entropy_chunk: tokens of a device whose logits exist at a time.
      has_hidden: it offers `hidden`, `unembedding` and `vocab_size` for the chunked loss.
      remat_by_layer: it recomputes layer by layer itself.
    """

    init: Callable[[nnx.Rngs], nnx.Module]
    param_axes: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any, Any], Any] | None = None
    vocab_size: int | None = None
    flops_per_token: Callable[[int], float | None] = lambda length: None
    cross_entropy_chunk: int = 1024
    has_hidden: bool = False
    remat_by_layer: bool = False

"""What a trainer needs to know of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from flax import nnx

from dsjax.models.variables import Given


class Tally(NamedTuple):
    """An extra whose sum is an array: how often each of several things happened.

    What is told of it is how uneven it is: the largest number of a row (of the last dimension) over the row's mean, of
    the most uneven row, as `NAME_max_over_mean`.
    """

    sum: jax.Array
    weight: jax.Array


@dataclass(frozen=True)
class Stages:
    """A model cut where a pipeline can cut it: before its equal layers, between them, and after them.

    The parts get a microbatch as `prepare` returns it. What a layer knows is its own parameters, its
    input and the microbatch; parameters of the rest of the model belong to `embed` and `head`.

    Attributes:
      embed: ``embed(model, batch) -> x``, the input of the first layer; runs on the first stage.
      layer: ``layer(layer, x, batch) -> x``, or ``(x, loss)`` or ``(x, loss, extras)`` where a layer adds to
        the loss (a sum, not a mean) and to the metrics.
      head: ``head(model, x, batch) -> (sum, weight[, extras])`` from the last layer's output; on the last stage.
      prepare: ``prepare(batch) -> batch``, on every stage: what several parts need (positions, masks).
      layers: path in the model of the module that holds the stacked layers (`dsjax.stacked`).
      remat: what the backward pass computes again of the stack, as in the config.
      gathers: embed and head gather what they use of the parameters over `fsdp` themselves, where they use it.
    """

    embed: Callable[[Any, Any], Any]
    layer: Callable[[Any, Any, Any], Any]
    head: Callable[[Any, Any, Any], Any]
    prepare: Callable[[Any], Any] = lambda batch: batch
    layers: str = "layers"
    remat: str = "none"
    gathers: bool = False


class LayerKind(Given):
    """int32 []: which of a few ways of computing this layer takes, where layers of one stack differ in no shape.

    Stacked like the parameters, so it goes wherever its layer goes. Nothing changes it.
    """


class Where(NamedTuple):
    """What the parts of a decoder need to know of a batch besides their input.

    Attributes:
      ropes: cosine and sine of each kind of rotary positions that the model has.
      segment_ids_bs: int32, a token's document; attention stays within it. None: rows are one document.
      zigzag: the columns lie in `zigzag_order` over the mesh's `context` axis.
      positions_bs: int32, a token's place in its document, where they are looked up in a table; else None.
      start_b: int32, in decoding: a row's tokens before those at hand, of which attention kept what it needs.
    """

    ropes: tuple[Any, ...]
    segment_ids_bs: Any = None
    zigzag: bool = False
    positions_bs: Any = None
    start_b: Any = None


@dataclass(frozen=True)
class Trunk:
    """A language model without its loss, in the pieces that `Stages` is made of.

    Attributes:
      where: ``where(positions_bs, segment_ids_bs, zigzag) -> Any``: what the others need besides their input.
      embed: ``embed(model, tokens_bs, where) -> x_bsd``.
      layer: ``layer(layer, x_bsd, where) -> x_bsd``.
      norm: ``norm(model, x_bsd) -> hidden_bsd``.
      ahead: further tokens that it predicts in training.
    """

    where: Callable[[Any, Any, bool], Any]
    embed: Callable[[Any, Any, Any], Any]
    layer: Callable[[Any, Any, Any], Any]
    norm: Callable[[Any, Any], Any]
    ahead: int = 0


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
      trunk: the pieces of a language model whose layers can be shared out over a pipeline.
      stages: those of a user's model, loss and all.
      family: the config of a model of ours, a `dsjax.models.families.FamilyConfig`; None for a user's.
      after_step: ``after_step(model_state, extras) -> model_state``: variables that are no parameters, changed once an
        optimizer step by the extras of the whole of it; a skipped step changes none.
    """

    init: Callable[[nnx.Rngs], nnx.Module]
    param_axes: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any, Any], Any] | None = None
    vocab_size: int | None = None
    flops_per_token: Callable[[int], float | None] = lambda length: None
    cross_entropy_chunk: int = 1024
    has_hidden: bool = False
    remat_by_layer: bool = False
    trunk: Trunk | None = None
    stages: Stages | None = None
    family: Any = None
    after_step: Callable[[Any, Mapping[str, Any]], Any] | None = None

"""Sizes of a language model of any family, as far as formulas need them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from dsjax.errors import ConfigError
from dsjax.mesh import named_leaves
from dsjax.models import ModelSpec

# Stacks of layers, and where in each a layer stands.
_STACKS = (("layers", ""), ("dense_layers", ""), ("ahead", "block/"))


@dataclass(frozen=True)
class Sizes:
    """Of a model: elements, in the mean over its layers.

    Attributes:
      layers: all of them; stacked: of these those that a pipeline can share out.
      query, key: columns of all query heads; of all key heads, the mean of keys' and values'.
      feed_forward: columns between the matrices of a gated network that all tokens pass (without a gate two thirds
        count: as much lies between two products as between three).
      layer: of a layer's matrices that all tokens pass; experts: of those that some do.
      count: experts of a layer that has some; share: of the layers that do; choices: experts of a token;
        hidden_of_expert: columns of one; headroom: room for rows over what even ones need.
    """

    layers: int
    stacked: int
    hidden: int
    feed_forward: float
    query: float
    key: float
    vocabulary: int
    tied: bool
    layer: float
    experts: float = 0.0
    count: int = 0
    share: float = 0.0
    choices: int = 0
    hidden_of_expert: int = 0
    headroom: float = 1.0


def has_formulas(model: ModelSpec) -> bool:
    """Whether formulas are for such a model: a language model of a family."""
    return model.family is not None


def sizes_of(model: ModelSpec, abstract: nnx.Module) -> Sizes:
    """The sizes of a model.

    Args:
      abstract: the model, without values.

    Raises:
      ConfigError: a model of no family.
    """
    family = model.family
    if family is None:
        raise ConfigError("model.kind: there are formulas for families of models only; your own are compiled")
    shapes = {name: leaf.shape for name, leaf in named_leaves(nnx.state(abstract, nnx.Param)).items()}
    stacks = [_Stack(shapes, f"{name}/{inner}") for name, inner in _STACKS]
    stacks = [stack for stack in stacks if stack.depth]
    layers = sum(stack.depth for stack in stacks)

    def mean(name: str) -> float:
        return sum(stack.depth * getattr(stack, name) for stack in stacks) / layers

    rows, hidden = shapes["embed/embedding"]
    experts = mean("experts")
    mixture: dict[str, Any] = {}
    if experts:
        mixture = {
            "count": family.experts, "choices": family.num_experts_per_tok,
            "share": sum(stack.depth for stack in stacks if stack.experts) / layers,
            "hidden_of_expert": family.expert_columns, "headroom": family.expert_headroom,
        }  # fmt: skip
    return Sizes(
        layers=layers, stacked=stacks[0].depth, hidden=hidden, feed_forward=mean("feed_forward"),
        query=mean("query"), key=mean("key"), vocabulary=rows, tied=family.tie_word_embeddings,
        layer=mean("layer"), experts=experts, **mixture,
    )  # fmt: skip


class _Stack:
    """Layers of one shape, from the shapes of their parameters."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], prefix: str):
        found = {name.removeprefix(prefix): s for name, s in shapes.items() if name.startswith(prefix)}
        kernels = {name.removesuffix("/kernel"): s for name, s in found.items() if name.endswith("/kernel")}
        self.depth = next(iter(kernels.values()))[0] if kernels else 0
        if not kernels:
            return
        inner = {name: shape[1:] for name, shape in kernels.items()}
        self.experts = sum(math.prod(s) for name, s in inner.items() if name.startswith("mlp/experts/"))
        self.layer = sum(math.prod(s) for s in inner.values()) - self.experts
        self.query = math.prod(inner["attention/q_proj"][1:])
        if "attention/k_proj" in inner:
            self.key: float = math.prod(inner["attention/k_proj"][1:])
        else:  # made of latent vectors: keys as wide as queries, values as what goes into the last product
            self.key = (self.query + math.prod(inner["attention/o_proj"][:-1])) / 2
        gated = inner.get("mlp/gate_proj", inner.get("mlp/shared/gate_proj"))
        plain = inner.get("mlp/up_proj")
        self.feed_forward = gated[-1] if gated else 2 / 3 * plain[-1] if plain else 0.0

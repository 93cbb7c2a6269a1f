"""Memory of a Llama's step by formulas, without compiling: to prune a search, and where nothing compiles.

Memory is a count of the arrays that XLA's reports (`--xla_dump_to`: live ranges, buffer assignment) show in
its heap at the fullest moment, by their shapes (docs/plan.md says how near that comes).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from dsjax.aot import Target
from dsjax.config import Config
from dsjax.errors import ConfigError
from dsjax.mesh import AXES, BATCH_AXES, Layout, named_leaves
from dsjax.mesh.axes import SHARD_AXES
from dsjax.models import ModelSpec, build
from dsjax.plan.compiled import check_mesh, memory_limit
from dsjax.plan.result import MemoryUse
from dsjax.precision import compute_dtype
from dsjax.train.assemble import check_batch
from dsjax.train.memory import bytes_a_device
from dsjax.train.optimizers import make_optimizer, make_schedule, optimizer_shardings

# Sections of queries in packed attention; section i of n sees i / n of the keys.
_SECTIONS = 8
_BATCH_BYTES = 20  # a token: four int32 and one float32


@dataclass(frozen=True)
class Sizes:
    """Of a Llama: elements. `query` and `key` are heads times their dimension."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    tied: bool

    @property
    def query(self) -> int:
        """Columns of all query heads."""
        return self.heads * self.head

    @property
    def key(self) -> int:
        """Columns of all key heads."""
        return self.kv_heads * self.head

    @property
    def layer(self) -> int:
        """Elements of a layer's matrices."""
        attention = 2 * self.hidden * (self.query + self.key)
        return attention + 3 * self.hidden * self.feed_forward


@dataclass(frozen=True)
class Laid:
    """A run on the axes of a cluster, without devices.

    Attributes:
      state: bytes a device of parameters, and of optimizer state.
    """

    config: Config
    target: Target
    mesh: Mapping[str, int]
    model: ModelSpec
    sizes: Sizes
    state: tuple[int, int]

    def with_config(self, config: Config) -> Laid:
        """The same with another section `train` that leaves the parameters where they lie."""
        return replace(self, config=config)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.config.train.global_batch_size * self.config.train.sequence_length

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return self.config.train.gradient_accumulation_steps

    @property
    def tokens_a_device(self) -> float:
        """Tokens of a microbatch whose activations one device holds."""
        shards = math.prod(self.mesh[axis] for axis in (*BATCH_AXES, "context"))
        return self.tokens / self.microbatches / shards

    @property
    def tensor(self) -> int:
        """Parts into which the products of a layer are cut."""
        return self.mesh["tensor"] * self.mesh["tensor_rows"]

    @property
    def shards(self) -> int:
        """Parts of a parameter that are gathered where it is used."""
        return math.prod(self.mesh[axis] for axis in SHARD_AXES)

    @property
    def item(self) -> int:
        """Bytes of an element in the type of matrix products."""
        return int(np.dtype(compute_dtype(self.config.precision.policy, self.target.chip.kind)).itemsize)


def lay_out(config: Config, target: Target, vocab_size: int | None) -> Laid:
    """A run on a target, as far as formulas need it.

    Raises:
      ConfigError: a mesh or parameters that do not fit the target, or a model that is no Llama.
    """
    mesh = check_mesh(config, target)
    model = build(
        config.model,
        platform=target.chip.kind,
        vocab_size_hint=vocab_size,
        remat=config.train.remat,
        max_length=config.train.sequence_length,
    )
    abstract = AbstractMesh(tuple(mesh[axis] for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    check_batch(config, abstract)  # type: ignore[arg-type]  # of a mesh only the shape is asked
    layout: Any = Layout(abstract, model.param_axes)  # type: ignore[arg-type]
    params = nnx.state(nnx.eval_shape(lambda: model.init(nnx.Rngs(0))), nnx.Param)
    layout.check(params)
    return Laid(config, target, mesh, model, _sizes(params), _state_bytes(config, layout, params))


def _sizes(params: Any) -> Sizes:
    shapes = {name: leaf.shape for name, leaf in named_leaves(params).items()}
    try:
        layers, hidden, heads, head = shapes["layers/attention/q_proj/kernel"]
        feed_forward = shapes["layers/mlp/gate_proj/kernel"][-1]
        kv_heads = shapes["layers/attention/k_proj/kernel"][-2]
        vocabulary = shapes["embed/embedding"][0]
    except KeyError:
        raise ConfigError(
            "model.kind: there are formulas for the Llama family only; other models are compiled"
        ) from None
    return Sizes(layers, hidden, feed_forward, heads, kv_heads, head, vocabulary, "head/kernel" not in shapes)


def _state_bytes(config: Config, layout: Any, params: Any) -> tuple[int, int]:
    schedule = make_schedule(config.optimizer.schedule, config.optimizer.learning_rate, config.train.steps)
    optimizer = make_optimizer(config.optimizer, schedule, layout.names_of)
    shardings = layout.param_shardings(params)
    moments = jax.eval_shape(optimizer.init, params)
    fallback = Layout(layout.mesh)
    places = optimizer_shardings(
        moments, params, shardings, lambda shape: NamedSharding(layout.mesh, fallback.param_spec("", shape))
    )

    def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return (
        bytes_a_device(jax.tree.map(placed, params, shardings)),
        bytes_a_device(jax.tree.map(placed, moments, places)),
    )


# ---- memory ----------------------------------------------------------------------------------


def memory(laid: Laid) -> MemoryUse:
    """Bytes of a device: the state, the batch, and XLA's heap when it is fullest, in the head or in a layer."""
    parameters, optimizer = laid.state
    temporary = _kept(laid) + _gradients(laid) + max(_in_the_head(laid), _in_a_layer(laid))
    batch = int(_BATCH_BYTES * laid.tokens_a_device * laid.microbatches)
    total = int(parameters + optimizer + batch + temporary)
    return MemoryUse(
        parameters=parameters,
        gradients=min(parameters, int(temporary)),
        optimizer=optimizer,
        activations=max(0, int(temporary) - parameters),
        batch=batch,
        other=0,
        total=total,
        capacity=laid.target.chip.memory.bytes,
        limit=memory_limit(laid.target),
    )


def _kept(laid: Laid) -> float:
    """Bytes that the forward pass keeps for the backward pass, over all layers."""
    sizes, remat = laid.sizes, laid.config.train.remat
    if remat == "none":
        return sizes.layers * _kept_of_a_layer(laid)
    a_token = laid.item * laid.tokens_a_device / laid.tensor
    if remat == "dots":
        products = sizes.query + 2 * sizes.key + 2 * sizes.feed_forward
        # Layer and attention outputs; over `tensor` one of them twice, while XLA turns the stack of all layers' round.
        outputs = (2 if laid.mesh["tensor"] == 1 else 3) * sizes.hidden
        return sizes.layers * a_token * (outputs + products)
    return math.ceil(sizes.layers / _group(laid)) * a_token * sizes.hidden


def _group(laid: Laid) -> int:
    """Layers that are computed again together."""
    remat = laid.config.train.remat
    return min(int(remat.removeprefix("every_")), laid.sizes.layers) if remat.startswith("every_") else 1


def _kept_of_a_layer(laid: Laid) -> float:
    """Bytes that a layer keeps where nothing is computed again; its matrices, as they were gathered, are among them."""
    sizes, item = laid.sizes, laid.item
    # Norms keep their input and their result before the scale in fp32, and their output; over `tensor` that is whole
    # sequences, in two orders while XLA turns the stack of all layers' round.
    norms = 4 * 4 * sizes.hidden
    outputs = 2 * sizes.hidden * (1 if laid.mesh["tensor"] == 1 else 2 * laid.mesh["tensor"])
    products = 6 * sizes.feed_forward + 3 * sizes.query + 2 * sizes.key
    return (laid.tokens_a_device * (norms + item * (outputs + products)) + item * sizes.layer) / laid.tensor


def _kept_in_a_group(laid: Laid) -> float:
    """Bytes that a layer keeps while its group's backward pass runs: less, as its elementwise parts are made again."""
    sizes, whole = laid.sizes, laid.mesh["tensor"]
    products = 3 * sizes.feed_forward + 2 * (sizes.query + sizes.key)
    activations = laid.tokens_a_device * ((2 + 2 * whole) * sizes.hidden + products)
    return laid.item * (activations + sizes.layer) / laid.tensor


def _gradients(laid: Laid) -> float:
    """Bytes of gradients in their places, from the first layer on (XLA makes the zeros early), and of their sums."""
    sizes, cut = laid.sizes, laid.shards * laid.tensor
    found = 4 * sizes.layers * sizes.layer / cut
    if laid.shards > 1 and laid.config.train.remat != "none":
        # The down and output projections once more, with the dimension first along which they are gathered.
        found += 4 * sizes.layers * sizes.hidden * (sizes.feed_forward + sizes.query) / cut
    return found + (laid.state[0] if laid.microbatches > 1 else 0)


def _in_the_head(laid: Laid) -> float:
    """Bytes that are live beside those in the loss's loop over chunks of tokens, just before the backward pass."""
    sizes, item, tokens = laid.sizes, laid.item, laid.tokens_a_device
    chunk = tokens / math.ceil(tokens / laid.model.cross_entropy_chunk)
    columns = sizes.vocabulary / laid.tensor
    # The gradient of the head in fp32, before and after a chunk's is added, and the head gathered.
    head = (2 * 4 + item) * sizes.hidden * columns
    logits = (4 + item) * chunk * columns
    # What the last layer's backward pass has asked for already: its matrices and activations.
    activations = 5 * sizes.hidden + 2 * (sizes.query + sizes.key)
    return head + logits + item * (sizes.layer + tokens * activations) / laid.tensor


def _in_a_layer(laid: Laid) -> float:
    """Bytes that are live beside those in the backward pass of a layer, or of a group of them."""
    sizes, item, tensor = laid.sizes, laid.item, laid.tensor
    ends = 4 * (1 if sizes.tied else 2) * sizes.hidden * sizes.vocabulary / (tensor * laid.shards)
    # This layer's matrices gathered, and the gradients of the one before on their way to their places.
    matrices = 2 * item * sizes.layer / tensor
    # Either the feed-forward is at work, or attention: every section's keys and values, or their gradients,
    # whole over `context`, and the values once more.
    seen = 1 + (_SECTIONS + 1) * laid.mesh["context"]
    feed_forward = 5 * sizes.hidden + 3 * sizes.query + 2 * sizes.key
    attention = 4 * sizes.hidden + 2 * sizes.query + seen * sizes.key
    # Gate, up, and their gradients; the first two are kept anyway unless all is computed again.
    gates = 4 if laid.config.train.remat == "full" else 2
    activations = (gates * sizes.feed_forward + max(feed_forward, attention)) / tensor
    if laid.mesh["tensor"] > 1:
        # Whole sequences: the products' input and the gradient of their output, each in two orders; the gradients of
        # queries', keys' and values' input, and their sum.
        activations += 8 * sizes.hidden / laid.mesh["tensor_rows"]
    found = ends + matrices + item * laid.tokens_a_device * activations
    if laid.config.train.remat.startswith("every_"):
        found += _group(laid) * _kept_in_a_group(laid)
    return found

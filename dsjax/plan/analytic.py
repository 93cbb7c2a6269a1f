"""Memory and time of a Llama's step by formulas, without compiling: to prune a search, and where nothing compiles.

Memory is what XLA's heap was seen to hold at its fullest; the factors were fitted to layouts compiled
for H100s (docs/plan.md says how near they come).
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
from dsjax.aot.collectives import ring_bytes
from dsjax.config import Config
from dsjax.errors import ConfigError
from dsjax.mesh import AXES, BATCH_AXES, Layout, named_leaves
from dsjax.models import ModelSpec, build
from dsjax.plan.compiled import check_mesh, memory_limit
from dsjax.plan.cost import Reached, link_seconds
from dsjax.plan.result import Flops, Forecast, MemoryUse, Plan, Roofline, Traffic
from dsjax.plan.settings import settings_of, with_money
from dsjax.precision import compute_dtype
from dsjax.train.assemble import check_batch
from dsjax.train.memory import bytes_a_device
from dsjax.train.optimizers import make_optimizer, make_schedule, optimizer_shardings

# What is live at the fullest moment beside the activations kept for the backward pass, in units of: fp32
# gradients in their places, the head in fp32 (its gradient, its gathered self), one layer's gathered
# matrices, one layer's feed-forward and residual activations.
_GRADIENTS, _HEAD, _LAYER, _ACTIVATIONS = 0.68, 1.65, 5.2, 8.0
# What several microbatches add: XLA keeps a second copy of what the forward pass keeps, and of the head.
_KEPT_AGAIN, _HEAD_AGAIN = 0.88, 2.7
# Passes over a layer's residual and feed-forward activations outside of matrix products.
_PASSES = 38
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
    """Bytes of a device."""
    sizes, tensor, item = laid.sizes, laid.mesh["tensor"], laid.item
    parameters, optimizer = laid.state
    tokens = laid.tokens_a_device
    head = 4 * sizes.hidden * sizes.vocabulary / tensor
    layer = item * sizes.layer / tensor
    beside = item * tokens * (sizes.feed_forward / tensor + sizes.hidden)
    several = laid.microbatches > 1
    kept = _kept(laid) * (1 + _KEPT_AGAIN * several)
    heads = (_HEAD + _HEAD_AGAIN * several) * head
    temporary = kept + _GRADIENTS * parameters + heads + _LAYER * layer + _ACTIVATIONS * beside
    batch = int(_BATCH_BYTES * tokens * laid.microbatches)
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
    """Bytes that the forward pass keeps for the backward pass."""
    sizes, tensor, remat = laid.sizes, laid.mesh["tensor"], laid.config.train.remat
    a_token = laid.item * laid.tokens_a_device
    layer_input = a_token * sizes.hidden
    if remat == "full":
        return sizes.layers * layer_input
    if remat == "dots":
        cut = (sizes.query + 2 * sizes.key + 2 * sizes.feed_forward) / tensor
        return sizes.layers * a_token * (3 * sizes.hidden + cut)
    cut = (6 * sizes.feed_forward + 2 * sizes.query + 2 * sizes.key) / tensor
    everything = a_token * (10 * sizes.hidden + cut) + laid.item * sizes.layer / tensor
    if remat == "none":
        return sizes.layers * everything
    several = min(int(remat.removeprefix("every_")), sizes.layers)
    copied = 4 * sizes.layers * sizes.layer / (tensor * laid.mesh["fsdp"])
    return math.ceil(sizes.layers / several) * layer_input + several * everything + copied


# ---- time ------------------------------------------------------------------------------------


def compute_seconds(laid: Laid, reached: Reached) -> tuple[float, float, float]:
    """Seconds of products and of memory traffic, and FLOPs, of a step on one device."""
    sizes, chip, tensor = laid.sizes, laid.target.chip, laid.mesh["tensor"]
    again = {"none": 1.0, "dots": 1.05}.get(laid.config.train.remat, 4 / 3)
    each = laid.model.flops_per_token(laid.config.train.sequence_length) or 0.0
    flops = each * laid.tokens * again / laid.target.size
    passes = _PASSES * sizes.layers * laid.item * laid.tokens_a_device * laid.microbatches
    moved = passes * (sizes.hidden + sizes.feed_forward / tensor) + 2 * sum(laid.state)
    dtype = {2: "bf16", 4: "fp32"}[laid.item]
    return flops / chip.flops(dtype) / reached.products, moved / chip.memory.bandwidth / reached.memory, flops


def traffic(laid: Laid) -> tuple[Traffic, ...]:
    """What is sent in a step: gathers of parameters, sums of gradients, of activations, of keys."""
    sizes, mesh, item = laid.sizes, laid.mesh, laid.item
    tensor, micro, depth = mesh["tensor"], laid.microbatches, sizes.layers
    layer = item * sizes.layer / tensor
    ends = item * sizes.hidden * sizes.vocabulary * (1 if sizes.tied else 2) / tensor
    again = 0 if laid.config.train.remat == "none" else 1
    hidden = item * laid.tokens_a_device * sizes.hidden
    keys = 2 * item * laid.tokens_a_device * sizes.key / tensor * mesh["context"]
    found = []

    def add(kind: str, axis: str, times: float, size: float) -> None:
        if mesh[axis] > 1:
            found.append(_sent(laid, kind, axis, round(times), size))

    add("all-gather", "fsdp", micro * depth * (1 + again), layer)
    add("all-gather", "fsdp", micro, ends)
    add("reduce-scatter", "fsdp", micro * depth, layer)
    add("reduce-scatter", "fsdp", micro, ends)
    add("all-reduce", "data", micro * depth, layer / mesh["fsdp"])
    add("all-reduce", "data", micro, ends / mesh["fsdp"])
    add("all-reduce", "tensor", micro * depth * (4 + 2 * again), hidden)
    add("all-gather", "context", micro * depth * (1 + again), keys)
    add("reduce-scatter", "context", micro * depth, keys)
    add("all-reduce", "context", micro * depth, layer / mesh["fsdp"])
    return tuple(found)


def _sent(laid: Laid, kind: str, axis: str, times: int, size: float) -> Traffic:
    members = laid.mesh[axis]
    together = _together(laid.target, laid.mesh, axis)
    crosses = together < members
    wire = ring_bytes(kind, members, int(size), int(size))
    chip = laid.target.chip
    return Traffic(
        kind=kind,
        axes=(axis,),
        link=(chip.network if crosses else chip.node).name,
        crosses=crosses,
        dtype={2: "bf16", 4: "f32"}[laid.item],
        sent=times * wire,
        times=times,
        loop=(),
        seconds=times * link_seconds(laid.target, kind, wire, members, together),
        hidden=0.0,
    )


def _together(target: Target, mesh: Mapping[str, int], axis: str) -> int:
    """The most devices of a group along an axis that one node holds."""
    places = np.arange(target.size).reshape([mesh[a] for a in AXES])
    group = places[tuple(slice(None) if a == axis else 0 for a in AXES)]
    return int(np.bincount(group // target.domain).max())


def forecast(laid: Laid) -> Forecast:
    """The predicted time of a step: sums over `tensor` wait, everything else runs beside the layers."""
    reached = Reached()
    products, moved, _ = compute_seconds(laid, reached)
    compute = products + moved
    sent = traffic(laid)
    waits = sum(t.seconds for t in sent if t.axes == ("tensor",)) / reached.links
    beside = sum(t.seconds for t in sent if t.axes != ("tensor",)) / reached.links
    exposed = waits + max(0.0, beside - compute)
    return Forecast(step_seconds=compute + exposed, compute_seconds=compute, exposed_seconds=exposed)


def estimate(
    config: Config, target: Target, vocab_size: int | None, tokens: float | None, reason: str
) -> Plan:
    """A plan without compiling.

    Args:
      reason: why nothing was compiled, for the notes.

    Raises:
      ConfigError: a mesh that does not fit the target, or a model that there are no formulas for.
    """
    return plan_of(lay_out(config, target, vocab_size), tokens, reason)


def plan_of(laid: Laid, tokens: float | None, reason: str) -> Plan:
    """The plan of a run that was laid out, by formulas."""
    products, moved, _ = compute_seconds(laid, Reached(1.0, 1.0, 1.0))
    sent = traffic(laid)
    each = laid.model.flops_per_token(laid.config.train.sequence_length)
    flops = each * laid.tokens if each else None
    return Plan(
        target=laid.target.name,
        devices=laid.target.size,
        compiled=False,
        mesh={axis: size for axis, size in laid.mesh.items() if size > 1},
        settings=settings_of(laid.config),
        memory=memory(laid),
        traffic=tuple(sorted(sent, key=lambda t: -t.seconds)),
        hidden_share=None,
        flops=Flops(flops, None),
        roofline=Roofline(
            compute=products,
            memory=moved,
            node=sum(t.seconds for t in sent if not t.crosses),
            network=sum(t.seconds for t in sent if t.crosses),
        ),
        forecast=with_money(
            forecast(laid), laid.target, {2: "bf16", 4: "fp32"}[laid.item], flops, laid.tokens, tokens
        ),
        compile_seconds=0.0,
        notes=(f"NOT COMPILED, estimated by formulas: {reason}",),
    )

"""A run laid out on a cluster without devices, as far as formulas need it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from dsjax.aot import Target
from dsjax.config import Config
from dsjax.data.rows import empty_rows
from dsjax.grad_sync import Exchange, make_exchange
from dsjax.mesh import AXES, BATCH_AXES, Layout, batch_shards, named_leaves
from dsjax.mesh.axes import SHARD_AXES
from dsjax.mesh.layout import axes_of_entry
from dsjax.models import ModelSpec, Stages
from dsjax.models.adapters import adapter_axes, is_adapter
from dsjax.plan.compiled import check_mesh
from dsjax.plan.sizes import Sizes, sizes_of
from dsjax.precision import compute_dtype
from dsjax.train.abstract_state import trainable_filter
from dsjax.train.assemble import abstract_model, check_batch, model_of
from dsjax.train.diloco import refuse_pipeline
from dsjax.train.formats import held_params
from dsjax.train.losses import language_model_stages
from dsjax.train.memory import bytes_a_device
from dsjax.train.optimizers import make_optimizer, make_schedule, optimizer_shardings
from dsjax.train.stacking import Stack, Stacking, microbatches_of, refuse_empty_slots, stacking_of
from dsjax.train.stage_costs import Costs, costs_of
from dsjax.train.state import Numbers


@dataclass(frozen=True)
class Trained:
    """What of a model trains.

    Attributes:
      numbers: of a device, that have a gradient.
      layers: parameters of layers that do, adapters among them, over those that the model has without adapters.
      ends: of embedding and head, those that do over all.
    """

    numbers: int
    layers: float
    ends: float


@dataclass(frozen=True)
class Laid:
    """A run on the axes of a cluster, without devices.

    Attributes:
      mesh: axis -> size.
      state: bytes a device of parameters, and of optimizer state.
      trained: which of them train.
      abstract: the model, without values.
      stacking: how stages share its layers; None where there is one stage.
      exchange: of gradients over `data`; None: there is one replica.
    """

    config: Config
    target: Target
    mesh: Mapping[str, int]
    model: ModelSpec
    sizes: Sizes
    state: tuple[int, int]
    trained: Trained
    abstract: nnx.Module
    stacking: Stacking | None
    exchange: Exchange | None

    def with_config(self, config: Config) -> Laid:
        """The same with other settings that leave the parameters where they lie.

        Raises:
          ConfigError: a schedule that cannot be run so.
        """
        stacking = _stacking(config, self.model, self.abstract, abstract_mesh(self.mesh))
        return replace(self, config=config, stacking=stacking)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.config.train.global_batch_size * self.config.train.sequence_length

    @property
    def forward_flops(self) -> float:
        """FLOPs a token of the model's forward pass."""
        return self.model.family.flops_per_token(self.config.train.sequence_length) / 3

    @property
    def updated(self) -> float:
        """Bytes of state that an update reads and writes."""
        held = 2 if self.config.precision.params == "bfloat16" else 4
        return 2.0 * (min(self.state[0], held * self.trained.numbers) + self.state[1])

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        passes = self.config.train.gradient_accumulation_steps
        return passes * (self.stacking.pipelining.work.schedule.microbatches if self.stacking else 1)

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
    def layer(self) -> float:
        """Elements of a layer's matrices and experts, of all devices."""
        return self.sizes.layer + self.sizes.experts

    @property
    def layer_used(self) -> float:
        """Elements of a layer's matrices as the devices that share its products have them together: whole, but of
        experts their part along `expert`."""
        return self.sizes.layer + self.sizes.experts / self.mesh["expert"]

    @property
    def kept(self) -> int:
        """Bytes of a device that error feedback and workers that train apart keep."""
        if self.exchange is None:
            return 0
        residuals = sum(
            4 * sum(self.exchange.kept(name, tensor))
            for name in self.exchange.keeps
            for tensor in self.exchange.tensors.values()
            if tensor.coded
        )
        return residuals + (2 * self.state[0] if self.config.diloco.inner_steps else 0)

    @property
    def ends_gathered_over_tensor(self) -> bool:
        """Whether embedding or head are cut over stages and `tensor` along one dimension."""
        over = abstract_mesh(self.mesh)
        layout: Any = Layout(
            over, self.model.param_axes, stacked=self.stacking.path if self.stacking else None
        )
        shape = (self.sizes.vocabulary, self.sizes.hidden)
        return any(
            {"pipeline", "tensor"} <= set(axes_of_entry(e))
            for e in layout.param_spec("embed/embedding", shape)
        )

    @property
    def item(self) -> int:
        """Bytes of an element in the type of matrix products."""
        return int(np.dtype(compute_dtype(self.config.precision.policy, self.target.chip.kind)).itemsize)

    @property
    def gradient_item(self) -> int:
        """Bytes of an element of a matrix's gradient as it is summed."""
        return int(np.dtype(self.config.precision.gradients).itemsize)

    @property
    def dtype(self) -> str:
        """The type of matrix products, as HLO names it."""
        name = np.dtype(compute_dtype(self.config.precision.policy, self.target.chip.kind)).name
        return {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[name]


def lay_out(config: Config, target: Target, vocab_size: int | None) -> Laid:
    """A run on a target, as far as formulas need it.

    Raises:
      ConfigError: a mesh or parameters that do not fit the target, or a model of no family.
    """
    mesh = check_mesh(config, target)
    model = model_of(config, target.chip.kind, vocab_size)
    over = abstract_mesh(mesh)
    refuse_pipeline(config.diloco, mesh["pipeline"])
    check_batch(config, over)
    abstract = abstract_model(model, config.lora)
    params = nnx.state(abstract, nnx.Param)
    sizes = sizes_of(model, abstract)
    stacking = _stacking(config, model, abstract, over)
    layout: Any = Layout(over, model.param_axes, stacked=stacking.path if stacking else None)
    if config.lora.rank:
        layout = replace(layout, param_axes={**adapter_axes(abstract, layout.names_of), **layout.param_axes})
    layout.check(params)
    if stacking:
        stack = Stack(stacking.path, frozenset(named_leaves(params)))
        order = np.arange(stacking.partition.layers)
        params = jax.eval_shape(lambda params: stack.moved(params, order, stacking.slots), params)
    trains = trainable_filter(tuple(config.optimizer.trainable), params, bool(config.lora.rank))
    params, frozen = nnx.split_state(params, trains, ...)
    recomputes = config.train.remat == "full" or config.grad_sync.overlap
    groups = "layers" if recomputes and not stacking else None
    exchange, _ = make_exchange(config.grad_sync, layout, params, groups, target.topology)
    return Laid(
        config, target, mesh, model, sizes, _state_bytes(config, layout, params, frozen),
        _trained(layout, params, frozen), abstract, stacking, exchange,
    )  # fmt: skip


def abstract_mesh(mesh: Mapping[str, int]) -> Any:
    """A mesh without devices, for what asks no more of one than its shape."""
    return AbstractMesh(tuple(mesh[axis] for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _stacking(config: Config, model: ModelSpec, abstract: nnx.Module, mesh: Any) -> Stacking | None:
    if mesh.shape["pipeline"] == 1 or model.trunk is None:
        return None
    stages = language_model_stages(model.trunk, model.cross_entropy_chunk, config.train.remat)
    rows = config.train.global_batch_size // (batch_shards(mesh) * config.train.gradient_accumulation_steps)
    microbatches = microbatches_of(config.pipeline, mesh.shape["pipeline"], rows)
    costs = _costs(config, model, stages)
    stacking = stacking_of(stages, abstract, mesh, config.pipeline, microbatches, costs)
    refuse_empty_slots(config.optimizer.kind, stacking)
    return stacking


# Of the last model that was asked about: a search lays the same one out hundreds of times.
_known_costs: dict[str, Costs | None] = {}


def _costs(config: Config, model: ModelSpec, stages: Stages) -> Costs | None:
    key = f"{config.model.model_dump_json()} {model.vocab_size} {config.train.sequence_length}"
    if key not in _known_costs:
        _known_costs.clear()
        row = jax.eval_shape(lambda: empty_rows((1, config.train.sequence_length)))
        _known_costs[key] = costs_of(stages, model.init, row)
    return _known_costs[key]


def _trained(layout: Any, params: Any, frozen: Any) -> Trained:
    """What of a model trains, from its parameters that do and those that do not."""
    numbers = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, np.int8, sharding=place),
        params, layout.param_shardings(params),
    )  # fmt: skip
    trained, held = ({n: leaf.size for n, leaf in named_leaves(tree).items()} for tree in (params, frozen))

    def share(of: Callable[[str], bool]) -> float:
        own = sum(size for name, size in (trained | held).items() if of(name) and not is_adapter(name))
        return sum(size for name, size in trained.items() if of(name)) / own

    ends = {"embed/embedding", "head/kernel"}
    return Trained(bytes_a_device(numbers), share(lambda n: n not in ends), share(lambda n: n in ends))


def _state_bytes(config: Config, layout: Any, params: Any, frozen: Any) -> tuple[int, int]:
    schedule = make_schedule(config.optimizer.schedule, config.optimizer.learning_rate, config.train.steps)
    optimizer = make_optimizer(config.optimizer, schedule, layout.names_of)
    shardings, of_frozen = layout.param_shardings(params), layout.param_shardings(frozen)
    moments = jax.eval_shape(optimizer.init, params)
    fallback = Layout(layout.mesh)
    places = optimizer_shardings(
        moments, params, shardings, lambda shape: NamedSharding(layout.mesh, fallback.param_spec("", shape))
    )

    numbers = Numbers(params=np.dtype(config.precision.params))
    held, still = (jax.eval_shape(partial(held_params, layout, numbers), tree) for tree in (params, frozen))

    def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return (
        bytes_a_device([jax.tree.map(placed, held, shardings), jax.tree.map(placed, still, of_frozen)]),
        bytes_a_device(jax.tree.map(placed, moments, places)),
    )

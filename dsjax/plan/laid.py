"""A run laid out on a cluster without devices, as far as formulas need it."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
from dsjax.errors import ConfigError
from dsjax.grad_sync import Exchange, make_exchange
from dsjax.mesh import AXES, BATCH_AXES, Layout, batch_shards, named_leaves
from dsjax.mesh.axes import SHARD_AXES
from dsjax.mesh.layout import axes_of_entry
from dsjax.models import ModelSpec, Stages, build
from dsjax.plan.compiled import check_mesh
from dsjax.plan.sizes import Sizes, sizes_of
from dsjax.precision import compute_dtype
from dsjax.train.assemble import check_batch
from dsjax.train.diloco import refuse_pipeline
from dsjax.train.formats import held_params
from dsjax.train.losses import language_model_stages
from dsjax.train.memory import bytes_a_device
from dsjax.train.optimizers import make_optimizer, make_schedule, optimizer_shardings
from dsjax.train.stacking import Stack, Stacking, microbatches_of, refuse_empty_slots, stacking_of
from dsjax.train.stage_costs import Costs, costs_of
from dsjax.train.state import Numbers


@dataclass(frozen=True)
class Laid:
    """A run on the axes of a cluster, without devices.

    Attributes:
      mesh: axis -> size.
      state: bytes a device of parameters, and of optimizer state.
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
    if config.lora.rank:
        raise ConfigError(
            "lora.rank: formulas count all parameters as trained; a plan of a run with adapters has to be compiled "
            "(pip install 'dsjax[aot]'), one layout at a time"
        )
    mesh = check_mesh(config, target)
    model = build(
        config.model,
        platform=target.chip.kind,
        vocab_size_hint=vocab_size,
        remat=config.train.remat,
        max_length=config.train.sequence_length,
    )
    over = abstract_mesh(mesh)
    refuse_pipeline(config.diloco, mesh["pipeline"])
    check_batch(config, over)
    abstract = nnx.eval_shape(lambda: model.init(nnx.Rngs(0)))
    params = nnx.state(abstract, nnx.Param)
    sizes = sizes_of(model, abstract)
    stacking = _stacking(config, model, abstract, over)
    layout: Any = Layout(over, model.param_axes, stacked=stacking.path if stacking else None)
    layout.check(params)
    if stacking:
        stack = Stack(stacking.path, frozenset(named_leaves(params)))
        order = np.arange(stacking.partition.layers)
        params = jax.eval_shape(lambda params: stack.moved(params, order, stacking.slots), params)
    recomputes = config.train.remat == "full" or config.grad_sync.overlap
    groups = "layers" if recomputes and not stacking else None
    exchange, _ = make_exchange(config.grad_sync, layout, params, groups, target.topology)
    return Laid(
        config, target, mesh, model, sizes, _state_bytes(config, layout, params), abstract, stacking, exchange
    )


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


def _state_bytes(config: Config, layout: Any, params: Any) -> tuple[int, int]:
    schedule = make_schedule(config.optimizer.schedule, config.optimizer.learning_rate, config.train.steps)
    optimizer = make_optimizer(config.optimizer, schedule, layout.names_of)
    shardings = layout.param_shardings(params)
    moments = jax.eval_shape(optimizer.init, params)
    fallback = Layout(layout.mesh)
    places = optimizer_shardings(
        moments, params, shardings, lambda shape: NamedSharding(layout.mesh, fallback.param_spec("", shape))
    )

    numbers = Numbers(params=np.dtype(config.precision.params))
    held = jax.eval_shape(partial(held_params, layout, numbers), params)

    def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return (
        bytes_a_device(jax.tree.map(placed, held, shardings)),
        bytes_a_device(jax.tree.map(placed, moments, places)),
    )

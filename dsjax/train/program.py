"""The compiled side of a trainer: abstract state, places, batches onto devices, one step compiled.

Nothing here knows of files or loops: model, loss, optimizer and mesh become functions over sharded arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.backend.compiling import compiled_around
from dsjax.config.exchange import DilocoConfig, GradSyncConfig
from dsjax.config.lora import LoraConfig
from dsjax.config.parallel import PipelineConfig
from dsjax.errors import ConfigError, InputError
from dsjax.grad_sync import Exchange, left_to_the_compiler, make_exchange
from dsjax.grad_sync.residuals import facts_of
from dsjax.mesh import AXES, BATCH_AXES, Layout, batch_shards, named_leaves, process_rows
from dsjax.mesh.topology import Topology
from dsjax.models import Stages
from dsjax.models.adapters import adapt, adapter_axes
from dsjax.models.weights import WeightMap
from dsjax.precision import Policy, histories_of
from dsjax.train.abstract_state import abstract_state, declared_axes, trainable_filter, trained_notes
from dsjax.train.diloco import apart_notes, refuse_last_step, refuse_pipeline
from dsjax.train.formats import held_params, optimizer_of
from dsjax.train.given import Init, check_init, check_patterns
from dsjax.train.gradients import StepParts
from dsjax.train.host_batch import abstract, leading_rows, on_mesh, same_everywhere, signature
from dsjax.train.injected import with_faults
from dsjax.train.memory import (
    compiled_bytes,
    device_bytes,
    is_out_of_memory,
    refuse_oversized,
    refuse_oversized_state,
)
from dsjax.train.pipelined import probed, refuse_permutes
from dsjax.train.stacking import Found, Held, Stack, microbatches_of, stacking_of
from dsjax.train.stage_costs import Costs
from dsjax.train.state import UNSCALED, Numbers, State, first_state, guards_of, means
from dsjax.train.step import eval_step, train_step
from dsjax.train.votes import cast

MakeOptimizer = Callable[[Callable[[str], Any]], optax.GradientTransformation]


@dataclass
class Recipe:
    """What to train, before any mesh or device is known.

    Attributes:
      init: makes the model from `nnx.Rngs`.
      loss: ``loss(model, batch) -> (sum, weight[, extras])``.
      make_optimizer: from a function "parameter path -> logical names" to an optax transformation.
      schedule: number of updates -> learning rate; None where it is not known.
      param_axes: path pattern -> logical names of dimensions.
      remat_by_step: recomputation goes around the whole loss; False for a model that does it by layer.
      stages: the model cut for a pipeline; None: it cannot be.
      after_step: as of `ModelSpec`.
      weights: makes the map to a saved model's tensors; None: there is none.
    """

    init: Init
    loss: Callable[[nnx.Module, Any], Any]
    make_optimizer: MakeOptimizer
    schedule: Callable[[Any], Any] | None
    param_axes: Mapping[str, Any]
    remat_by_step: bool = True
    stages: Stages | None = None
    after_step: Callable[[Any, Mapping[str, Any]], Any] | None = None
    weights: Callable[[], WeightMap] | None = None


@dataclass
class Program:
    """A recipe laid out on a mesh.

    Args:
      policy: which layer computes in which format.
      trainable: path patterns of the parameters to train; empty: all, or with adapters those alone.
      numbers: how they are kept in range.
      lora, max_grad_norm, remat, accumulation, fsdp_gather, pipeline, grad_sync, diloco: as in the config.
      topology: which devices are near to each other; by default as they say themselves.
      rows_a_pass: rows of a batch shard in a pass of the pipeline, where they are known.
      costs: of a layer, the embedding and the head, in any unit, where known: layers are shared out by them.
      found: by balancing: layers of each virtual stage, in place of those, and microbatches.
      compiler_options: XLA's, for the compiled functions.
      on_compile: called with what was compiled, the seconds it took and what there is to say of it.
      alternatives: programs of other settings to try when a step does not fit.

    Raises (at construction):
      ConfigError: parameters that do not divide over the mesh, or patterns that match nothing.
    """

    recipe: Recipe
    mesh: Mesh
    accumulation: int = 1
    fsdp_gather: str = "layer"
    policy: Policy = field(default_factory=Policy)
    trainable: tuple[str, ...] = ()
    lora: LoraConfig = field(default_factory=LoraConfig)
    max_grad_norm: float | None = None
    numbers: Numbers = UNSCALED
    remat: str = "none"
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    grad_sync: GradSyncConfig = field(default_factory=GradSyncConfig)
    diloco: DilocoConfig = field(default_factory=DilocoConfig)
    topology: Topology | None = None
    rows_a_pass: int | None = None
    costs: Costs | None = None
    found: Found = field(default_factory=Found)
    compiler_options: Mapping[str, Any] = field(default_factory=dict)
    on_compile: Callable[..., None] = lambda what, seconds, *notes: None
    alternatives: Callable[[], list[tuple[str, Program]]] = list

    def __post_init__(self) -> None:
        recipe = self.recipe
        check_init(recipe.init)
        model = nnx.eval_shape(lambda: self._model(jax.random.key(0)))
        refuse_pipeline(self.diloco, self.mesh.shape["pipeline"])
        passes = microbatches_of(
            self.pipeline, self.mesh.shape["pipeline"], self.rows_a_pass, self.found.microbatches
        )
        self.stacking = stacking_of(
            recipe.stages, model, self.mesh, self.pipeline, passes, self.costs, self.found.layers
        )
        self.stack = Stack(getattr(recipe.stages, "layers", ""), frozenset(named_leaves(nnx.state(model))))
        self.microbatches = self.accumulation * passes  # a step, over all passes of the pipeline
        self.layout = Layout(
            self.mesh,
            {**declared_axes(model), **recipe.param_axes},
            stacked=self.stacking.path if self.stacking else None,
            layers=self.stack.path or None,
            fsdp_gather=self.fsdp_gather,
            gather_dtype=None if self.policy.dtype == self.numbers.params else self.policy.dtype,
            gather_narrow=self._applied.narrow,
        )
        if self.lora.rank:
            own = adapter_axes(model, self.layout.names_of)
            self.layout = replace(self.layout, param_axes={**own, **self.layout.param_axes})
        self._filter = trainable_filter(self.trainable, nnx.state(model, nnx.Param), bool(self.lora.rank))
        model, injected = with_faults(self.numbers.wrong, model, self.mesh)
        graph, *states = nnx.split(model, self._filter, ...)
        params, model_state = jax.eval_shape(lambda *s: [*map(self._stored, s)], *states)
        check_patterns(recipe.param_axes, nnx.state(model, nnx.Param))
        self.layout.check(nnx.state(model, nnx.Param))
        optimizer = optimizer_of(self.numbers, recipe.make_optimizer(self.layout.optimizer_names))
        exchange, self._exchange_notes = self._exchange(params, model_state)
        apart = self.diloco if self.diloco.inner_steps and exchange is not None else None
        self.parts = StepParts(
            graph, recipe.loss, optimizer, recipe.schedule, self.layout, self.max_grad_norm, self.remat,
            recipe.stages, self.stacking.pipelining if self.stacking else None, exchange, apart, self.numbers, injected,
            recipe.after_step,
        )  # fmt: skip
        if self.numbers.recompute and not self.policy.is_exact and apart is None:
            model = nnx.eval_shape(lambda: self._model(jax.random.key(0), self.policy.exact))
            exact = replace(self.parts, graph=nnx.split(model)[0], layout=self.layout.exact, injected=())
            self.parts = replace(self.parts, exact=exact)
        self.abstract_state = abstract_state(
            self.layout, optimizer, exchange, params, model_state, apart is not None, self.numbers
        )
        self.state_shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        # Shards of the batch, and how many of them are this process's: the same at every step.
        self._shards = batch_shards(self.mesh), len(process_rows(self.mesh, batch_shards(self.mesh)))
        self._under = [self.accumulation, self.rows_a_pass, self._shards[0], jax.process_count()]
        self._steps: dict[Any, Any] = {}
        self._evals: dict[Any, Any] = {}
        self._votes: dict[int, jax.Array] = {}

    def _model(self, key: jax.Array, policy: Policy | None = None) -> nnx.Module:
        model = self.recipe.init(nnx.Rngs(key))
        if not isinstance(model, nnx.Module):
            raise ConfigError(f"init: returns a flax.nnx.Module, got {type(model).__name__}")
        adapt(model, self.lora, key)
        applied = (policy or self.policy).apply(model, self.numbers.params)
        if policy is None:
            self._applied = applied
        return model

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of what every device holds whole."""
        return NamedSharding(self.mesh, P())

    def _exchange(self, params: nnx.State, model_state: nnx.State) -> tuple[Exchange | None, list[str]]:
        if means(model_state) and self.grad_sync.codec == "dense" and not self.diloco.inner_steps:
            # The compiler, which sees all replicas, then makes statistics of a microbatch of all of them.
            return None, left_to_the_compiler(self.grad_sync)
        stages = self.recipe.stages if self.stacking is None else None
        recomputes = stages is not None and stages.remat == "full"
        groups = stages.layers if stages and (recomputes or self.grad_sync.overlap) else None
        return make_exchange(self.grad_sync, self.layout, params, groups, self.topology)

    @property
    def notes(self) -> list[str]:
        """What was chosen for the run, to be told once."""
        stages = [self.stacking.words] if self.stacking else []
        gpu = self.mesh.devices.flat[0].platform != "cpu"
        cut = {axis for axis, size in self.mesh.shape.items() if size > 1 and gpu}
        inside = {"pipeline"} if self.stacking else {"data"} if self.parts.exchange is not None else set()
        note = self.policy.notes(self._applied, cut - inside if inside & cut else set())
        note = [*trained_notes(self.in_order, self.abstract_state, self.lora.rank), *note]
        if self.numbers.recompute and self.parts.exact is None:
            note += ["stability.on_nonfinite: all is fp32 already, so a step that is not finite is skipped"]
        return [*stages, *self._exchange_notes, *apart_notes(self.diloco, self.parts.exchange), *note]

    # ---- state ---------------------------------------------------------------------------------

    def init(self, seed: int) -> State:
        """The first state, made in its places: no device ever holds what is not its own.

        Raises:
          OutOfDeviceMemory: it is larger than a device.
        """
        refuse_oversized_state(self.abstract_state, list(self.mesh.devices.flat))

        def make(key: jax.Array) -> State:
            _, *states = nnx.split(self._model(key), self._filter, ...)
            params, model_state = map(self._stored, states)
            residuals = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.abstract_state.residuals)
            return first_state(
                params, model_state, self.parts.optimizer.init(params), residuals, self.workers, self.numbers
            )

        started = time.monotonic()
        made = jax.jit(make, out_shardings=self.state_shardings, compiler_options=dict(self.compiler_options))
        state = made(jax.random.key(seed))
        self.on_compile("init", time.monotonic() - started)
        return state

    def _stored(self, tree: Any) -> Any:
        """New variables, all layers in order, as they are held and as the pipeline stores them."""
        tree = held_params(self.layout, self.numbers, tree)
        if self.stacking is None:
            return tree
        return self.stack.moved(tree, np.arange(self.stacking.partition.layers), self.stacking.slots)

    def in_order(self, tree: Any) -> Any:
        """A state, or part of one, with its layers in the model's order, whatever the pipeline made of it."""
        if self.stacking is None:
            return tree
        slots, layers = self.stacking.slots, np.arange(self.stacking.partition.layers)
        return jax.jit(lambda tree: self.stack.moved(tree, slots, layers))(tree)

    def held(self, facts: Mapping[str, Any], like: Any) -> tuple[Any, Callable[[Any], Any]]:
        """How to read a checkpoint whose layers are stored as its facts say.

        Args:
          like: an abstract tree of this program, a state or parts of one, with the places of its arrays.

        Returns:
          The checkpoint's abstract tree, and a function from what was read to this program's tree in its places.

        Raises:
          InputError: it holds another number of layers.
        """
        held = Held.of(self.stacking, facts)
        if held is None:
            return like, lambda tree: tree
        slots, stack = np.asarray(held.slots), Stack(held.path, self.stack.paths)
        wanted = self.slots(held.path)
        has, needs = (int(np.count_nonzero(table >= 0)) for table in (slots, wanted))
        if has != needs:
            raise InputError(
                f"the checkpoint does not match this model: it holds {has} layers in {held.path}, "
                f"the model has {needs}; use the model it was made with, or another run.dir"
            )
        if np.array_equal(slots, wanted):
            return like, lambda tree: tree
        places = jax.tree.map(lambda leaf: leaf.sharding, like)
        back = jax.jit(lambda tree: stack.moved(tree, slots, wanted), out_shardings=places)
        return held.like(like, wanted, stack), back

    def slots(self, path: str) -> np.ndarray:
        """The layer in each slot of the stack at a path; without a pipeline they lie in order."""
        if self.stacking is not None and path == self.stacking.path:
            return self.stacking.slots
        params = named_leaves(self.abstract_state.params) | named_leaves(self.abstract_state.model_state)
        depths = [leaf.shape[0] for name, leaf in params.items() if name.startswith(f"{path}/") and leaf.ndim]
        return np.arange(depths[0] if depths else 0)

    def facts(self) -> dict[str, Any]:
        """What a checkpoint says beside the state; None: layers in order, nothing found, no residuals, no workers."""
        layers = None
        if self.stacking is not None and not self.stacking.partition.in_order:
            layers = Held(self.stacking.path, tuple(map(int, self.stacking.slots))).facts()
        return {
            "layers": layers,
            "balanced": self.found.facts(self.stacking, self._under),
            "residuals": facts_of(self.parts.exchange),
            "workers": self.workers,
            "guards": guards_of(self.abstract_state.guards),
            "histories": histories_of(self.abstract_state.model_state),
        }

    @property
    def workers(self) -> int | None:
        """Replicas that train apart between exchanges; None: gradients are exchanged at every step."""
        exchange = self.parts.exchange
        return exchange.route.replicas if exchange is not None and self.parts.apart else None

    def going_on(self, facts: Mapping[str, Any]) -> Program:
        """The program with what balancing had found when a checkpoint was made, where this config leaves it open."""
        found = Found.of(facts, self.pipeline, self.stacking, self._under)
        return self if found == self.found else replace(self, found=found)

    def check_steps(self, steps: int) -> None:
        """Refuses a last step whose parameters would not be what workers that train apart have learned.

        Raises:
          ConfigError: naming numbers of steps that work.
        """
        if self.parts.apart is not None:
            refuse_last_step(self.parts.apart, steps)

    def model(self, state: State) -> nnx.Module:
        """The Flax model with the state's parameters (not a copy, but where a pipeline stores layers otherwise)."""
        return nnx.merge(self.parts.graph, *self.in_order((state.params, state.model_state)))

    # ---- batches -------------------------------------------------------------------------------

    def rows(self, global_rows: int) -> np.ndarray:
        """Which rows of a global batch this process supplies, in order."""
        return process_rows(self.mesh, global_rows, self.microbatches)

    def rows_are_alike(self, batch: Any) -> bool:
        """Whether all processes bring the same rows although the mesh gives each of them its own."""
        shards, mine = self._shards
        return jax.process_count() > 1 and mine != shards and same_everywhere(batch)

    def place(self, batch: Any, step: int | None = None) -> Any:
        """This process's rows as arrays [A, B / A, ...] over the mesh.

        Args:
          batch: a tree of host arrays, each with this process's rows first.
          step: for messages.

        Raises:
          InputError: rows that differ between arrays or do not divide, or NaN in the data.
        """
        rows = leading_rows(batch)
        shards, mine = self._shards
        parts = mine * self.microbatches
        if rows % parts:
            passes = self.microbatches // self.accumulation
            pipeline = f" x {passes} microbatches of the pipeline" if self.stacking else ""
            raise InputError(
                f"the batch has {rows} rows a process, which do not divide into gradient_accumulation_steps "
                f"{self.accumulation}{pipeline} x {mine} shards of the mesh here; use a multiple of {parts}"
            )
        lead = (self.microbatches, rows // self.microbatches)
        whole = (lead[0], lead[1] * shards // mine)
        return on_mesh(batch, NamedSharding(self.mesh, P(None, BATCH_AXES)), lead, whole, step)

    def place_eval(self, batch: Any) -> Any:
        """This process's rows of an evaluation batch, [B, ...] over the mesh.

        Rows that do not divide over the mesh (a last, partial batch) are computed by every device.
        """
        rows = leading_rows(batch)
        shards, mine = self._shards
        whole = rows % mine != 0
        if whole and jax.process_count() > 1:
            raise InputError(
                f"an evaluation batch has {rows} rows a process, which do not divide into the {mine} shards "
                "of the mesh here; pad it with rows of weight 0"
            )
        sharding = self.replicated if whole else NamedSharding(self.mesh, P(BATCH_AXES))
        return on_mesh(batch, sharding, (rows,), (rows if whole else rows * shards // mine,))

    def votes(self, asked: int = 0) -> jax.Array:
        """What this process asks of all (`dsjax.train.votes`), one number a device."""
        if asked not in self._votes:
            self._votes[asked] = cast(self.mesh, asked)
        return self._votes[asked]

    # ---- compiled functions --------------------------------------------------------------------

    def step(
        self, batch: Any, number: int | None = None
    ) -> Callable[[State, Any, jax.Array], tuple[State, dict[str, jax.Array]]]:
        """The compiled training step for placed (or abstract) batches shaped like this one.

        Args:
          number: of the step to be made, the first one being 1; the first ones may be exchanged otherwise
            (`grad_sync.warmup_steps`). None: one of the later ones.
        """
        key = signature(batch), self._warming(number)
        if key not in self._steps:
            self._steps[key] = self._compile_step(batch, key[1])
        return self._steps[key]

    def has_step(self, batch: Any, number: int | None = None) -> bool:
        """Whether the step for batches of this shape is compiled already."""
        return (signature(batch), self._warming(number)) in self._steps

    def _warming(self, number: int | None) -> bool:
        exchange = self.parts.exchange
        coded = exchange is not None and exchange.codec is not None
        return coded and number is not None and number <= self.grad_sync.warmup_steps

    def lower_step(self, batch: Any, warming: bool = False) -> Any:
        """The traced and lowered training step."""
        function, arguments = self.jitted_step(batch, warming)
        return function.lower(*arguments)

    def jitted_step(self, batch: Any, warming: bool = False) -> tuple[Any, tuple[Any, ...]]:
        """The training step as `jax.jit` makes it, and its abstract arguments; the state is donated."""
        parts = self.parts.warming() if warming else self.parts
        function = jax.jit(
            lambda state, batch, votes: train_step(parts, state, batch, votes),
            donate_argnums=0,
            out_shardings=(self.state_shardings, self.replicated),
        )
        votes = jax.ShapeDtypeStruct((self.mesh.size,), np.int32, sharding=NamedSharding(self.mesh, P(AXES)))
        return function, (self.abstract_state, abstract(batch), votes)

    def step_bytes(self, batch: Any) -> int | None:
        """Bytes a device that the step takes, by compiling it; None where it cannot be compiled."""
        try:
            return compiled_bytes(self._compiled(self.lower_step(batch), "step"))
        except Exception as error:
            if is_out_of_memory(error):
                return None
            raise

    def probe(self, batch: Any) -> Callable[[State, Any, jax.Array], tuple[Any, jax.Array]]:
        """A compiled function in which every device computes its stage of one microbatch (see `probed`)."""
        parts, pipelining = self.parts, self.parts.pipelining
        assert pipelining is not None
        function = jax.jit(
            lambda state, batch, after: probed(parts.graph, parts.layout, pipelining, state, batch, after),
            out_shardings=(None, NamedSharding(self.mesh, P(AXES))),
        )
        after = jax.ShapeDtypeStruct((self.mesh.size,), np.int32, sharding=NamedSharding(self.mesh, P(AXES)))
        return self._compiled(function.lower(self.abstract_state, abstract(batch), after), "probe")

    def _compiled(self, lowered: Any, what: str) -> Any:
        """What was lowered, compiled; an option that is in XLA's way is left out from then on."""
        started = time.monotonic()
        compiled, self.compiler_options, notes = compiled_around(lowered.compile, self.compiler_options)
        self.on_compile(what, time.monotonic() - started, *notes)
        return compiled

    def _compile_step(self, batch: Any, warming: bool) -> Any:
        compiled = self._compiled(self.lower_step(batch, warming), "step")
        if self.stacking is not None:
            refuse_permutes(compiled.as_text())
        needed, limit = compiled_bytes(compiled), device_bytes(list(self.mesh.devices.flat))
        if needed is not None and limit is not None and needed > limit:
            raise self.does_not_fit(batch, needed, limit)
        return compiled

    def does_not_fit(self, batch: Any, needed: int, limit: int) -> Exception:
        """The error for a step that takes more memory than there is, with settings that would fit."""
        shapes = abstract(batch)

        def measure(program: Program) -> Callable[[], int | None]:
            return lambda: program.step_bytes(program.like_batch(shapes))

        return refuse_oversized(needed, limit, [(t, measure(p)) for t, p in self.alternatives()])

    def like_batch(self, batch: Any) -> Any:
        """A batch of another accumulation, abstract, as this program takes it."""
        sharding = NamedSharding(self.mesh, P(None, BATCH_AXES))

        def one(leaf: Any) -> jax.ShapeDtypeStruct:
            rows = leaf.shape[0] * leaf.shape[1]
            shape = (self.microbatches, rows // self.microbatches, *leaf.shape[2:])
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(one, batch)

    def has_evaluation(self, batch: Any) -> bool:
        """Whether the evaluation of batches of this shape is compiled already."""
        return signature(batch) in self._evals

    def evaluation(self, batch: Any) -> Callable[[nnx.State, nnx.State, Any], dict[str, jax.Array]]:
        """The compiled evaluation of placed batches shaped like this one."""
        key = signature(batch)
        if key not in self._evals:
            function = jax.jit(
                lambda params, model_state, batch: eval_step(self.parts, params, model_state, batch),
                out_shardings=self.replicated,
            )
            arguments = self.abstract_state.params, self.abstract_state.model_state, abstract(batch)
            self._evals[key] = self._compiled(function.lower(*arguments), "evaluation")
        return self._evals[key]

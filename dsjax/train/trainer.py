"""`dsjax.Trainer`: any Flax model, sharded over a mesh, one compiled step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.backend.platform import setup
from dsjax.backend.xla_options import Chosen, choose
from dsjax.checkpoint import DiskCheckpoints
from dsjax.checkpoint.disk import state_bytes
from dsjax.config import Config, from_dict
from dsjax.data import as_step_loader
from dsjax.errors import ConfigError, Preempted
from dsjax.faults import Faults
from dsjax.mesh import make_mesh
from dsjax.models import Stages
from dsjax.observe import check_sinks, peak_flops, write_report
from dsjax.observe.heartbeat import Heartbeat
from dsjax.stability.watch import Watch
from dsjax.train import loop
from dsjax.train.agreement import require_same_settings
from dsjax.train.generation import Generator
from dsjax.train.given import SCRIPTS_OWN, Init, Optimizer, as_loss, as_optimizer, as_schedule, require_alive
from dsjax.train.host_batch import warned_if_alike
from dsjax.train.lay_out import lay_out
from dsjax.train.optimizers import Schedule
from dsjax.train.program import Program, Recipe
from dsjax.train.recorder import Rates, Recorder
from dsjax.train.resume import begin, fresh_state, restore
from dsjax.train.rollback import Rollback
from dsjax.train.rundir import RunDirectory
from dsjax.train.sampling import Sampling
from dsjax.train.saving import Saving, last_good, make_room_in_memory, open_tiers
from dsjax.train.signals import stop_on_signals
from dsjax.train.state import State
from dsjax.train.summary import show
from dsjax.train.tracing import trace_window

# Metrics that only the loop has a use for.
_OF_THE_LOOP = ("asked", "skipped", "tokens_seen")


class Trainer:
    """Trains a Flax model with a loss and an optimizer over a mesh.

    Args:
      init: ``init(rngs) -> flax.nnx.Module`` (a Linen module through `flax.nnx.bridge`).
      loss: ``loss(model, batch) -> (sum of losses, weight)``, with as an optional third
        ``{name: (sum, weight)}`` for further metrics. Sums, not means: they are added over
        microbatches, devices and hosts and divided once.
      optimizer: an optax transformation, used as it is, or ``optimizer(learning_rate)`` that makes one.
      learning_rate: a number, or a schedule from the number of updates made to one; logged.
      mesh: axis -> size, e.g. ``{"data": 2, "fsdp": 4}``; one may be -1; default: all devices on `fsdp`.
      devices: the devices to use; default: all.
      gradient_accumulation_steps: microbatches a step, summed in fp32.
      remat: "none"; "full" or "dots" recompute the forward pass of a microbatch in the backward pass.
      fsdp_gather: "layer" or "step": when parameters sharded by fsdp are gathered.
      max_grad_norm: clip gradients to this global norm; None: do not.
      param_axes: path pattern -> logical names of the parameter's dimensions, for sharding beyond
        `fsdp` along the largest dimension. A model's Flax partitioning metadata counts too.
      trainable: path patterns of the parameters to train; empty: all.
      stages: the model cut for a mesh with `pipeline` (`dsjax.Stages`); `loss` may then be left out.
      run, runtime, lora, pipeline, grad_sync, diloco, eval, precision, stability, checkpoint, observe: the config's
        sections of these names, as mappings.
      compiler_options: XLA options of the step, over those of the platform's preset.
      allow_config_change: resume although settings differ from those the run was started with.
      unit: what the loss's weight counts, for what is shown to people.

    Raises:
      ConfigError: settings that are wrong or do not fit the devices or the model.
    """

    def __init__(
        self,
        init: Init,
        loss: Callable[[nnx.Module, Any], Any] | None = None,
        optimizer: Optimizer | None = None,
        *,
        learning_rate: float | Schedule | None = None,
        mesh: Mapping[str, int] | None = None,
        devices: Sequence[jax.Device] | None = None,
        gradient_accumulation_steps: int = 1,
        remat: str = "none",
        fsdp_gather: str = "layer",
        max_grad_norm: float | None = None,
        param_axes: Mapping[str, Sequence[str | None]] | None = None,
        trainable: Sequence[str] = (),
        stages: Stages | None = None,
        run: Mapping[str, Any] | None = None,
        runtime: Mapping[str, Any] | None = None,
        lora: Mapping[str, Any] | None = None,
        pipeline: Mapping[str, Any] | None = None,
        grad_sync: Mapping[str, Any] | None = None,
        diloco: Mapping[str, Any] | None = None,
        eval: Mapping[str, Any] | None = None,
        precision: Mapping[str, Any] | None = None,
        stability: Mapping[str, Any] | None = None,
        checkpoint: Mapping[str, Any] | None = None,
        observe: Mapping[str, Any] | None = None,
        compiler_options: Mapping[str, Any] | None = None,
        allow_config_change: bool = False,
        unit: str = "examples",
    ):
        if remat.startswith("every_") and stages is None:
            raise ConfigError(
                f"remat: {remat} needs a model of stacked layers that is given in `stages`; takes none, full or dots"
            )
        given = {
            "run": run, "runtime": runtime, "mesh": mesh, "pipeline": pipeline, "eval": eval, "precision": precision,
            "stability": stability, "checkpoint": checkpoint, "observe": observe, "grad_sync": grad_sync,
            "diloco": diloco, "lora": lora,
        }  # fmt: skip
        values = {name: dict(section) for name, section in given.items() if section is not None}
        values["train"] = {
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "global_batch_size": gradient_accumulation_steps,
            "remat": remat,
            "fsdp_gather": fsdp_gather,
        }
        values["optimizer"] = {"max_grad_norm": max_grad_norm, "trainable": list(trainable)}
        if isinstance(learning_rate, int | float):
            values["optimizer"]["learning_rate"] = float(learning_rate)
        config = from_dict({**values, "model": {"kind": "python"}})
        setup(config.runtime)
        made = as_optimizer(optimizer, learning_rate)
        loss, stages = as_loss(loss, stages, remat)
        recipe = Recipe(init, loss, lambda names_of: made, as_schedule(learning_rate), dict(param_axes or {}))
        recipe.remat_by_step, recipe.stages = stages is None, stages
        rate = {"learning_rate"} & set(values["optimizer"])
        only = {**SCRIPTS_OWN, "optimizer": {"max_grad_norm", "trainable", *rate}}
        self._start(recipe, config, devices, compiler_options, allow_config_change, only)
        self._unit, self._by_script = unit, True

    @classmethod
    def from_recipe(
        cls,
        recipe: Recipe,
        config: Config,
        *,
        alternatives: Callable[[Trainer], list[tuple[str, Program]]] | None = None,
        flops_per_step: float | None = None,
        allow_config_change: bool = False,
    ) -> Trainer:
        """A trainer of a recipe and a whole config, as the command line makes it.

        Args:
          alternatives: programs of other settings, named as they would be typed, for the error of a
            step that does not fit.
          flops_per_step: model FLOPs, forward and backward, of a step; for MFU.
          allow_config_change: resume although settings changed.
        """
        trainer = cls.__new__(cls)
        trainer._start(recipe, config, None, None, allow_config_change)
        trainer.flops_per_step = flops_per_step
        if alternatives is not None:
            trainer.program.alternatives = lambda: alternatives(trainer)
        return trainer

    def _start(
        self,
        recipe: Recipe,
        config: Config,
        devices: Sequence[jax.Device] | None,
        compiler_options: Mapping[str, Any] | None,
        allow_config_change: bool = False,
        only: Mapping[str, Any] | None = None,
    ) -> None:
        check_sinks(config.observe)
        self._faults = Faults.of(os.environ, jax.process_index())
        require_same_settings(config, self._faults.notes)
        self.config = config
        self.compiles: list[tuple[str, float]] = []
        self.flops_per_step: float | None = None
        self._recorder: Recorder | None = None
        mesh = make_mesh(config.mesh, devices)
        self.platform = mesh.devices.flat[0].platform
        chosen = Chosen(dict(compiler_options or {}))
        if config.runtime.xla_preset == "auto":
            chosen = choose(self.platform, own=compiler_options, mesh=mesh.shape)
        self.program = lay_out(
            recipe,
            config,
            mesh,
            compiler_options=chosen.options,
            on_compile=self._compiled,
            wrong=self._faults.wrong,
        )
        self.notes = [*chosen.notes, *self._faults.notes, *self.program.notes]
        self._only, self._allow, self._unit, self._by_script = only, allow_config_change, "tokens", False
        disk = config.checkpoint.disk
        self.directory = RunDirectory(config.run.directory, config, allow_config_change, only)
        self.checkpoints = DiskCheckpoints(disk.directory(self.directory.path), disk)
        self._loader_state: Callable[[int], Any] = lambda step: None

    def _compiled(self, what: str, seconds: float, *notes: str) -> None:
        self.compiles.append((what, seconds))
        self.notes += notes
        if self._recorder is not None:
            self._recorder.compiled(what, seconds, notes)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh, with all axes."""
        return self.program.mesh

    def init(self, seed: int | None = None) -> State:
        """The state before the first step, made in its places on the mesh."""
        return self.program.init(self.config.run.seed if seed is None else seed)

    def step(self, state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
        """One compiled training step; `state` is donated (use the one returned).

        Args:
          state: from `init`, `restore` or an earlier step.
          batch: a tree of host arrays with this process's rows first (see `rows`).

        Returns:
          The next state and the metrics loss, tokens (weight), grad_norm (before clipping), applied
          (False: skipped as not finite), learning_rate where it is known and the loss's own extras (as
          ``extra/NAME``): scalars, still on the device.

        Raises:
          InputError: rows that do not divide over mesh and microbatches, or NaN in the batch.
          OutOfDeviceMemory: the step does not fit.
        """
        require_alive(state)
        placed = self.program.place(batch)
        # The number is asked of the device only where it matters.
        number = int(state.step) + 1 if self.config.grad_sync.warmup_steps else None
        state, metrics = self.program.step(placed, number)(state, placed, self.program.votes())
        return state, {name: value for name, value in metrics.items() if name not in _OF_THE_LOOP}

    def rows(self, global_batch_size: int) -> Any:
        """Which rows of a global batch this process gives to `step`, as positions in it, in order."""
        return self.program.rows(global_batch_size)

    def model(self, state: State) -> nnx.Module:
        """The Flax model with the state's parameters."""
        require_alive(state)
        return self.program.model(state)

    def generator(self, ends: Sequence[int] = (), **sampling: Any) -> Generator:
        """``generator(state, prompts, max_tokens=128, seed=0)`` draws tokens after tokens (`Generator`, `Sampling`)."""
        return Generator(self.program, Sampling(**sampling), ends)

    def evaluate(self, state: State, loader: Any, steps: int | None = None) -> dict[str, float]:
        """Weighted loss, perplexity and extras over all of a finite loader's batches.

        Raises:
          InputError: the set has no weight.
        """
        require_alive(state)
        return self._evaluated(state, loader, self.config.eval.steps if steps is None else steps)

    def _evaluated(self, state: State, loader: Any, steps: int, *on_batch: Any) -> dict[str, float]:
        return loop.evaluate(self.program, state, loader() if callable(loader) else loader, steps, *on_batch)

    def plan(
        self,
        on: str,
        batch: Any,
        *,
        mesh: Mapping[str, int] | None = None,
        explain: bool = False,
        **more: Any,
    ) -> Any:
        """What this trainer's step takes on a cluster that is not here; no device of it is touched.

        Args:
          on: the cluster, as `8xH100` or `2x8xH100`.
          batch: a tree of arrays or `jax.ShapeDtypeStruct`s with all rows of a step as first dimension.
          mesh: axis -> size on that cluster; this trainer's own by default.
          explain: return a pair, the plan and what the step is made of.
          more: as `dsjax.plan.plan_recipe` takes it.

        Returns:
          A `dsjax.plan.Plan`: memory, collectives, FLOPs, predicted time.

        Raises:
          ConfigError: an unknown cluster, a mesh that does not fit it, or the extra `aot` is missing.
        """
        from dsjax.plan import explain_recipe, plan_recipe

        config = self.config
        if mesh is not None:
            section = type(config.mesh)
            values = {**dict.fromkeys(section.model_fields, 1), **mesh}
            config = config.model_copy(update={"mesh": section(**values)})
        planned = explain_recipe if explain else plan_recipe
        return planned(self.program.recipe, config, batch, on, **more)

    # ---- saving --------------------------------------------------------------------------------

    def save(self, state: State) -> int:
        """Saves the state under its step, and waits until it is on disk. Returns the step."""
        require_alive(state)
        step = int(state.step)
        self.checkpoints.save(step, state, self._saved_with(step))
        self.checkpoints.wait()
        return step

    def _saved_with(self, step: int) -> dict[str, Any]:
        """What is written beside the state of a step."""
        return {
            "step": step,
            "time": time.time(),
            "mesh": dict(self.mesh.shape),
            "processes": jax.process_count(),
            "loader": self._loader_state(step),
            "config": self.directory.settings,
            **self.program.facts(),
        }

    def restore(self, step: int | None = None) -> State:
        """The state saved at a step (None: the newest), placed on this trainer's mesh.

        Raises:
          InputError: there is none, it cannot be read, or it is of another model.
        """
        return self.restore_with_facts(step)[0]

    def restore_with_facts(self, step: int | None = None) -> tuple[State, dict[str, Any]]:
        """As `restore`, and what was written beside the state: step, time, mesh, processes, loader."""
        return restore(self.program, self.checkpoints, step)

    # ---- the loop ------------------------------------------------------------------------------

    def fit(
        self,
        loader: Any,
        steps: int,
        *,
        state: State | None = None,
        stop_after: int | None = None,
        eval_loader: Any = None,
        on_step: Callable[[int, Mapping[str, Any]], None] | None = None,
        on_eval: Callable[[int, Mapping[str, Any]], None] | None = None,
        on_checkpoint: Callable[[int], None] | None = None,
    ) -> State:
        """Trains up to step `steps`, resuming from the newest good state, whichever tier holds it.

        Args:
          loader: batches of this process's rows. A `grain.MapDataset` (or other Grain data set) of
            batches resumes exactly; a bare iterator trains but cannot resume.
          steps: the run's last step, counted from its first start.
          state: start from this state instead of the newest checkpoint (or a fresh one).
          stop_after: end this call after so many steps, saved, as a pre-emption would.
          eval_loader: a finite loader, or ``{name: loader}``, evaluated every `eval.every` steps and at the
            end.
          on_step: called with (step, metrics record) once a step's metrics have arrived.
          on_eval: called with (step, {set: {loss, tokens, perplexity}}).
          on_checkpoint: called with the step of a checkpoint that has begun to be saved.

        Raises:
          Preempted: stopped by a signal or `stop_after`, after saving.
          Diverged: too many steps in a row were not finite.
          InputError, ConfigError, OutOfDeviceMemory: as their messages say.
        """
        data = as_step_loader(loader)
        self.program.check_steps(steps)
        self._set_steps(steps)
        self._heartbeat = Heartbeat.from_environment()
        self._heartbeat.at(0, "restoring")
        with self.directory.locked(), self._telling(), ExitStack() as opened:
            tiers = open_tiers(self.config.checkpoint, self.checkpoints, self.directory.path)
            opened.callback(tiers.close)
            start = begin(self.program, tiers, self.directory, self.config, state)
            fresh = (lambda: fresh_state(self.program, self.config)) if state is None else None
            self.go_on_with(start.program)
            state, meta = start.state, start.facts
            step = int(state.step)
            owed = bool(eval_loader) and self.directory.owes_evaluation(step, steps)
            if step >= steps and not owed and start.tier in (None, "disk"):
                show(
                    f"{self.directory.path}: step {step} of {steps} is done already; ask for more steps to go on"
                )
                return state
            self.checkpoints.prepare()
            self.directory.check_space(self.checkpoints.directory, state_bytes(state))
            make_room_in_memory(tiers, self.config.checkpoint.memory, state, step)
            data.restore(meta.get("loader"), first_batch := int(state.data_step))
            self._loader_state = data.state
            plan = self._plan(steps, stop_after, eval_loader, on_eval, data)
            plan.evaluate_first = owed
            with stop_on_signals() as stop, self._recording(step, steps, on_step) as recorder:
                saving = Saving(
                    self.config.checkpoint, tiers, self._saved_with, recorder, on_checkpoint, plan.faults
                )
                with saving:
                    self.directory.begin(recorder.events, step, start.differences, unit=self._unit)
                    start.tell(recorder, self._facts(), tiers.notes, [*self.notes, *data.notes])
                    plan.roll_back = Rollback(self.config.stability, saving, recorder, fresh, data.examples)
                    with loop.closing_iterator(data.iterate(first_batch)) as batches:
                        batches = warned_if_alike(
                            batches, self.program.rows_are_alike, recorder.progress.message
                        )
                        state = loop.Loop(self.program, state, batches, plan, recorder, saving, stop).run()
                recorder.event("finished", int(state.step))
        return state

    def go_on_with(self, program: Program) -> None:
        """Another program takes over, and what is told of it."""
        others = [note for note in self.notes if note not in self.program.notes]
        self.program, self.notes = program, [*program.notes, *others]

    def _set_steps(self, steps: int) -> None:
        """Enters the number of steps that a script asks for into the run's settings."""
        if self._by_script:
            train = self.config.train.model_copy(update={"steps": steps})
            self.config = self.config.model_copy(update={"train": train})
            self.directory = RunDirectory(self.directory.path, self.config, self._allow, self._only)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Tells a script's user how `fit` ended, as the command line does for its own."""
        try:
            yield
        except Preempted as stopped:
            if self._by_script:
                show(str(stopped))
            raise
        finally:
            # What a script does after `fit` is not for the supervisor to judge.
            self._heartbeat.at(0, "finished")
        if self._by_script:
            show(
                f"{self.directory.path}: config.yaml, metrics.jsonl, events.jsonl, report.html, checkpoints/"
            )

    def _facts(self) -> dict[str, Any]:
        sizes = {axis: size for axis, size in self.mesh.shape.items() if size > 1}
        return {"mesh": sizes, "devices": self.mesh.size, "processes": jax.process_count()}

    def _plan(
        self,
        steps: int,
        stop_after: int | None,
        eval_loader: Any,
        on_eval: Any,
        data: Any,
    ) -> loop.Plan:
        stability = self.config.stability
        self._faults.check({d.id for d in self.mesh.devices.flat}, steps, stability.check_recompute_every)
        sets = eval_loader if isinstance(eval_loader, Mapping) else {"heldout": eval_loader}
        sets = {name: loader for name, loader in sets.items() if loader is not None}

        def evaluate(state: State, on_batch: Callable[[str], None]) -> loop.Results:
            limit = self.config.eval.steps
            return {name: self._evaluated(state, one, limit, on_batch) for name, one in sets.items()}

        return loop.Plan(
            steps=steps,
            stop_after=stop_after,
            eval_every=self.config.eval.every or (steps if sets else 0),
            evaluate=evaluate if sets else None,
            log_examples=data.log_examples,
            on_eval=on_eval,
            trace=trace_window(self.config.observe.profile, self.directory.path),
            on_program=self.go_on_with,
            faults=self._faults,
            check_replicas_every=stability.check_replicas_every,
            locate_nonfinite=stability.locate_nonfinite,
            check_recompute_every=stability.check_recompute_every,
        )

    @contextmanager
    def _recording(self, step: int, steps: int, on_step: Any) -> Iterator[Recorder]:
        """A recorder for one call of `fit`; the report is written however it ends."""
        device = self.mesh.devices.flat[0]
        peak = peak_flops(device.device_kind, jnp.dtype(self.program.policy.dtype).name)
        recorder = Recorder(
            self.directory.path,
            self.config.observe,
            Rates(self.mesh.size, self.flops_per_step, peak),
            list(self.mesh.devices.flat),
            steps=steps,
            first_step=step,
            give_up_after=self.config.stability.patience,
            last_good=lambda: last_good(self.checkpoints),
            on_step=on_step,
            unit=self._unit,
            heartbeat=self._heartbeat,
            watch=Watch(self.config.stability),
        )
        self._recorder = recorder
        try:
            with recorder:
                yield recorder
        finally:
            self._recorder = None
            if jax.process_index() == 0:
                write_report(self.directory.path)

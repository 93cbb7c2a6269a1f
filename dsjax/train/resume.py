"""The state that a call of `fit` starts from: given, restored from the newest tier that is good, or new."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
from flax import nnx

from dsjax.checkpoint import DiskCheckpoints
from dsjax.checkpoint.places import checkpoints_of, put_aside
from dsjax.checkpoint.stored import stored_arrays
from dsjax.config import Config
from dsjax.errors import ConfigError, Damaged, InputError
from dsjax.hf.hub import KEPT, is_saved_model, local
from dsjax.hf.load import loaded
from dsjax.hf.peft import Adapters, Saved
from dsjax.hf.save import Side
from dsjax.hf.tensors import Tensors
from dsjax.mesh import map_named, named_leaves
from dsjax.models.adapters import is_adapter
from dsjax.models.moe.router import RouterBias
from dsjax.processes import gather, together
from dsjax.train.carried import Guards, Kept, Workers, with_params
from dsjax.train.given import require_alive
from dsjax.train.histories import Histories
from dsjax.train.memory import refuse_oversized_state
from dsjax.train.program import Program
from dsjax.train.recorder import Recorder
from dsjax.train.rundir import RunDirectory
from dsjax.train.saving import Tiers
from dsjax.train.state import State


class Store(Protocol):
    """A tier, as far as reading goes; where `restore` finds damage on one process it raises on all."""

    directory: Any  # a path or a URL

    def latest_step(self) -> int | None:
        """The newest state's step."""

    def facts(self, step: int) -> dict[str, Any]:
        """What was written beside the state of a step."""

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """The state of a step in the places of `like`, and its facts."""


@dataclass(frozen=True)
class Start:
    """What a call of `fit` starts from.

    Attributes:
      facts: what was written beside the state; empty for a given or a new one.
      differences: settings that changed since.
      tier: memory, disk or remote; None: the state was given, or is new.
      passed_over: checkpoints that were newer but damaged, and why, as (step, tier, reason).
    """

    program: Program
    state: State
    facts: dict[str, Any] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    tier: str | None = None
    passed_over: list[tuple[int, str, str]] = field(default_factory=list)

    def tell(self, recorder: Recorder, facts: dict[str, Any], tiers: list[str], others: list[str]) -> None:
        """Writes events of it, and tells people what they should know.

        Args:
          facts: of the run, for the event.
          tiers, others: notes; those of the tiers belong to the event.
        """
        for step, tier, reason in self.passed_over:
            recorder.event("checkpoint_skipped", step, tier=tier, reason=reason)
            recorder.progress.message(f"checkpoint of step {step} ({tier}) passed over: {reason}")
        notes, step = [*self.facts.get("notes", []), *tiers], int(self.state.step)
        recorder.event("resumed" if step else "started", step, **facts, tier=self.tier, notes=notes)
        for note in [*notes, *others]:
            recorder.progress.message(note)


def restore(program: Program, store: Store, step: int | None = None) -> tuple[State, dict[str, Any]]:
    """The state saved at a step (None: the newest) and what was written beside it.

    Raises:
      InputError: there is none, it cannot be read, or it is of another model.
      OutOfDeviceMemory: it is larger than a device.
    """
    if step is None:
        step = store.latest_step()
        if step is None:
            raise InputError(
                f"no checkpoint in {store.directory}; train first, set run.dir, or make a run of a saved model "
                "(dsjax hf import)"
            )
    return restored(program, store, step, store.facts(step))


def restored(
    program: Program, store: Store, step: int, facts: dict[str, Any]
) -> tuple[State, dict[str, Any]]:
    """The state of a step whose facts are known, and what was written beside it; raises as `restore` does."""
    refuse_oversized_state(program.abstract_state, list(program.mesh.devices.flat))
    kept, workers = Kept.of(program, facts), Workers.of(program, facts)
    guards, histories = Guards.of(program, facts), Histories.of(program, facts)
    one = histories.without(replace(workers.one, residuals={}, guards={}))
    stored, back = program.held(facts, one)
    wanted = replace(workers.stored(stored), residuals=kept.stored, guards=guards.stored)
    read, facts = store.restore(step, histories.stored(wanted))
    state = back(histories.without(replace(workers.joined(read), residuals={}, guards={})))
    state = histories.carried(workers.parted(state, read), read)
    notes = [note for note in (workers.note, kept.note, histories.note, *guards.notes) if note]
    own = {"residuals": kept.carried(read.residuals), "guards": guards.carried(read.guards)}
    return replace(state, **own), facts | {"notes": notes}


@dataclass(frozen=True)
class Candidate:
    """A state to resume from: of a step, in a tier; `open` gives the store that it is read from."""

    step: int
    tier: str
    open: Callable[[], Store]


def candidates(tiers: Tiers) -> list[Candidate]:
    """What there is to resume from, newest first; of those of the same step, what is read faster.

    Object stores that cannot be asked are noted where there is something else.

    Raises:
      InputError: there is nothing else, and the object stores cannot be asked.
    """
    disk, memory, remote = tiers.disk, tiers.memory, tiers.remote
    found = [] if memory is None else [Candidate(step, "memory", lambda: memory) for step in memory.newest()]
    found += [Candidate(step, "disk", lambda: disk) for step in gather(disk.steps())[0]]
    if remote is not None:
        try:
            stored = together(lambda: remote.steps() if jax.process_index() == 0 else [])
            found += [Candidate(step, "remote", partial(_remote, tiers, step)) for step in gather(stored)[0]]
        except InputError as error:
            if not found:
                raise
            tiers.notes.append(f"whether a newer copy is stored elsewhere is not known: {error.faults[0]}")
    order = ("memory", "disk", "remote")
    return sorted(found, key=lambda one: (-one.step, order.index(one.tier)))


def _remote(tiers: Tiers, step: int) -> Store:
    """The store itself where it can be read by ranges; else the disk, to which the copy is brought first."""
    remote = tiers.remote
    assert remote is not None
    if remote.ranged:
        return remote
    to = tiers.disk.directory / str(step)

    def fetch() -> None:
        put_aside(to, "damaged")  # what is there of this step was found to be damaged
        remote.fetch(step, to)

    together(lambda: fetch() if jax.process_index() == 0 else None)
    return tiers.disk


def begin(
    program: Program, tiers: Tiers, directory: RunDirectory, config: Config, given: State | None
) -> Start:
    """The state to start from, and the program that it is of: one whose stages its run had found for itself.

    Raises:
      InputError, ConfigError: `run.resume` or the run directory do not allow it, or nothing that was
        saved can be read.
    """
    if given is not None:
        return Start(program, _allowed(given, tiers.disk, config.run.resume))
    passed_over: list[tuple[int, str, str]] = []
    differences: list[str] = []
    for one in candidates(tiers):
        try:
            store = one.open()
            _refuse_if_never(one.step, config.run.resume, store.directory)
            facts = together(partial(store.facts, one.step))
            differences = directory.check_resume(facts.get("config"))
            going_on = program.going_on(facts)
            state, facts = restored(going_on, store, one.step, facts)
        except Damaged as error:
            passed_over.append((one.step, one.tier, error.faults[0]))
            continue
        _put_aside(tiers.disk, passed_over)
        return Start(going_on, state, facts, differences, one.tier, passed_over)
    if passed_over:
        raise InputError([reason for _, _, reason in passed_over])
    if config.run.resume == "must":
        raise InputError(
            f"run.resume is must but {tiers.disk.directory} holds no checkpoint; set run.resume to auto"
        )
    return Start(program, fresh_state(program, config), {"notes": _begun_from(config)})


def _begun_from(config: Config) -> list[str]:
    """With what a run begins that has no state of its own, in words."""
    given = {"parameters": config.run.init_from, "adapters": config.lora.init_from}
    return [f"begins with {what} of {source}" for what, source in given.items() if source is not None]


def _allowed(given: State, disk: DiskCheckpoints, resume: str) -> State:
    """The state that `fit` was given, if the run directory holds no later one."""
    require_alive(given)
    latest = disk.latest_step()
    _refuse_if_never(latest, resume, disk.directory)
    if latest is not None and latest > int(given.step):
        raise InputError(
            f"{disk.directory} already holds step {latest} but fit was given a state of step {int(given.step)}; leave "
            "state out to resume, or choose another run.dir"
        )
    return given


def _put_aside(disk: DiskCheckpoints, passed_over: list[tuple[int, str, str]]) -> None:
    """Damaged checkpoints get another name: as the newest they would have better ones removed."""
    for step, tier, _ in passed_over if jax.process_index() == 0 else ():
        if tier == "disk":
            put_aside(disk.directory / str(step), "damaged")


def _refuse_if_never(latest: int | None, resume: str, where: Any) -> None:
    if resume == "never" and latest is not None:
        raise InputError(
            f"run.resume is never but {where} holds a checkpoint of step {latest}; choose another run.name or "
            "run.dir, or set run.resume to auto"
        )


def fresh_state(program: Program, config: Config) -> State:
    """The state of a run that has none yet: new, or with what `run.init_from` and `lora.init_from` name.

    Raises:
      ConfigError, InputError: it is not there, or of another model.
    """
    state = _begun(program, program.init(config.run.seed), config)
    return state if config.lora.init_from is None else _with_adapters(program, state, config)


def _begun(program: Program, state: State, config: Config) -> State:
    source = config.run.init_from
    if source is None:
        return state
    if is_saved_model(source):
        return _from_saved_model(program, state, config)
    other = DiskCheckpoints(checkpoints_of(source))
    latest = other.latest_step()
    if latest is None:
        raise InputError(f"run.init_from {source}: holds no checkpoint")
    if jax.process_index() == 0 and (Path(source) / KEPT).is_dir():
        Side.of(Path(source) / KEPT).keep(Path(config.run.directory) / KEPT)
    return _from_run(program, state, other, latest)


def _from_run(program: Program, state: State, other: DiskCheckpoints, step: int) -> State:
    """The state with what another run has learned: parameters, whether trained there and here or not, and biases."""
    abstract = program.abstract_state
    wanted = named_leaves(abstract.params) | {
        "/".join(map(str, path)): jax.tree.leaves(variable)[0]
        for path, variable in abstract.model_state.flat_state()
        if isinstance(variable, nnx.Param | RouterBias)
    }
    there = named_leaves(together(lambda: stored_arrays(other.directory / str(step))))
    known = {name.partition("/")[2] for name in there}
    if any(map(is_adapter, known)) and not any(map(is_adapter, wanted)):
        raise InputError(
            f"run.init_from: {other.directory} holds adapters, and this run has none; set lora as that run has it, or "
            "merge them into a saved model (dsjax hf export) and start from that"
        )
    # Adapters begin fresh beside a model that has none.
    wanted = {path: leaf for path, leaf in wanted.items() if path in known or not is_adapter(path)}
    like: dict[str, dict[str, Any]] = {}
    for path, leaf in wanted.items():
        part = "model_state" if f"model_state/{path}" in there else "params"
        # As it is stored: precision.params may be another here.
        dtype = there[f"{part}/{path}"].dtype if f"{part}/{path}" in there else leaf.dtype
        like.setdefault(part, {})[path] = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
    # The rest of that part (averages, random streams) is read along with it and left.
    for name, leaf in there.items():
        part, _, path = name.partition("/")
        if part == "model_state" and part in like and path not in like[part]:
            like[part][path] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=program.replicated)
    stored, back = program.held(other.facts(step), like)
    try:
        parts = back(other.restore_part(step, stored))
    except InputError as error:
        raise type(error)([f"run.init_from: {error.faults[0]}", *error.faults[1:]]) from None
    found = {
        path: leaf.astype(wanted[path].dtype)
        for part in parts.values() for path, leaf in part.items() if path in wanted
    }  # fmt: skip
    params, model_state = (
        map_named(lambda path, leaf: found.get(path, leaf), tree)
        for tree in (state.params, state.model_state)
    )
    return with_params(program, replace(state, model_state=model_state), params)


def _with_adapters(program: Program, state: State, config: Config) -> State:
    """The state with adapters that the PEFT library saved."""
    key, source = "lora.init_from", str(config.lora.init_from)
    if program.recipe.weights is None:
        raise ConfigError(
            f"{key}: {source} is of a model of Hugging Face's, and model.kind is one of your own"
        )
    directory = together(lambda: local(source, key, "adapter"))
    shapes = named_leaves(jax.eval_shape(program.in_order, state.params))
    adapters = Adapters(program.recipe.weights(), {path: leaf.shape for path, leaf in shapes.items()})
    saved = together(lambda: Saved(directory, adapters, config.lora))
    return with_params(program, state, loaded(state.params, adapters.map, saved, program.slots))


def _from_saved_model(program: Program, state: State, config: Config) -> State:
    """The state with a saved model's weights; what stands beside them is kept in the run's directory."""
    key, source = "run.init_from", str(config.run.init_from)
    if program.recipe.weights is None:
        raise ConfigError(
            f"{key}: {source} is a saved model of Hugging Face's, which only families of models read (model.kind), "
            "not a model of your own"
        )
    directory = together(lambda: local(source, key, "weights"))
    weights, tensors = program.recipe.weights(), Tensors(directory, key)
    side = Side.of(directory)
    try:
        params, model_state = (
            loaded(part, weights, tensors, program.slots) for part in (state.params, state.model_state)
        )
    except InputError as error:
        theirs = side.config.get("model_type")
        if theirs in (None, config.model.kind):
            raise
        first = f"{key}: {source} is a {theirs}, and the model here is a {config.model.kind}; their tensors differ"
        raise InputError([first, *error.faults]) from None
    if jax.process_index() == 0:
        side.keep(Path(config.run.directory) / KEPT)
    return with_params(program, replace(state, model_state=model_state), params)

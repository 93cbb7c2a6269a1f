"""Looks where a skipped step went wrong: its batch once more, through a program with taps.

The ordinary step knows nothing of it.  The program is compiled when a step was skipped for the first time; what is
found is of the parameters as they are then, two steps later, which a run of skipped steps has not changed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsjax.backend.compiling import compiled_around
from dsjax.errors import OutOfDeviceMemory
from dsjax.mesh import batch_shards, devices_by_shard, gather_all, named_leaves, use_layout
from dsjax.models.calls import intercepted, opened
from dsjax.precision import delayed
from dsjax.precision.loss_scale import nominal_weight
from dsjax.processes import everywhere
from dsjax.train.diagnosis.taps import Point, Reading, Taps, bad_rows, probes_for
from dsjax.train.diagnosis.verdict import Readings, Verdict, first_bad
from dsjax.train.gradients import Microbatches, positions_of, recomputed, started, total
from dsjax.train.host_batch import signature
from dsjax.train.memory import bytes_a_device, compiled_bytes, device_bytes, is_out_of_memory
from dsjax.train.program import Program
from dsjax.train.recorder import LAG, Recorder
from dsjax.train.state import State

_MOST = 5  # times a run that it looks
_MOST_ROWS = 50  # that an event names


@dataclass(frozen=True)
class _Kept:
    batch: Any
    data_step: int


class Diagnosis:
    """Tells of the first skipped step of each row of them which operator was the first that was not finite.

    Args:
      enabled: False never looks.
    """

    def __init__(self, recorder: Recorder, enabled: bool):
        self._recorder, self._left = recorder, _MOST if enabled else 0
        self._kept: dict[int, _Kept] = {}
        self._now: tuple[Program, State] | None = None
        self._tapped: dict[Any, Tapped] = {}
        recorder.on_trouble = self._look

    def stepped(self, step: int, program: Program, state: State, batch: Any, data_step: int) -> None:
        """A step was dispatched.

        Args:
          state: as it is after the step.
          batch: as it lies on the devices; it stays there for as long as the step's metrics may be unknown.
          data_step: the batch's number.
        """
        if not self._left:
            self.forget()
            self._tapped.clear()
            return
        self._now = program, state
        self._kept[step] = _Kept(batch, data_step)
        self._kept.pop(step - LAG - 1, None)

    def forget(self) -> None:
        """The state is about to be replaced: lets go of it, and of the batches."""
        self._kept, self._now = {}, None

    def _look(self, step: int, values: Mapping[str, Any]) -> None:
        """Looks where a step went wrong; its metrics are at hand."""
        kept = self._kept.get(step)
        if not self._left or self._now is None or kept is None:
            return
        self._left -= 1
        program, state = self._now
        if program.parts.apart is not None:
            self._left = 0
            why = "where it went wrong is not looked for in workers that train apart (diloco.inner_steps)"
            self._tell_nothing(step, why)
            return
        self._recorder.beat(step, "compiling")
        try:
            self._tell(step, program, *self._found(step, program, state, kept, values))
        except Exception as error:
            if jax.process_count() > 1 and not isinstance(error, OutOfDeviceMemory):
                raise  # others may wait for this process in the middle of it
            # A run that goes on after a skipped step shall not end because nobody could say where.
            why = f"{type(error).__name__}: {error}"
            if isinstance(error, OutOfDeviceMemory) or is_out_of_memory(error):
                why = "there is no memory left for it"
            self._tell_nothing(step, f"where it went wrong could not be looked for ({why.splitlines()[0]})")
        self._recorder.start_clock()

    def _found(
        self, step: int, program: Program, state: State, kept: _Kept, values: Mapping[str, Any]
    ) -> tuple[Verdict | None, int, int]:
        """(what was first, its microbatch, how many there are)."""
        begun, key = time.monotonic(), (id(program), signature(kept.batch))
        new = key not in self._tapped
        if new:
            self._tapped[key] = Tapped(program)
        tapped = self._tapped[key]
        count = jax.tree.leaves(kept.batch)[0].shape[0]
        scale = None
        if "loss_scale" in values:
            scale = np.float32(values["loss_scale"] / nominal_weight(kept.batch))
        for index in range(count):
            now = (np.int32(step - 1), np.int32(kept.data_step), np.int32(index), scale)
            verdict = first_bad(tapped(state, kept.batch, now))
            if new and index == 0:
                program.on_compile("diagnosis", time.monotonic() - begun)
            if verdict is not None:
                return verdict, index, count
        return None, 0, count

    def _tell(self, step: int, program: Program, verdict: Verdict | None, index: int, count: int) -> None:
        if verdict is None:
            self._tell_nothing(
                step, "computed again, all of it is finite with the parameters as they are now"
            )
            return
        batch = jax.tree.leaves(self._kept[step].batch)[0]
        each = batch.shape[1] // batch_shards(program.mesh)
        shards = sorted({row // each for row in verdict.rows})
        devices = [int(device.id) for shard in shards for device in devices_by_shard(program.mesh)[shard]]
        rows = [index * batch.shape[1] + row for row in verdict.rows]
        self._recorder.event(
            "nonfinite_located", step, found=True, direction=verdict.direction, layer=verdict.layer,
            operator=verdict.operator, what=verdict.what, largest=verdict.largest, microbatch=index,
            rows=rows[:_MOST_ROWS], devices=devices,
        )  # fmt: skip
        told = [str(verdict)]
        if rows:
            told.append(f"in {_counted('row', rows)} of the batch")
        if devices and len(shards) == 1 < batch_shards(program.mesh):
            told.append(f"on {_counted('device', devices)} alone")
        if count > 1:
            told.append(f"microbatch {index} of {count}")
        self._recorder.progress.message(f"step {step}: {'; '.join(told)}")

    def _tell_nothing(self, step: int, why: str) -> None:
        self._recorder.event("nonfinite_located", step, found=False, reason=why)
        self._recorder.progress.message(f"step {step}: {why}")


def _counted(what: str, numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}"


class Tapped:
    """Loss and gradient of a microbatch with taps on all of the model's modules; layers of a pipeline one by one.

    Raises (when it is called):
      OutOfDeviceMemory: the program would not fit beside the state.
    """

    def __init__(self, program: Program):
        state = program.abstract_state
        model = opened(nnx.merge(program.parts.graph, state.params, state.model_state))
        # Its gradient needs no exchange: the compiler sees all replicas here.
        layout = replace(program.layout, stacked=None)
        self._parts = replace(
            program.parts, graph=nnx.split(model)[0], layout=layout, pipelining=None, exchange=None
        )
        self._program = program
        self._compiled: Any = None
        self._points: list[Point] = []
        self._run = jax.jit(self._readings, out_shardings=program.replicated)

    def __call__(self, state: State, batch: Any, now: tuple[Any, ...]) -> Readings:
        """What the taps read.

        Args:
          batch: arrays [A, B, ...]: A microbatches.
          now: the step's number from 0, the batch's, the microbatch's, and what the gradient starts from (or None).
        """
        given = state.params, state.model_state, batch, now
        if self._compiled is None:
            compiled, failed = None, None
            try:
                lowered = self._run.lower(*given)
                compiled = compiled_around(lowered.compile, self._program.compiler_options)[0]
            except Exception as error:
                failed = error
            # All processes run it, or none.
            if not everywhere(compiled is not None and self._fits(compiled, state)):
                raise failed or OutOfDeviceMemory(
                    "the program that looks for it does not fit beside the state"
                )
            self._compiled = compiled
        taps, params, gradients, data = jax.tree.map(np.asarray, self._compiled(*given))
        return Readings(dict(zip(self._points, taps, strict=True)), params, gradients, data)

    def _fits(self, compiled: Any, state: State) -> bool:
        """Whether a device has room for the program and for what it does not read of the state."""
        needed, limit = compiled_bytes(compiled), device_bytes(list(self._program.mesh.devices.flat))
        beside = bytes_a_device(state) - bytes_a_device((state.params, state.model_state))
        return needed is None or limit is None or needed + beside <= limit

    def _readings(self, params: Any, model_state: Any, batch: Any, now: tuple[Any, ...]) -> Any:
        parts, (step, data_step, index, seed) = self._parts, now
        params, model_state = self._program.in_order((params, model_state))
        given = Microbatches(batch, positions_of(batch), step, seed=seed, data_step=data_step)
        rows = given.positions.shape[1]

        def loss_of(params: Any, taps: Taps) -> jax.Array:
            with intercepted(taps):
                return total(parts, params, delayed.probes(model_state), model_state, given, index)[0]

        with use_layout(parts.layout):
            whole = gather_all(params) if parts.layout.fsdp_gather == "step" else params
            first = Taps(rows, {})
            jax.eval_shape(lambda params: loss_of(params, first), whole)
            self._points = points = list(first.points)

            def tapped(params: Any, probes: list[Reading]) -> jax.Array:
                return loss_of(params, Taps(rows, dict(zip(points, probes, strict=True))))

            loss, pull = jax.vjp(recomputed(parts, tapped), whole, probes_for(points, rows))
            gradients, readings = pull(started(loss, seed))
        data = {
            path or "data": bad_rows([leaf], rows, masks=True)
            for path, leaf in named_leaves(given.at(index)[0]).items()
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        }
        bad = [self._bad(tree) for tree in (params, gradients)]
        return readings, *bad, data

    def _bad(self, tree: Any) -> dict[str, jax.Array]:
        """Path -> whether an array has a number that is not finite; of stacks, layer by layer."""
        stacks = {point.stack for point in self._points if point.stack is not None}

        def one(path: str, leaf: jax.Array) -> jax.Array:
            stacked = any(path.startswith(f"{stack}/") for stack in stacks)
            return jnp.any(~jnp.isfinite(leaf), tuple(range(1, leaf.ndim)) if stacked else None)

        return {path: one(path, leaf) for path, leaf in named_leaves(tree).items()}

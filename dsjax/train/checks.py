"""What looks after devices every so many steps: replicas that differ, a gradient that changes when made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsjax.errors import InternalError
from dsjax.faults import Faults
from dsjax.stability.replicas import Replicas
from dsjax.train.host_batch import signature
from dsjax.train.program import Program
from dsjax.train.recheck import Recomputed
from dsjax.train.recorder import Recorder
from dsjax.train.state import State


def replica_check(every: int, recorder: Recorder) -> Callable[[Program, int, State], None]:
    """What looks after every so many steps whether replicas are the same.

    It raises InternalError where they are not.
    """
    if not every:
        return lambda program, step, state: None
    of: Program | None = None  # balancing lays states out anew, in another program
    replicas: Replicas | None = None

    def check(program: Program, step: int, state: State) -> None:
        nonlocal of, replicas
        if step % every:
            return
        if replicas is None or of is not program:
            of, replicas = program, Replicas(program.mesh, program.abstract_state)
        differing = replicas.differing(state)
        recorder.start_clock()
        if not differing:
            return
        devices = sorted({device for odd in differing.values() for device in odd})
        names = list(differing)
        recorder.event("replicas_differ", step, devices=devices, arrays=names)
        raise InternalError(
            f"step {step}: replicas differ, which no program does: device {', '.join(map(str, devices))} holds other "
            f"numbers than its replicas in {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}; take it out, and "
            f"go on from a checkpoint from before step {step - every}"
        )

    return check


def recompute_check(
    every: int, recorder: Recorder, faults: Faults
) -> Callable[[Program, int, State, Any], None]:
    """What computes a gradient twice before every so many steps.

    It raises InternalError where the two differ.
    """
    if not every:
        return lambda program, step, state, batch: None
    compiled: dict[Any, Recomputed] = {}

    def check(program: Program, step: int, state: State, batch: Any) -> None:
        if step % every:
            return
        key = id(program), signature(batch)
        if key not in compiled:
            compiled[key] = Recomputed(program, batch)
        devices = compiled[key].differing(state, batch, faults.bit_to_flip(step, "compute"))
        recorder.start_clock()
        if not devices:
            return
        recorder.event("recompute_differs", step, devices=devices)
        raise InternalError(
            f"step {step}: a gradient computed twice is not the same, which no program does: device "
            f"{', '.join(map(str, devices))} computed other numbers the second time; take it out, and go on from a "
            f"checkpoint from before step {step - every + 1}"
        )

    return check

"""What looks after devices every so many steps: replicas that differ, a gradient that changes when made again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dsjax.errors import FaultyDevice
from dsjax.faults import Faults
from dsjax.stability.replicas import Replicas
from dsjax.train.host_batch import signature
from dsjax.train.program import Program
from dsjax.train.recheck import Recomputed
from dsjax.train.recorder import Recorder
from dsjax.train.state import State


def replica_check(every: int, recorder: Recorder) -> Callable[[Program, int, State], None]:
    """What looks after every so many steps whether replicas are the same.

    It raises FaultyDevice where they are not.
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
        where = f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        which = (
            f"device {devices[0]} holds other numbers than its replicas in {where}; take it out"
            if len(devices) == 1
            else f"devices {', '.join(map(str, devices))} hold different numbers in {where}, and two cannot decide "
            "which is wrong (three replicas can); test them"
        )
        raise FaultyDevice(
            f"step {step}: replicas differ, which no program does: {which}, and run the same again: it goes on from "
            f"{_from(step - every)}",
            max(0, step - every),
        )

    return check


def recompute_check(
    every: int, recorder: Recorder, faults: Faults
) -> Callable[[Program, int, State, Any], None]:
    """What computes a gradient twice before every so many steps.

    It raises FaultyDevice where the two differ.
    """
    if not every:
        return lambda program, step, state, batch: None
    compiled: dict[Any, Recomputed] = {}

    def check(program: Program, step: int, state: State, batch: Any) -> None:
        if step % every:
            return
        key = id(program), signature(batch)
        if key not in compiled:
            recorder.beat(step, "compiling")
            begun = time.monotonic()
            with recorder.progress.busy("compiling the check"):
                compiled[key] = Recomputed(program, batch)
            program.on_compile("check", time.monotonic() - begun)
        recorder.beat(step, "step")
        devices = compiled[key].differing(state, batch, faults.bit_to_flip(step, "compute"))
        recorder.start_clock()
        if not devices:
            return
        recorder.event("recompute_differs", step, devices=devices)
        raise FaultyDevice(
            f"step {step}: a gradient computed twice is not the same, which no program does: device "
            f"{', '.join(map(str, devices))} computed other numbers the second time; take it out, and run the same "
            f"again: it goes on from {_from(step - every)}",
            max(0, step - every),
        )

    return check


def _from(trusted: int) -> str:
    """The state that a run goes on from, in words."""
    return f"step {trusted} or before" if trusted > 0 else "its start, as no check has passed yet"

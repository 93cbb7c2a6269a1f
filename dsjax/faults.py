"""Faults on demand, to see for oneself that a run survives them: ``DSJAX_FAULT="kill@step=7,rank=1"``.

Several are separated by ``;``.  Each is a kind, ``@``, and what it needs:

* ``kill@step=N``: this process is killed (SIGKILL) before it starts step N;
* ``hang@step=N``: it stops moving there;
* ``slow@step=N,seconds=S,steps=K``: it waits S seconds before each of K steps (default 1) from step N on;
* ``disk_full@step=N``: the first save to disk at or after step N finds no space left (``times=K``: the first K);
* ``save_error@step=N``: that save fails with an input/output error;
* ``nan@step=N,steps=K``, ``inf@...``: loss and gradient of K steps (default 1) from step N on are not finite;
* ``spike@step=N,steps=K,factor=F``: they are F times (default 100) as large as they are;
  One of these three with ``op`` or ``layer`` acts on what modules of the model give instead: ``op=attention``, ``ffn``,
  ``norm``, ``loss`` or a pattern of module paths; ``layer=L``: of that layer (from 0) only, without ``op`` the whole
  layer; ``pass=backward``: on the gradient with respect to that (default ``forward``); ``device=D``: only the rows
  of the batch that lie on the device of that number;
* ``bitflip@step=N,device=D``: before step N a bit of a parameter turns on the device of that number (default 0);
  with ``where=compute`` the device computes wrong in the check of step N (`stability.check_recompute_every`).

All take ``attempt=A``, the number of restarts by `dsjax launch` after which it strikes (default 0: before any;
``attempt=any``: whenever), and those that are of a process ``rank=R`` (default: every one).  A fault strikes once:
one of numbers is of a batch, whose number is that of the step until a run goes back.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from dsjax.errors import ConfigError

VARIABLE = "DSJAX_FAULT"
_WHERE = ("op", "layer", "pass", "device")
_KINDS: dict[str, tuple[str, ...]] = {
    "kill": ("step",),
    "hang": ("step",),
    "slow": ("step", "seconds", "steps"),
    "disk_full": ("step", "times"),
    "save_error": ("step", "times"),
    "nan": ("step", "steps", *_WHERE),
    "inf": ("step", "steps", *_WHERE),
    "spike": ("step", "steps", "factor", *_WHERE),
    "bitflip": ("step", "device", "where"),
}
_EXAMPLE = "nan@step=12,layer=1,op=ffn"
_OF_NUMBERS = ("nan", "inf", "spike")
_NUMBERS = {"disk_full": errno.ENOSPC, "save_error": errno.EIO}


@dataclass(frozen=True)
class Wrong:
    """Batches [first, last], from 0, of which something is multiplied by a factor.

    Attributes:
      op: whose output it is: attention, ffn, norm, loss, or a pattern of module paths; None with a layer: the layer's;
        None without one: loss and gradient.
      layer: only of this layer; None: of all of them.
      backward: not the output but the gradient with respect to it.
      device: only of the rows of the batch on the device of this id.
      text: as it was asked for.
    """

    first: int
    last: int
    factor: float
    op: str | None = None
    layer: int | None = None
    backward: bool = False
    device: int | None = None
    text: str = ""

    @property
    def inside(self) -> bool:
        """Whether it is of something inside the model."""
        return self.op is not None or self.layer is not None


@dataclass
class Fault:
    """One fault; `left`: how often it may still strike."""

    kind: str
    step: int
    rank: int | None = None
    attempt: int | None = 0
    seconds: float = 1.0
    factor: float = 100.0
    device: int | None = None
    where: str = "memory"
    left: int = 1
    text: str = ""
    op: str | None = None
    layer: int | None = None
    backward: bool = False

    def wrong(self, factor: float) -> Wrong:
        """What it makes of numbers, if it is of them."""
        first, last = self.step - 1, self.step + self.left - 2
        return Wrong(first, last, factor, self.op, self.layer, self.backward, self.device, self.text)


@dataclass
class Faults:
    """The faults of this process."""

    faults: list[Fault] = field(default_factory=list)

    @classmethod
    def of(cls, environ: Mapping[str, str], rank: int) -> Faults:
        """Those that the environment asks for and that concern this process.

        Raises:
          ConfigError: a kind or key that there is not, or a value that is no number.
        """
        attempt = int(environ.get("DSJAX_ATTEMPT", "0") or 0)
        asked = [_parsed(text.strip()) for text in environ.get(VARIABLE, "").split(";") if text.strip()]
        mine = [f for f in asked if f.rank in (None, rank) and f.attempt in (None, attempt)]
        return cls(mine)

    @property
    def wrong(self) -> tuple[Wrong, ...]:
        """Those of numbers, as the compiled step needs them: the same on all processes."""
        factors = {"nan": math.nan, "inf": math.inf}
        return tuple(f.wrong(factors.get(f.kind, f.factor)) for f in self.faults if f.kind in _OF_NUMBERS)

    @property
    def notes(self) -> list[str]:
        """What is going to go wrong with numbers, which no line tells when it does."""
        return [f"{VARIABLE}: {f.text}" for f in self.faults if f.kind in _OF_NUMBERS]

    def check(self, devices: Collection[int], steps: int, recompute_every: int) -> None:
        """Refuses faults that cannot strike in a run.

        Args:
          devices: ids of those of its mesh.
          steps: its last one.
          recompute_every: steps between those whose gradient is computed twice; 0: there are none.

        Raises:
          ConfigError: a device that is not there, a step past the last, or one whose gradient is computed once.
        """
        for fault in self.faults:
            why = None
            if fault.step > steps:
                why = f"the run ends with step {steps}"
            elif fault.kind == "bitflip" and (fault.device or 0) not in devices:
                why = f"the mesh has no device {fault.device or 0}; it has {', '.join(map(str, sorted(devices)))}"
            elif fault.where == "compute" and not recompute_every:
                why = "nothing is computed twice; set stability.check_recompute_every"
            elif fault.where == "compute" and fault.step % recompute_every:
                near = max(1, round(fault.step / recompute_every)) * recompute_every
                why = f"stability.check_recompute_every is {recompute_every}: use a multiple, as step={near}"
            if why:
                raise ConfigError(f"{VARIABLE}: {fault.text!r}: {why}")

    def before_step(self, step: int) -> None:
        """Kills, hangs or delays this process where that is asked for."""
        for fault in self.faults:
            if fault.kind == "slow" and fault.step <= step and fault.left:
                self._strikes(fault)
                time.sleep(fault.seconds)
            elif fault.kind in ("kill", "hang") and fault.step == step and fault.left:
                self._strikes(fault)
                if fault.kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                while True:
                    time.sleep(3600)

    def bit_to_flip(self, step: int, where: str = "memory") -> int | None:
        """The device on which a bit is to turn before this step, in memory or in what it computes."""
        for fault in self.faults:
            if fault.kind == "bitflip" and (fault.step, fault.where) == (step, where) and fault.left:
                self._strikes(fault)
                return fault.device or 0
        return None

    def before_save(self, step: int) -> None:
        """Raises the error that a save to disk shall meet.

        Raises:
          OSError: as the file system would.
        """
        for fault in self.faults:
            if fault.kind in _NUMBERS and fault.step <= step and fault.left:
                self._strikes(fault)
                number = _NUMBERS[fault.kind]
                raise OSError(number, os.strerror(number))

    def _strikes(self, fault: Fault) -> None:
        fault.left -= 1
        print(f"dsjax: {VARIABLE}: {fault.text}", file=sys.stderr, flush=True)


def _parsed(text: str) -> Fault:
    kind, _, rest = text.partition("@")
    if kind not in _KINDS:
        raise ConfigError(f"{VARIABLE}: {text!r} is of no known kind; there are {', '.join(_KINDS)}")
    takes = (*_KINDS[kind], *(() if kind in _OF_NUMBERS else ("rank",)), "attempt")
    pairs = [pair.partition("=")[::2] for pair in rest.split(",") if pair]
    given = dict(pairs)
    if len(given) < len(pairs) or not all(given.values()):
        raise ConfigError(
            f"{VARIABLE}: {text!r}: takes each key once, with a value, as in kill@step=7,rank=1"
        )
    wrong = [key for key in given if key not in takes]
    if wrong or "step" not in given:
        need = f"knows no {wrong[0]}" if wrong else "needs step=N"
        raise ConfigError(f"{VARIABLE}: {text!r} {need}; {kind} takes {', '.join(takes)}")
    if given.get("where", "memory") not in ("memory", "compute"):
        raise ConfigError(f"{VARIABLE}: {text!r}: where is memory or compute, got {given['where']}")
    fault = _made(kind, given, text)
    if fault is None:
        raise ConfigError(
            f"{VARIABLE}: {text!r}: takes numbers from 0 on, steps and times from 1, as in kill@step=7,rank=1"
        )
    _check_place(fault, given)
    return fault


def _made(kind: str, given: Mapping[str, str], text: str) -> Fault | None:
    """The fault; None where a value is no number or below 0."""

    def number(key: str) -> int | None:
        return int(given[key]) if key in given else None

    try:
        fault = Fault(
            kind,
            step=int(given["step"]),
            rank=number("rank"),
            attempt=None if given.get("attempt") == "any" else int(given.get("attempt", 0)),
            seconds=float(given.get("seconds", 1.0)),
            factor=float(given.get("factor", 100.0)),
            device=number("device"),
            where=given.get("where", "memory"),
            left=int(given.get("times", given.get("steps", 1))),
            text=text,
            op=given.get("op"),
            layer=number("layer"),
            backward=given.get("pass") == "backward",
        )
    except ValueError:
        return None
    numbers = (fault.step - 1, fault.left - 1, fault.rank or 0, fault.device or 0, fault.layer or 0)
    fine = min(numbers) >= 0 and 0 <= fault.seconds < math.inf and 0 <= fault.factor < math.inf
    return fault if fine else None


def _check_place(fault: Fault, given: Mapping[str, str]) -> None:
    """Refuses a place in the model that makes no sense; one of a pass alone is of the loss."""
    if given.get("pass", "forward") not in ("forward", "backward"):
        raise ConfigError(f"{VARIABLE}: {fault.text!r}: pass is forward or backward, got {given['pass']}")
    if "pass" in given and fault.op is None and fault.layer is None:
        fault.op = "loss"
    if fault.op == "loss" and (fault.layer is not None or fault.device is not None):
        raise ConfigError(
            f"{VARIABLE}: {fault.text!r}: the loss is of no layer and of no device; leave those out"
        )
    if fault.kind in _OF_NUMBERS and fault.device is not None and fault.op is None and fault.layer is None:
        raise ConfigError(f"{VARIABLE}: {fault.text!r}: device needs op or layer, as in {_EXAMPLE},device=0")

"""What a run tells: metrics, events, progress; fetched from the device late, so that it never waits."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dsjax.config.schema import ObserveConfig
from dsjax.errors import Diverged
from dsjax.observe import EventLog, MetricsLog, Progress, open_sinks
from dsjax.observe.heartbeat import Heartbeat
from dsjax.stability.watch import Astray, Watch
from dsjax.train.memory import peak_bytes

# Steps whose metrics may still be on the device: the host prepares the next steps meanwhile.
LAG = 2
OnStep = Callable[[int, Mapping[str, Any]], None]


@dataclass
class _Pending:
    step: int
    metrics: Mapping[str, jax.Array]
    input_wait: float


@dataclass(frozen=True)
class Rates:
    """What is needed to turn seconds into rates.

    Attributes:
      devices: number of devices over which tokens are counted.
      flops_per_step: floating-point operations of a step of the model, forward and backward, over all
        devices; None where unknown.
      peak_flops: of one device; None where unknown.
    """

    devices: int
    flops_per_step: float | None = None
    peak_flops: float | None = None


class Recorder:
    """Writes a run's metrics and events and shows its progress. Process 0 writes; the others only fetch."""

    def __init__(
        self,
        run_dir: Path,
        observe: ObserveConfig,
        rates: Rates,
        devices: Sequence[jax.Device],
        *,
        steps: int,
        first_step: int,
        give_up_after: float,
        last_good: Callable[[], str],
        on_step: OnStep | None = None,
        unit: str = "tokens",
        heartbeat: Heartbeat | None = None,
        watch: Watch,
    ):
        primary = jax.process_index() == 0
        self.metrics = MetricsLog(run_dir, enabled=primary)
        self.events = EventLog(run_dir, enabled=primary)
        self.progress = Progress(steps, first_step, mode=observe.progress, enabled=primary, unit=unit)
        self._sinks = open_sinks(observe, run_dir, enabled=primary)
        self._every = observe.log_every
        self._rates, self._devices, self._steps = rates, devices, steps
        self._give_up_after, self._last_good, self._on_step = give_up_after, last_good, on_step
        self._pending: deque[_Pending] = deque()
        self._last_time = time.monotonic()
        self._seconds: list[float] = []
        self._tokens: list[float] = []
        self._waits: list[float] = []
        self._heartbeat = heartbeat or Heartbeat()
        self.asked = 0  # by any process, since it was last cleared
        self._skipped_in_a_row = 0
        self._watch = watch
        # Called with the first of skipped steps in a row that was not finite, and with its metrics.
        self.on_trouble: Callable[[int, Mapping[str, Any]], None] = lambda step, values: None
        self.step = first_step
        self.last_record: dict[str, Any] = {}
        # Of a pipeline's stages, for a microbatch, when they were last timed; told once.
        self.stage_seconds: list[float] = []

    def __enter__(self) -> Recorder:
        # Lines past the step that this call goes on from are of a past that did not last.
        self.metrics.drop_after(self.step)
        self.progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.progress.__exit__(*error)
        for sink in self._sinks:
            sink.close()
        self.metrics.close()
        self.events.close()

    def beat(self, step: int, what: str) -> None:
        """Tells the supervisor, if there is one, what is being done (one of `heartbeat.PHASES`)."""
        self._heartbeat.at(step, what)

    def start_clock(self) -> None:
        """Starts timing anew: what went before (compiling, saving, evaluating) is not a step's time."""
        self._last_time = time.monotonic()

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Adds a line to the event log."""
        self.events.event(kind, step, **fields)

    def compiled(self, what: str, seconds: float, notes: Sequence[str]) -> None:
        """Notes that a program was compiled, and shows what there is to say of it."""
        self.event("compiled", self.step, what=what, seconds=round(seconds, 3), notes=list(notes))
        for note in notes:
            self.progress.message(note)

    def step_done(self, step: int, metrics: Mapping[str, jax.Array], input_wait: float) -> None:
        """Takes a dispatched step's metrics; fetches those of the step `LAG` before.

        Raises:
          Diverged: too many steps in a row were skipped.
        """
        self.step = step
        for value in metrics.values():
            value.copy_to_host_async()
        self._pending.append(_Pending(step, metrics, input_wait))
        while len(self._pending) > LAG:
            self._record(self._pending.popleft())

    @property
    def astray(self) -> Astray | None:
        """What the steps that were looked at have come to, if it asks for going back."""
        return self._watch.astray

    @property
    def sound(self) -> bool:
        """Whether nothing is known to be wrong with the state of the last step that was looked at."""
        return self._skipped_in_a_row == 0 and self._watch.astray is None

    def gone_back(self, step: int) -> None:
        """The run goes on from an earlier step: lines past it are of a past that did not last."""
        self._pending.clear()
        self._watch.forget_after(step)
        self.progress.gone_back()
        self._skipped_in_a_row, self.step = 0, step
        self._seconds, self._tokens, self._waits = [], [], []
        self.metrics.drop_after(step)

    def drain(self) -> None:
        """Fetches every step's metrics; waits for the device."""
        while self._pending:
            self._record(self._pending.popleft())

    def _record(self, pending: _Pending) -> None:
        values = {name: np.asarray(jax.device_get(v)) for name, v in pending.metrics.items()}
        now = time.monotonic()
        self._seconds.append(now - self._last_time)
        self._last_time = now
        self._tokens.append(float(values["tokens"]))
        self._waits.append(pending.input_wait)
        self.asked |= int(values["asked"])
        self._skipped_in_a_row = int(values["skipped"])
        self._watch.step(pending.step, values)
        if values.get("recomputed", False):
            self.event("recomputed", pending.step)
            self.progress.message(f"step {pending.step}: not finite, computed again in fp32")
        elif values.get("overflow", False):
            self._overflowed(pending.step, float(values["loss_scale"]))
        elif not values["applied"]:
            self._skipped(pending.step, values)
        first = not self.last_record
        if pending.step % self._every == 0 or pending.step == self._steps or first:
            self._log(pending.step, values)
        elif self._on_step is not None:
            self._on_step(pending.step, _plain(values))

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        seconds = float(np.mean(self._seconds))
        rate = float(np.sum(self._tokens) / max(np.sum(self._seconds), 1e-9))
        rates = self._rates
        mfu = None
        if rates.flops_per_step and rates.peak_flops:
            mfu = rates.flops_per_step / seconds / (rates.peak_flops * rates.devices)
        record = {
            "step": step,
            **_plain(values),
            "step_seconds": seconds,
            "tokens_per_second": rate,
            "tokens_per_second_per_device": rate / rates.devices,
            "input_wait_seconds": float(np.mean(self._waits)),
            "mfu": mfu,
            "peak_memory_bytes": peak_bytes(self._devices),
            "time": time.time(),
        }
        record.update({f"stage_{i}_seconds": seconds for i, seconds in enumerate(self.stage_seconds)})
        self.stage_seconds = []
        self._seconds, self._tokens, self._waits = [], [], []
        self._write(record)
        self.progress.update(step, record)
        self.last_record = record
        if self._on_step is not None:
            self._on_step(step, record)

    def _write(self, record: Mapping[str, Any]) -> None:
        self.metrics.write(record)
        for sink in self._sinks:
            sink.log(record)

    def _overflowed(self, step: int, scale: float) -> None:
        self.event("overflow", step, loss_scale=scale)
        self.progress.message(
            f"step {step} skipped: gradients overflow fp16 at loss scale {scale:.0f}; parameters unchanged"
        )

    def _skipped(self, step: int, values: Mapping[str, Any]) -> None:
        reason = "no example of the batch has weight"
        if float(values["tokens"]) > 0:
            reason = (
                "the loss is not finite"
                if not math.isfinite(values["loss"])
                else "the gradient is not finite"
            )
        self.event("skipped", step, reason=reason, in_a_row=int(values["skipped"]))
        self.progress.message(f"step {step} skipped: {reason}; parameters unchanged")
        if float(values["tokens"]) > 0 and int(values["skipped"]) == 1:
            self.on_trouble(step, values)
        if int(values["skipped"]) >= self._give_up_after:
            raise Diverged(
                f"training gave up at step {step}: {int(values['skipped'])} steps in a row were skipped ({reason}); "
                f"{self._last_good()}. Lower optimizer.learning_rate, look at the data, or raise "
                "stability.give_up_after"
            )

    def evaluated(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Writes an evaluation's line and event."""
        self._write({"step": step, "eval": results, "time": time.time()})
        self.event("evaluated", step, **{name: r.get("loss") for name, r in results.items()})
        for name, result in results.items():
            shown = "  ".join(f"{key} {value:.4f}" for key, value in result.items() if key != "tokens")
            self.progress.message(f"step {step}  eval {name}: {shown}  tokens {result['tokens']:.0f}")


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The step's device values as the numbers of a metrics line."""
    record: dict[str, Any] = {
        "loss": float(values["loss"]),
        "tokens": float(values["tokens"]),
        "tokens_seen": float(np.sum(values["tokens_seen"], dtype=np.float64)),
        "grad_norm": float(values["grad_norm"]),
        "learning_rate": float(values["learning_rate"]) if "learning_rate" in values else None,
        "loss_scale": float(values.get("loss_scale", 1.0)),
    }
    if "overflows" in values:
        record["overflows"] = int(values["overflows"])
    if float(values["tokens"]) <= 0:
        record["loss"] = None
    for name, value in values.items():
        if name.startswith("extra/"):
            record[name.removeprefix("extra/")] = float(value)
    return record

"""The line a step: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from dsjax.observe.logs import users_metrics

# A pause shorter than this is not worth a line that says how long it took.
_WORTH_TELLING_SECONDS = 1.0
# Told in the metrics; a line has no room for each stage.
_OF_A_STAGE = re.compile(r"stage_\d+_seconds")
_USERS_SHOWN = 3
# What a live bar leaves out first where the terminal is too narrow for all.
_LEAST_WANTED = ("elapsed", "grad norm", "MFU", "rate", "users", "left")
_GAP = "  "


class _Console(Console):
    """A console that goes quiet when its reader goes away, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        _drop_stdout()


def _drop_stdout() -> None:
    """Sends stdout nowhere: what is left in its buffer would raise again when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Progress:
    """Shows how far a run is. Use it as a context manager.

    It goes to stdout.  A reader that goes away (``| head``) ends the showing, not the run.  Of metrics
    that the user's loss added, the first few are shown.

    Args:
      total: the run's last step.
      first: the step it starts from (0, or the step resumed from).
      mode: "rich": a live bar; "plain": a line an update; "none": nothing; "auto": rich on a terminal,
        plain elsewhere.
      enabled: False shows nothing (the processes other than 0).
      unit: what a step's weight counts, as in "tokens/s".
    """

    def __init__(
        self, total: int, first: int = 0, *, mode: str = "auto", enabled: bool = True, unit: str = "tokens"
    ):
        self._unit = unit
        self._total, self._step, self._first = total, first, first
        if mode == "auto":
            live = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
            mode = "rich" if live else "plain"
        self._mode = mode if enabled else "none"
        self._started = time.monotonic()
        self._first_update: tuple[int, float] | None = None
        self._record: Mapping[str, Any] = {}
        self._spinner: Spinner | None = None
        self._console = _Console(highlight=False, soft_wrap=True)
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        self._started = time.monotonic()
        if self._mode == "rich":
            self._live = Live(
                get_renderable=self._render, console=self._console, refresh_per_second=4, transient=False
            )
            self._live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def update(self, step: int, record: Mapping[str, Any]) -> None:
        """Shows a step's metrics (a line of metrics.jsonl)."""
        now = time.monotonic()
        if self._first_update is None:
            self._first_update = (step, now)
        self._step, self._record = step, record
        if self._mode == "plain":
            self._line(_GAP.join(self._facts().values()))

    def gone_back(self) -> None:
        """The run goes on from an earlier step: the pace is measured anew."""
        self._first_update = None

    def message(self, text: str) -> None:
        """Shows a line of text, above the bar where there is one."""
        if self._mode == "rich":
            self._console.print(Text(text))
        elif self._mode == "plain":
            self._line(text)

    @contextlib.contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """Says that something else than a step is going on while the code inside runs."""
        began = time.monotonic()
        self._spinner = Spinner("dots", Text(text))
        if self._mode == "plain":
            self._line(f"{text} ...")
        try:
            yield
        finally:
            self._spinner = None
        seconds = time.monotonic() - began
        if seconds >= _WORTH_TELLING_SECONDS:
            self.message(f"{text} took {_duration(seconds)}")

    # ---- what is shown -------------------------------------------------------------------------

    def _left(self) -> float | None:
        """Seconds to the last step, at the pace since the first update, pauses included."""
        if self._first_update is None:
            return None
        step, since = self._first_update
        if self._step > step:
            pace = (time.monotonic() - since) / (self._step - step)
        else:
            pace = self._record.get("step_seconds") or math.nan
        left = pace * (self._total - self._step)
        return left if math.isfinite(left) else None

    def _facts(self) -> dict[str, str]:
        """What is known of the newest step, in the order shown."""
        record = self._record
        facts = {"percent": f"{self._percent():5.1f}%", "step": self._step_text()}
        facts["loss"] = f"loss {_number(record.get('loss'), '.4f')}"
        users = [item for item in users_metrics(record).items() if not _OF_A_STAGE.fullmatch(item[0])]
        users = users[:_USERS_SHOWN]
        if users:
            facts["users"] = _GAP.join(f"{name} {_number(value, '.4g')}" for name, value in users)
        facts["grad norm"] = f"grad norm {_number(record.get('grad_norm'), '.3g')}"
        facts["rate"] = f"{_number(record.get('tokens_per_second'), ',.0f')} {self._unit}/s"
        if record.get("mfu") is not None:
            facts["MFU"] = f"MFU {_number(100 * record['mfu'], '.1f')}%"
        facts["elapsed"] = f"elapsed {_duration(time.monotonic() - self._started)}"
        left = self._left()
        if left is not None:
            facts["left"] = f"left {_duration(left)}"
        return facts

    def _step_text(self) -> str:
        return f"step {self._step:>{len(str(self._total))}}/{self._total}"

    def _percent(self) -> float:
        # Rounded down: 100% is said of the last step only.
        return math.floor(1000 * self._step / max(self._total, 1)) / 10

    def _render(self) -> RenderableType:
        columns = self._console.width
        facts = (
            self._facts()
            if self._record
            else {"percent": f"{self._percent():5.1f}%", "step": self._step_text()}
        )
        percent = facts.pop("percent")
        bar = ProgressBar(total=max(self._total, 1), completed=self._step, width=20 if columns >= 100 else 10)
        # One line whatever the width: a bar that wraps leaves its remains above itself.
        room = columns - len(percent) - (bar.width or 0) - 2 * len(_GAP)
        for name in _LEAST_WANTED:
            if len(_GAP.join(facts.values())) > room:
                facts.pop(name, None)
        line = Table.grid(padding=(0, len(_GAP)))
        said = Text(_GAP.join(facts.values()), no_wrap=True, overflow="crop")
        line.add_row(Text(percent, style="bold"), bar, said)
        return line if self._spinner is None else Group(line, self._spinner)

    def _line(self, text: str) -> None:
        try:
            print(text, flush=True)
        except BrokenPipeError:
            self._mode = "none"
            _drop_stdout()


def _number(value: Any, form: str) -> str:
    return "n/a" if value is None else format(float(value), form)


def _duration(seconds: float) -> str:
    """Seconds as a person says them: 4.2 s, 3:07, 2:03:07, 4 d 2:03:07."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
    return f"{days} d {clock}" if days else clock

"""Ten kills of two processes: nothing is lost, nothing repeated, no loss is another."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path

import pytest
from rich.progress import Progress

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_ten_kills_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    chaos = importlib.import_module("chaos")
    monkeypatch.setattr(chaos, "STEPS_A_KILL", 20)
    monkeypatch.setattr(chaos, "LONGEST_START", 4.0)
    facts = chaos.campaign(2, 10, random.Random(0), tmp_path, Progress(disable=True)).facts
    sys.modules.pop("chaos")
    assert facts["exit_code"] == 0 and facts["kills"] == 10 and facts["resumed"] > 0, facts
    assert facts["max_steps_lost"] <= chaos.EVERY, facts
    assert facts["loss_mismatches"] == facts["examples_lost"] == facts["examples_repeated"] == 0, facts

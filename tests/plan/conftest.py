"""Needs of the tests of planning."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_measured_times(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that were recorded on this machine change no test."""
    monkeypatch.setenv("DSJAX_MEASURED_DIR", str(tmp_path_factory.mktemp("measured")))

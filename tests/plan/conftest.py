"""Needs of the tests of planning."""

from __future__ import annotations

import pytest

from dsjax import aot


@pytest.fixture(scope="session")
def gpu_compiler() -> None:
    """Skips where nothing can be compiled for a GPU that is not here."""
    missing = aot.missing_for("gpu")
    if missing:
        pytest.skip(missing)

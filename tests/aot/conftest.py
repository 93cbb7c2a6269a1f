"""Needs of the tests of ahead-of-time compiling."""

from __future__ import annotations

import jax
import pytest

from dsjax import aot


@pytest.fixture(scope="session")
def cpu8() -> aot.Target:
    """Eight simulated CPU devices."""
    if len(jax.devices("cpu")) < 8:
        pytest.skip("jax has fewer than eight simulated CPU devices here")
    return aot.parse_target("cpu:8")

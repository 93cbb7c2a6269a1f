"""Eight simulated devices and a compilation cache for every test."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

CACHE = Path(os.environ.get("DSJAX_TEST_CACHE", Path(tempfile.gettempdir()) / "dsjax-test-cache"))

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(CACHE / jax.__version__))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_threefry_partitionable", True)


@pytest.fixture(scope="session")
def gpu_compiler() -> None:
    """Skips where nothing can be compiled for a GPU that is not here."""
    from dsjax import aot

    missing = aot.missing_for("gpu")
    if missing:
        pytest.skip(missing)

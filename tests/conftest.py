"""Eight simulated devices and a compilation cache for every test."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# XLA ends a process in which simulated devices wait a minute for each other, as they do on a busy machine.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_collective_call_terminate_timeout_seconds=600"
)

import jax
import pytest

CACHE = Path(os.environ.get("DSJAX_TEST_CACHE", Path(tempfile.gettempdir()) / "dsjax-test-cache"))

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
jax.config.update("jax_compilation_cache_dir", str(CACHE / jax.__version__))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_threefry_partitionable", True)
jax.devices()  # reads the flags; the processes that tests start have their own
os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].rpartition(" ")[0]


@pytest.fixture(scope="module", autouse=True)
def programs_are_let_go() -> Iterator[None]:
    """What a file's tests have traced and compiled would fill the memory of a machine by the end: 10 GB a worker."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def gpu_compiler() -> None:
    """Skips where nothing can be compiled for a GPU that is not here."""
    from dsjax import aot

    missing = aot.missing_for("gpu")
    if missing:
        pytest.skip(missing)

"""What jax's plugin for NVIDIA GPUs says where there is no GPU, and how it is kept from the terminal.

The plugin is installed on machines without a GPU to compile for those that have one. It writes to the
file descriptor that its driver is missing, before any setting of its own counts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator


def cuda_plugin() -> str | None:
    """The number of the CUDA that jax's plugin here is for; None where there is none."""
    return next((n for n in ("12", "13") if installed(f"jax_cuda{n}_plugin")), None)


def has_driver() -> bool:
    """Whether this machine has a driver for NVIDIA GPUs."""
    return os.path.exists("/dev/nvidiactl")


def installed(name: str) -> bool:
    """Whether a module could be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps from the terminal what is written to standard error; DSJAX_DEBUG=1 lets it through."""
    if os.environ.get("DSJAX_DEBUG") == "1":
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def plugin_without_driver() -> bool:
    """Whether jax, imported or started here, would speak of a driver that nobody expects."""
    return cuda_plugin() is not None and not has_driver()

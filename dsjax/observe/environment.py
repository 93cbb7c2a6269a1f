"""What a run ran on: versions, devices, host. No secrets: of the environment only what steers jax."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("dsjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "libtpu")


def environment() -> dict[str, Any]:
    """Versions, devices and host of this process, as JSON takes them.

    Starts jax's backend, if nothing has yet.
    """
    import jax
    import psutil

    devices = jax.devices()
    return {
        "python": platform.python_version(),
        "versions": _versions(),
        "platform": jax.default_backend(),
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "local_devices": len(jax.local_devices()),
        "processes": jax.process_count(),
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "commit": _commit(Path(__file__).parents[2]),
        "directory_commit": _commit(Path.cwd()),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "CUDA_VISIBLE_DEVICES") or name.startswith("JAX_")
        },
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES + _PLUGINS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            if name not in _PLUGINS:
                found[name] = "not installed as a package"
    return found


def _commit(directory: Path) -> str | None:
    """The git commit of a directory that is one's root, with + where files differ; None elsewhere."""
    if not (directory / ".git").exists():
        return None

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(directory), *words], capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None

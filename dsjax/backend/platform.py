"""Readies jax before its backend starts: platform, simulated devices, compilation cache, cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from dsjax.backend.drivers import plugin_without_driver, quiet
from dsjax.config.schema import RuntimeConfig
from dsjax.errors import ConfigError

_ADVICE = {
    "gpu": "no GPU that jax can use was found; see whether nvidia-smi lists one, install the GPU build "
    "(pip install 'dsjax[gpu]'), or set runtime.platform=cpu",
    "tpu": "no TPU that jax can use was found; install libtpu (pip install 'jax[tpu]') on a TPU host, or "
    "set runtime.platform=cpu",
}

_PATIENCE = "xla_cpu_collective_call_terminate_timeout_seconds"
_PATIENT_SECONDS = 600


def setup(runtime: RuntimeConfig) -> None:
    """Applies the section `runtime` and joins the cluster that the environment describes.

    Call it before anything asks jax for a device.  Calling it again with the same settings does
    nothing; where jax has started already, settings that came too late are refused.

    Raises:
      ConfigError: the platform is not there, the settings came after jax had started with others, or
        XLA_FLAGS holds what XLA does not take.
      InternalError: another process of the cluster did not come in time.
    """
    _quieten()
    if os.environ.get("XLA_FLAGS", "").strip() and not ("jax" in sys.modules and _started()):
        _try_flags()
    with quiet() if plugin_without_driver() else contextlib.nullcontext():
        import jax

    platform = _platform(runtime)
    if _started():
        _check_started(jax, runtime, platform)
    else:
        _configure(jax, runtime, platform)
    _compilation_cache(jax, runtime.compilation_cache)
    if runtime.distributed == "auto":
        _join(jax, runtime)
    if plugin_without_driver():
        with quiet(), contextlib.suppress(RuntimeError):  # a platform that is not there is told of below
            jax.local_devices()
    if platform in _ADVICE:
        _check_there(jax, platform)


def _platform(runtime: RuntimeConfig) -> str:
    """The platform asked for; simulated devices are CPU devices."""
    if runtime.cpu_devices is None:
        return runtime.platform
    if runtime.platform in ("gpu", "tpu"):
        raise ConfigError(
            f"runtime.cpu_devices: simulates devices on the CPU, but runtime.platform is {runtime.platform}; "
            "leave one of them out"
        )
    return "cpu"


def _quieten() -> None:
    """Keeps the libraries below jax to errors; a user's own setting wins."""
    if os.environ.get("DSJAX_DEBUG") == "1":
        return
    # Read when jax is imported; 2 is errors only.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    for name in ("absl", "orbax", "jax._src.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _try_flags() -> None:
    """Starts jax in another process first: XLA ends the one in which it meets a flag that it does not know."""
    start = "import jax; jax.config.update('jax_platforms', 'cpu'); jax.devices()"
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=False)
    said = [
        re.sub(r"^[EF]\d{4} .*?\] ", "", line)
        for line in done.stderr.splitlines()
        if re.match(r"[EF]\d{4} .*flag", line, re.IGNORECASE)
    ]
    if done.returncode and said:
        raise ConfigError(
            f"XLA_FLAGS: {said[0].removesuffix('.')}; correct it in the environment, or unset it"
        )


def _started() -> bool:
    from jax._src import xla_bridge  # jax has no public question for this

    return bool(xla_bridge.backends_are_initialized())


def _check_started(jax: Any, runtime: RuntimeConfig, platform: str) -> None:
    late = "jax has started already; call this before anything asks jax for a device"
    faults = []
    if platform != "auto" and jax.default_backend() != platform:
        faults.append(
            f"runtime.platform: {platform} was asked for but runs on {jax.default_backend()}: {late}"
        )
    here = len(jax.local_devices())
    if runtime.cpu_devices is not None and not faults and here != runtime.cpu_devices:
        faults.append(
            f"runtime.cpu_devices: {runtime.cpu_devices} were asked for but there are {here}: {late}"
        )
    if faults:
        raise ConfigError(faults)


def _configure(jax: Any, runtime: RuntimeConfig, platform: str) -> None:
    if platform == "gpu":
        jax.config.update("jax_platforms", _gpu_platforms())
    elif platform != "auto":
        # The CPU stays beside the accelerator, for what is made on the host.
        jax.config.update("jax_platforms", "cpu" if platform == "cpu" else f"{platform},cpu")
    if runtime.cpu_devices is not None:
        jax.config.update("jax_num_cpu_devices", runtime.cpu_devices)
        _be_patient()


def _be_patient() -> None:
    """Simulated devices share few cores: one may wait long for the others, which XLA takes for a deadlock.

    It then ends the process, after a minute by default.  Only the environment is heeded here, not `compiler_options`.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _PATIENCE not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{_PATIENCE}={_PATIENT_SECONDS}".strip()


def _gpu_platforms() -> str:
    from importlib.util import find_spec

    rocm = any(find_spec(f"jax_rocm{n}_plugin") for n in (60, 7))
    return "rocm,cpu" if rocm else "cuda,cpu"


def _check_there(jax: Any, platform: str) -> None:
    try:
        there = jax.default_backend() == platform
    except RuntimeError:
        there = False
    if not there:
        raise ConfigError(f"runtime.platform: {_ADVICE[platform]}")


def _compilation_cache(jax: Any, place: str | None) -> None:
    """Sets the directory of compiled programs; one that cannot be written costs time, not the run."""
    if place is None:
        jax.config.update("jax_compilation_cache_dir", None)
        return
    # An address, of what cuts fp8 products over devices: with it each process would have keys of its own.
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
    if place == "auto":
        if jax.config.jax_compilation_cache_dir:  # the user's own, by jax's settings
            return
        import platformdirs

        place = str(Path(platformdirs.user_cache_dir("dsjax")) / "xla")
    directory = Path(place).expanduser().absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError(None, "it cannot be written")
    except OSError as error:
        _note(
            f"runtime.compilation_cache: {directory}: {error.strerror}; compiled programs are not kept, so "
            "each start compiles again"
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _join(jax: Any, runtime: RuntimeConfig) -> None:
    from dsjax.launch.distributed import detect, join

    cluster = detect(os.environ)
    if cluster is None:
        return
    if _started() and not jax.distributed.is_initialized():
        raise ConfigError(
            f"runtime.distributed: {cluster.source}: a cluster of {cluster.num_processes} processes, but jax "
            "has started already; call this before anything asks jax for a device, or set it to none"
        )
    join(cluster, runtime.distributed_timeout)


def _note(text: str) -> None:
    print(f"dsjax: {text}", file=sys.stderr, flush=True)

"""`dsjax doctor`: what is here, and what will and will not work with it.

Everything is gathered into one plain report first; tables and --json show the same report.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dsjax.errors import ConfigError, InputError

Report = dict[str, Any]
Rows = list[dict[str, Any]]

GIB = 1024**3
LITTLE_DISK = 5 * GIB
PROBE_BYTES, PROBE_BLOCK, PROBE_SECONDS = 64 << 20, 4 << 20, 1.0
# What an extra is for, in the order of pyproject.toml.
EXTRAS = {
    "gpu": "training on NVIDIA GPUs",
    "aot": "compiling for the GPUs of another machine",
    "remote": "checkpoint.remote.urls",
    "ray": "dsjax.launch.ray",
    "hub": "models and tokenizers named hf://",
    "parquet": "data.kind parquet",
    "track": "observe.tensorboard, observe.wandb, observe.prometheus_port",
    "dev": "the tests of dsjax itself",
}
# Those that settings ask for; GPUs have verdicts of their own.
USERS_EXTRAS = ("remote", "hub", "parquet", "track")
# What steers jax and dsjax, and what is known to break CUDA.
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
PREFIXES = ("JAX_", "XLA_PYTHON_CLIENT_", "DSJAX_", "NCCL_")


def doctor(as_json: bool = False) -> int:
    """Show what this machine has and what follows from it; 0 where nothing is broken.

    Args:
      as_json: print the report as one JSON object instead of tables.

    Raises:
      InputError: the installation is broken; a line for each thing to mend (after the report).
    """
    report = examine()
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _show(report, Console(soft_wrap=True, highlight=False))
    broken = [verdict["text"] for verdict in report["verdicts"] if verdict["level"] == "broken"]
    if broken:
        raise InputError(broken)
    return 0


def examine() -> Report:
    """The whole report, as JSON takes it; starts jax's backend."""
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name in VARIABLES or name.startswith(PREFIXES)
    }
    # The probe must not take the GPU's memory from whoever is using it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    report: Report = {
        "versions": _versions(),
        "extras": _extras(),
        "host": _host(),
        "variables": variables,
        "devices": _devices(),
        "nvidia": _nvidia(),
        "disks": [_disk("runs", Path.cwd()), _disk("cache", _cache_directory())],
    }
    found = report["devices"]["platform"]
    report["xla"] = _xla(found) if found else {"preset": None, "options": {}, "notes": []}
    report["cluster"] = _cluster()
    report["verdicts"] = [{"level": level, "text": text} for level, text in _verdicts(report)]
    return report


# ---- what is installed -------------------------------------------------------------------------


def _versions() -> Rows:
    """dsjax and each package it always needs: version, what is wanted, what is wrong."""
    rows: Rows = []
    rows.append({"name": "python", "version": platform.python_version(), "wants": ">=3.11", "fault": None})
    try:
        rows.append({"name": "dsjax", "version": version("dsjax"), "wants": "", "fault": None})
    except PackageNotFoundError:
        said = "dsjax is not installed, only its source is here: run pip install -e . in its directory"
        return [*rows, {"name": "dsjax", "version": None, "wants": "", "fault": said}]
    for requirement in _required_by("dsjax", ""):
        fault = next(_faults(requirement), None)
        rows.append(
            {
                "name": requirement.name,
                "version": _installed(requirement.name),
                "wants": str(requirement.specifier),
                "fault": fault,
            }
        )
    return rows


def _extras() -> Rows:
    """Each extra: what it is for, and what of it is missing; nothing where only the source is here."""
    if _installed("dsjax") is None:
        return []
    rows = []
    for extra, purpose in EXTRAS.items():
        missing = [fault for requirement in _required_by("dsjax", extra) for fault in _faults(requirement)]
        rows.append({"name": extra, "for": purpose, "missing": missing})
    return rows


def _required_by(package: str, extra: str) -> list[Any]:
    """What an installed package requires of other packages here: always, or for one of its extras alone."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in requires(package) or []]
    except PackageNotFoundError:
        return []

    def applies(requirement: Requirement, extra: str) -> bool:
        return requirement.marker is None or requirement.marker.evaluate({"extra": extra})

    return [r for r in requirements if applies(r, extra) and not (extra and applies(r, ""))]


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _faults(requirement: Any) -> Iterator[str]:
    """What is missing or of another version for a requirement to hold, its own extras included."""
    found = _installed(requirement.name)
    wanted = f"{requirement.name}{requirement.specifier}"
    if found is None:
        yield f"{requirement.name} is not installed: run pip install '{wanted}'"
    elif not requirement.specifier.contains(found, prereleases=True):
        yield f"{requirement.name} {found} is installed, not {wanted}: run pip install '{wanted}'"
    for extra in sorted(requirement.extras):
        for inner in _required_by(requirement.name, extra):
            yield from _faults(inner)


# ---- the machine -------------------------------------------------------------------------------


def _host() -> dict[str, Any]:
    import psutil

    memory = psutil.virtual_memory()
    return {
        "name": platform.node(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "memory_limit_bytes": _container_limit(),
    }


def _container_limit() -> int | None:
    """Memory that this process's container may use (cgroup v2, then v1); None where it is not limited."""
    for place in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(place).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:  # v1 writes "no limit" as a huge number
            return int(text)
    return None


def _devices() -> dict[str, Any]:
    """What jax can compute on, or why it cannot."""
    for module in ("jax", "flax.nnx", "optax", "orbax.checkpoint", "grain"):
        try:
            import_module(module)
        except Exception as error:  # a broken package can raise anything
            return {"platform": None, "error": f"cannot import {module}: {_line(error)}", "devices": []}
    import jax

    from dsjax.backend.platform import setup
    from dsjax.config.schema import RuntimeConfig

    try:
        setup(RuntimeConfig(distributed="none", compilation_cache=None))
        found = jax.local_devices()
    except Exception as error:  # jax has no type of its own for a backend that does not start
        return {"platform": None, "error": f"jax finds no device: {_line(error)}", "devices": []}
    rows = []
    for device in found:
        stats = device.memory_stats() or {}
        rows.append(
            {
                "id": device.id,
                "kind": device.device_kind,
                "memory_bytes": stats.get("bytes_limit"),
                "memory_in_use_bytes": stats.get("bytes_in_use"),
            }
        )
    return {"platform": jax.default_backend(), "error": None, "devices": rows}


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def _nvidia() -> dict[str, Any] | None:
    """NVIDIA's own view of the GPUs and of the links between them; None where its tool is not here."""
    if shutil.which("nvidia-smi") is None:
        return None
    fields = "name,driver_version,memory.total,memory.used,mig.mode.current"
    listed, error = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")
    links, _ = _output("nvidia-smi", "topo", "-m")
    return {"gpus": listed.splitlines(), "links": links, "error": error}


def _output(*command: str) -> tuple[str, str | None]:
    """What a command prints, and why it failed, if it did."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", _line(error)
    if done.returncode:
        return "", " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
    return done.stdout.strip(), None


# ---- disks -------------------------------------------------------------------------------------


def _cache_directory() -> Path:
    import platformdirs

    return platformdirs.user_cache_path("dsjax")


def _disk(purpose: str, directory: Path) -> dict[str, Any]:
    """Free bytes and speed of the file system where `directory` is or will be made."""
    place = next(p for p in (directory, *directory.parents) if p.is_dir())
    row: dict[str, Any] = {"for": purpose, "path": str(directory), "filesystem": _filesystem(place)}
    try:
        free = shutil.disk_usage(place).free
        speed = _write_speed(place, min(PROBE_BYTES, free // 2))
    except OSError as error:
        none = {"free_bytes": None, "write_bytes_per_second": None}
        return {**row, **none, "error": error.strerror or str(error)}
    return {**row, "free_bytes": free, "write_bytes_per_second": speed, "error": None}


def _write_speed(directory: Path, limit: int) -> float | None:
    """Bytes a second that reach the disk, by writing at most `limit`; the file is gone afterwards."""
    block = os.urandom(PROBE_BLOCK)  # random: some file systems compress
    written = 0
    with tempfile.TemporaryFile(dir=directory) as file:
        started = time.monotonic()
        while written + len(block) <= limit and time.monotonic() - started < PROBE_SECONDS:
            written += file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return written / (time.monotonic() - started) if written else None


def _filesystem(directory: Path) -> str | None:
    import psutil

    where = directory.resolve()
    mounts = [m for m in psutil.disk_partitions(all=True) if where.is_relative_to(m.mountpoint)]
    return max(mounts, key=lambda m: len(m.mountpoint)).fstype if mounts else None


# ---- what dsjax makes of it --------------------------------------------------------------------


def _xla(found: str) -> dict[str, Any]:
    """The XLA options that runtime.xla_preset auto chooses for a platform, from which preset, and why."""
    from dsjax.backend.xla_options import choose

    chosen = choose(found)
    return {"preset": chosen.preset, "options": dict(chosen.options), "notes": list(chosen.notes)}


def _cluster() -> dict[str, Any] | None:
    """The cluster that the environment describes; None where this process would run alone."""
    from dsjax.launch.distributed import detect

    try:
        found = detect(os.environ)
    except ConfigError as error:
        return {"error": "; ".join(error.faults)}
    return None if found is None else {name: str(value) for name, value in vars(found).items()}


def _verdicts(report: Report) -> Iterator[tuple[str, str]]:
    """What follows, each with its level: works, note (something is limited) or broken."""
    for row in report["versions"]:
        if row["fault"]:
            yield "broken" if row["name"] != "dsjax" else "note", row["fault"]
    devices, nvidia = report["devices"], report["nvidia"]
    if devices["error"]:
        yield "broken", devices["error"]
    elif devices["platform"] == "cpu":
        yield "works", "training on the CPU, in fp32; runtime.cpu_devices simulates several devices"
    else:
        kinds = sorted({row["kind"] for row in devices["devices"]})
        yield "works", f"training on {len(devices['devices'])} x {', '.join(kinds)}, in bf16"
    yield from _gpu_verdicts(devices["platform"], nvidia, report["variables"])
    for row in report["disks"]:
        setting = "run.dir" if row["for"] == "runs" else "data.cache_dir and runtime.compilation_cache"
        if row["error"]:
            yield "note", f"{row['path']} cannot be written ({row['error']}); set {setting} to another place"
        elif row["free_bytes"] < LITTLE_DISK:
            free = _size(row["free_bytes"])
            yield "note", f"{row['path']} has {free} free; free some space or set {setting} to another disk"
    for row in report["extras"]:
        if row["missing"] and row["name"] in USERS_EXTRAS:
            why = ", ".join(fault.partition(":")[0] for fault in row["missing"])
            yield "note", f"will not work: {row['for']} ({why}); pip install 'dsjax[{row['name']}]' mends it"
    cluster = report["cluster"]
    if cluster is not None and "error" in cluster:
        yield "broken", cluster["error"]
    elif cluster is not None:
        yield (
            "works",
            f"this is process {cluster['process_id']} of {cluster['num_processes']} ({cluster['source']})",
        )


def _gpu_verdicts(
    found: str | None, nvidia: Mapping[str, Any] | None, variables: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    if nvidia is None or found == "gpu":
        return
    if nvidia["error"]:
        yield "note", f"nvidia-smi fails, so GPUs will not work: {nvidia['error']}"
    elif nvidia["gpus"] and variables.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        yield "note", f"JAX_PLATFORMS={variables['JAX_PLATFORMS']} hides {len(nvidia['gpus'])} GPUs from jax"
    elif nvidia["gpus"]:
        also = "; LD_LIBRARY_PATH may hide its CUDA libraries" if "LD_LIBRARY_PATH" in variables else ""
        yield (
            "note",
            f"jax does not use the {len(nvidia['gpus'])} GPUs here: pip install 'dsjax[gpu]'{also}",
        )


# ---- showing -----------------------------------------------------------------------------------


def _show(report: Report, console: Console) -> None:
    host, devices = report["host"], report["devices"]
    limit = host["memory_limit_bytes"]
    console.print(
        f"{host['system']}, {host['cpus_usable']} of {host['cpus']} CPUs, memory "
        f"{_size(host['memory_available_bytes'])} free of {_size(host['memory_bytes'])}"
        + (f", this container's limit {_size(limit)}" if limit else "")
    )
    _table(
        console,
        f"devices ({devices['platform'] or 'none'})",
        ("device", "kind", "memory", "in use"),
        [
            (row["id"], row["kind"], *(_size(row[key]) for key in ("memory_bytes", "memory_in_use_bytes")))
            for row in devices["devices"]
        ],
    )
    if report["nvidia"] is not None:
        _table(console, "nvidia-smi", ("GPU",), [(line,) for line in report["nvidia"]["gpus"]])
        console.print(report["nvidia"]["links"], markup=False)
    _table(
        console,
        "versions",
        ("package", "version", "dsjax takes", ""),
        [
            (row["name"], row["version"] or "-", row["wants"], "" if not row["fault"] else "wrong")
            for row in report["versions"]
        ],
    )
    _table(
        console,
        "extras",
        ("extra", "here", "for"),
        [(row["name"], "no" if row["missing"] else "yes", row["for"]) for row in report["extras"]],
    )
    _table(
        console,
        "disks",
        ("for", "path", "file system", "free", "write"),
        [
            (
                row["for"],
                row["path"],
                row["filesystem"] or "-",
                _size(row["free_bytes"]),
                row["error"] or f"{_size(row['write_bytes_per_second'])}/s",
            )
            for row in report["disks"]
        ],
    )
    _table(console, "variables", ("name", "value"), list(report["variables"].items()))
    preset = report["xla"]["preset"] or "none"
    title = f"XLA options (runtime.xla_preset: auto; preset {preset}; those that this jaxlib takes)"
    _table(console, title, ("option", "value"), list(report["xla"]["options"].items()))
    for note in report["xla"]["notes"]:
        console.print(note, markup=False)
    if report["cluster"] is not None:
        _table(console, "cluster", ("", ""), list(report["cluster"].items()))
    _table(console, "verdicts", ("", ""), [(v["level"], v["text"]) for v in report["verdicts"]])


def _table(console: Console, title: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    """Print a table, or nothing where it has no rows; its cells are text, never markup."""
    from rich.text import Text

    if not rows:
        return
    table = Table(
        *columns, title=title, title_justify="left", title_style="bold", box=None, show_header=any(columns)
    )
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console.print()
    console.print(table)


def _size(num_bytes: float | None) -> str:
    if num_bytes is None:
        return "-"
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"

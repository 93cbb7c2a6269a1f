"""A cluster that is not here: its chips, how they are linked, and devices to compile for."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from dsjax.aot.chips import Chip, Link, load_chips, unknown_chip
from dsjax.backend.drivers import cuda_plugin, has_driver, installed, quiet
from dsjax.errors import ConfigError
from dsjax.mesh import topology
from dsjax.mesh.topology import Level, Topology

INSTALL_AOT = "pip install 'dsjax[aot]'"
_FORMS = "8xH100 (devices x chip), 16x8xH100 (hosts x devices x chip), v5p:2x2x2 (a TPU slice) or cpu:8"
# More than the largest machines there are; a mistyped number should not build a list of devices.
_MOST_DEVICES = 1 << 17


@dataclass(frozen=True)
class Target:
    """A number of hosts with the same number of the same chips.

    Attributes:
      slice_shape: a TPU slice's dimensions in chips; None elsewhere.
    """

    hosts: int
    devices_per_host: int
    chip: Chip
    slice_shape: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.hosts * self.devices_per_host

    @property
    def name(self) -> str:
        """As it is written."""
        if self.slice_shape is not None:
            return f"{self.chip.name}:{'x'.join(map(str, self.slice_shape))}"
        if self.chip.kind == "cpu":
            return f"{self.chip.name}:{self.size}"
        hosts = f"{self.hosts}x" if self.hosts > 1 else ""
        return f"{hosts}{self.devices_per_host}x{self.chip.name}"

    @property
    def platform(self) -> str:
        """What jax lowers for: cuda, tpu or cpu."""
        return {"gpu": "cuda"}.get(self.chip.kind, self.chip.kind)

    @property
    def domain(self) -> int:
        """How many devices, counted from the first, the node's link joins (a rack, or a whole TPU slice)."""
        if self.slice_shape is not None:
            return self.size
        return max(self.devices_per_host, self.chip.domain or 0)

    @property
    def topology(self) -> Topology:
        """Which of its devices are near to each other, and over which links."""
        near, far = (
            topology.Link(link.bandwidth, link.latency) for link in (self.chip.node, self.chip.network)
        )
        if self.domain >= self.size:
            return Topology((), near)
        return Topology((Level("node", self.domain, near),) if self.domain > 1 else (), far, several=True)

    @property
    def doubt(self) -> str | None:
        """What is odd about the name: hosts of more GPUs than such hosts have; None where nothing is."""
        each, usual = self.devices_per_host, self.chip.devices
        if self.chip.kind != "gpu" or each <= usual:
            return None
        hosts = f"one host of {each}" if self.hosts == 1 else f"{self.hosts} hosts of {each}"
        said = f"{self.name}: {hosts}; {self.chip.name} hosts have {usual}"
        if each % usual:
            return said
        meant = self.size // usual
        return f"{said}: write {meant}x{usual}x{self.chip.name} if these are {meant} hosts"

    def devices(self) -> list[Any]:
        """Compile-only jax devices, those of a host adjacent (for cpu, simulated ones).

        Raises:
          ConfigError: the wheels that compile for this kind of chip are not installed, or jax has
            started with fewer simulated CPU devices.
        """
        return list(self._devices)

    @cached_property
    def _devices(self) -> tuple[Any, ...]:
        make = {"gpu": _gpus, "tpu": _tpus, "cpu": _cpus}[self.chip.kind]
        return tuple(make(self))

    def link_of(self, mesh: Any, axes: Iterable[str]) -> Link:
        """The slowest link that a group of devices over mesh axes uses.

        Args:
          mesh: a `jax.sharding.Mesh` over this target's devices in their order, or axis -> size.
          axes: names of mesh axes.

        Raises:
          ConfigError: the mesh has another number of devices, or no such axis.
        """
        return self.chip.network if self.crosses(mesh, axes) else self.chip.node

    def crosses(self, mesh: Any, axes: Iterable[str]) -> bool:
        """Whether groups of devices over mesh axes leave a node (see `link_of`)."""
        import numpy as np

        shape = dict(mesh if isinstance(mesh, Mapping) else mesh.shape)
        axes = list(axes)
        if math.prod(shape.values()) != self.size:
            raise ConfigError(
                f"the mesh has {math.prod(shape.values())} devices and {self.name} has {self.size}"
            )
        unknown = [axis for axis in axes if axis not in shape]
        if unknown:
            raise ConfigError(f"the mesh has no axis {', '.join(unknown)}; it has {', '.join(shape)}")
        node = np.arange(self.size).reshape(tuple(shape.values())) // self.domain
        along = tuple(i for i, axis in enumerate(shape) if axis in axes)
        return bool(along) and bool((node.max(axis=along) != node.min(axis=along)).any())


def parse_target(text: str, chips: Mapping[str, Chip] | None = None) -> Target:
    """A target from its name: `8xH100`, `16x8xH100`, `4x4xA100-40`, `v5p:2x2x2`, `cpu:8`.

    Args:
      chips: the known chips (`load_chips`); those that come with dsjax by default.

    Raises:
      ConfigError: the name is in none of these forms, or of a chip that is not known.
    """
    chips = load_chips() if chips is None else chips
    text = text.strip()
    name, colon, rest = text.partition(":")
    if colon:
        return _slice(text, _chip(name, chips), rest)
    found = re.fullmatch(r"(?:(\d{1,9})x)?(\d{1,9})x(.+)", text)
    if found is None:
        chip = next((c for c in chips.values() if c.name.lower() == text.lower()), None)
        said = f"says no number of devices; for one node write {chip.devices}x{chip.name}" if chip else (
            f"is not the name of a cluster; it takes {_FORMS}"
        )  # fmt: skip
        raise ConfigError(f"target: {text!r} {said}")
    chip = _chip(found.group(3), chips)
    if chip.kind != "gpu":
        example = f"{chip.name}:8" if chip.kind == "cpu" else f"{chip.name}:2x2x2"
        raise ConfigError(f"target: {text}: {chip.name} is written as {example}")
    target = Target(int(found.group(1) or 1), int(found.group(2)), chip)
    _check_size(text, target.size)
    return target


def _chip(name: str, chips: Mapping[str, Chip]) -> Chip:
    for known, chip in chips.items():
        if known.lower() == name.lower():
            return chip
    raise ConfigError(f"target: {unknown_chip(name, chips)}")


def _slice(text: str, chip: Chip, rest: str) -> Target:
    if chip.kind == "gpu":
        raise ConfigError(f"target: {text}: {chip.name} is written as {chip.devices}x{chip.name}")
    dims = [int(d) for d in rest.split("x")] if re.fullmatch(r"\d{1,9}(x\d{1,9}){0,2}", rest) else []
    flat = chip.kind == "cpu"
    if not dims or (flat and len(dims) != 1) or (not flat and len(dims) < 2):
        form = "a number of devices (cpu:8)" if flat else f"the slice's shape ({chip.name}:4x4 or 2x2x2)"
        raise ConfigError(f"target: {text}: after the colon stands {form}")
    size = math.prod(dims)
    _check_size(text, size)
    if flat:
        return Target(1, size, chip)
    per_host = math.gcd(chip.devices, size)
    return Target(size // per_host, per_host, chip, tuple(dims))


def _check_size(text: str, size: int) -> None:
    if not 0 < size <= _MOST_DEVICES:
        raise ConfigError(f"target: {text}: takes 1 to {_MOST_DEVICES} devices, got {size}")


# ---- devices ---------------------------------------------------------------------------------


def missing_for(kind: str) -> str | None:
    """What has to be installed before programs can be compiled for a kind of chip; None where nothing is."""
    absent: list[str] = []
    if kind == "tpu":
        absent = [] if installed("libtpu") else ["libtpu"]
    elif kind == "gpu":
        absent = [] if cuda_plugin() else ["jax-cuda12-plugin"]
        if not has_driver():  # a machine with a GPU has the toolkit that its jax was installed with
            wheels = {"nvidia-cuda-nvcc-cu12": "nvidia.cuda_nvcc", "nvidia-cudnn-cu12": "nvidia.cudnn"}
            absent += [name for name, module in wheels.items() if not installed(module)]
    if not absent:
        return None
    command = "pip install libtpu (the version that fits your jax)" if kind == "tpu" else INSTALL_AOT
    return f"compiling for a {kind.upper()} that is not here needs {', '.join(absent)}: {command}"


def _refuse_missing(kind: str) -> None:
    missing = missing_for(kind)
    if missing:
        raise ConfigError(missing)


def _gpus(target: Target) -> list[Any]:
    _refuse_missing("gpu")
    return list(_topology(f"1x{target.hosts}x{target.devices_per_host}", target_config(target.chip)).devices)


@cache
def _topology(shape: str, config: str) -> Any:
    import jax
    from jax.experimental import topologies

    def find() -> Any:
        return topologies.get_topology_desc(
            platform="cuda", topology_name=shape, target_config=config, topology=shape
        )

    with quiet(), _no_driver_expected(jax):
        try:
            return find()
        except NotImplementedError:
            # jax looked for plugins before and left this one out, for want of a driver.
            plugin = f"cuda{cuda_plugin()}"
            try:
                importlib.import_module(f"jax_plugins.xla_{plugin}").initialize()
                return find()
            except Exception as error:
                raise ConfigError(
                    f"jax {jax.__version__} does not take the jax-{plugin}-plugin {_version(plugin)} that is "
                    f"installed; the two have one version: {INSTALL_AOT}"
                ) from error


def _version(plugin: str) -> str:
    try:
        return importlib.metadata.version(f"jax-{plugin}-plugin")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


@contextlib.contextmanager
def _no_driver_expected(jax: Any) -> Iterator[None]:
    """The CUDA plugin asks for a driver unless the platforms to be used leave CUDA out."""
    before = jax.config.jax_platforms
    if before is None and not has_driver():
        jax.config.update("jax_platforms", "cpu")
    try:
        yield
    finally:
        jax.config.update("jax_platforms", before)


def _tpus(target: Target) -> list[Any]:
    _refuse_missing("tpu")
    from jax.experimental import topologies

    # Without this libtpu asks the metadata server of a cloud that this is not.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    dims = target.slice_shape or ()
    # A slice that is less than a host says so; otherwise libtpu takes hosts of its usual shape.
    part = {"chips_per_host_bounds": (*dims, 1, 1)[:3]} if target.size < target.chip.devices else {}
    try:
        with quiet():
            found = topologies.get_topology_desc(platform="tpu", topology_name=target.name, **part)
    except Exception as error:
        said = str(error).splitlines()[0][:160]
        raise ConfigError(f"target: {target.name}: libtpu does not know this slice ({said})") from None
    return list(found.devices)


def _cpus(target: Target) -> list[Any]:
    import jax

    try:
        here = jax.devices("cpu")
    except RuntimeError as error:
        raise ConfigError(f"target: {target.name}: jax has no CPU backend here ({error})") from None
    if len(here) < target.size:
        raise ConfigError(
            f"target: {target.name}: jax has {len(here)} CPU devices; set runtime.cpu_devices={target.size} "
            "(jax_num_cpu_devices) before jax starts"
        )
    return list(here[: target.size])


def target_config(chip: Chip) -> str:
    """XLA's description of a GPU, a GpuTargetConfigProto as text.

    Raises:
      ConfigError: the chip is not described to XLA.
    """
    xla = chip.xla
    if xla is None:
        raise ConfigError(f"chip {chip.name}: has no section xla, so that nothing can be compiled for it")
    major, minor = xla.capability.split(".")
    device = {
        "threads_per_block_limit": 1024, "threads_per_warp": 32, "shared_memory_per_block": 49152,
        "shared_memory_per_core": xla.shared_bytes_per_core, "threads_per_core_limit": xla.threads_per_core,
        "core_count": xla.cores, "fpus_per_core": xla.fpus_per_core, "block_dim_limit_x": 2147483647,
        "block_dim_limit_y": 65535, "block_dim_limit_z": 65535,
        "memory_bandwidth": round(chip.memory.bandwidth), "l2_cache_size": xla.l2_bytes,
        "clock_rate_ghz": xla.clock_ghz, "device_memory_size": chip.memory.bytes,
        "shared_memory_per_block_optin": xla.shared_bytes_optin, "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }  # fmt: skip
    fields = " ".join(f"{key}: {value}" for key, value in device.items())
    return (
        f"gpu_device_info {{ {fields} cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } runtime_version { major: 12 minor: 9 } '
        f"device_description_str: {json.dumps(xla.description)}"
    )

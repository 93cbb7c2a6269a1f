"""From settings, a layout and parameters to an exchange."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Sequence
from typing import Any

from dsjax.config.exchange import GradSyncConfig
from dsjax.grad_sync.codecs import Codec, make_codec
from dsjax.grad_sync.exchange import AXIS, Exchange, Tensor
from dsjax.grad_sync.route import choose_route
from dsjax.mesh import Layout, is_matrix, named_leaves
from dsjax.mesh.layout import axes_of_entry
from dsjax.mesh.topology import Topology, along, detected, given

_EMBEDDINGS = ("*embed*",)
# Groups of layers that are exchanged apart: each is compiled, and the first cannot begin before its layers are done.
_MOST_GROUPS = 8


def make_exchange(
    config: GradSyncConfig, layout: Layout, params: Any, stack: str | None, topology: Topology | None = None
) -> tuple[Exchange | None, list[str]]:
    """The exchange over `data`, None where there is one replica, and what was chosen, to be told.

    Args:
      params: abstract, trainable.
      stack: path of stacked layers whose gradients can be exchanged in groups; None: all at once.
      topology: which devices are near; by default as the config says or the devices do.

    Raises:
      ConfigError: a topology that does not fit the devices.
    """
    replicas = layout.axis_size(AXIS)
    if replicas == 1:
        alone = config.codec != "dense"
        return None, [_ALONE.format(codec=config.codec)] if alone else []
    mesh, codec = layout.mesh, make_codec(config)
    # A mesh of a plan by formulas has a shape and no devices: only those that are to be asked are needed.
    if config.topology:
        topology = given(config.topology, mesh.size)
    elif topology is None:
        topology = detected(list(mesh.devices.flat))
    leaves, levels = named_leaves(params), along(topology, mesh, AXIS)
    far = topology.several and levels[-1][1] == topology.link
    windows = (
        _windows(config, layout, leaves, stack) if config.overlap or (far and config.overlap is None) else ()
    )
    tensors = {}
    for path, leaf in leaves.items():
        tensors[path] = _tensor(config, layout, path, leaf, codec, windows if _within(path, stack) else ())
    numbers = sum(sum(t.numbers) for t in tensors.values() if t.coded) or 1
    route = choose_route(levels, numbers, codec, config.route)
    exchange = Exchange(route, codec, tensors, config, windows or None, layout.on_cpu)
    told = (topology.note, _told(config, exchange), *_idle(config, stack))
    return exchange, [note for note in told if note]


_ALONE = (
    "grad_sync.codec: {codec} has nothing to do, as there is one replica (mesh.data is 1): gradients are summed over "
    "fsdp as they are"
)


# Settings that only some codecs heed.
_HEEDED_BY = {
    "warmup_steps": ("int8", "int4", "e2m4", "topk", "topk_int4"),
    "block": ("int8", "int4", "e2m4", "topk_int4"),
    "stochastic": ("int8", "int4"),
    "hadamard": ("int8", "int4", "e2m4"),
    "fraction": ("topk", "topk_int4"),
    "feedback_decay": ("int8", "int4", "e2m4", "topk", "topk_int4"),
}
_DEFAULTS = GradSyncConfig()


def _without_effect(config: GradSyncConfig, names: Iterable[str], why: str) -> list[str]:
    """A note for people of those settings that were changed though they do nothing; none where there are none."""
    changed = [name for name in names if getattr(config, name) != getattr(_DEFAULTS, name)]
    verb = "has" if len(changed) == 1 else "have"
    return [f"grad_sync: {', '.join(changed)} {verb} no effect {why}"] if changed else []


def left_to_the_compiler(config: GradSyncConfig) -> list[str]:
    """Notes of settings of an exchange that is not made, as statistics of all replicas are wanted."""
    names = ("dense_dtype", "route", "topology", "overlap", "bucket_bytes")
    return _without_effect(
        config,
        names,
        "with codec dense on a model with BatchNorm statistics: the compiler adds its gradients up",
    )


def _idle(config: GradSyncConfig, stack: str | None) -> list[str]:
    """Notes of what the codec does not heed, and of groups of layers where there are none to be told apart."""
    unheeded = (name for name, codecs in _HEEDED_BY.items() if config.codec not in codecs)
    ungrouped = ["overlap"] if config.overlap and stack is None else []
    return [
        *_without_effect(config, unheeded, f"with codec {config.codec}"),
        *_without_effect(
            config, ungrouped, "with a pipeline, or a model that does not say which its layers are"
        ),
    ]


def _told(config: GradSyncConfig, exchange: Exchange) -> str:
    """What was chosen, for people; nothing where nothing but the usual."""
    route = exchange.route
    if config.codec == "dense" and len(route.parts) == 1:
        return ""
    coded = [t for t in exchange.tensors.values() if t.coded]
    every = sum(sum(t.numbers) for t in exchange.tensors.values())
    share = sum(sum(t.numbers) for t in coded) / every
    parts = " x ".join(map(str, reversed(route.parts)))
    forms = f"{config.codec} on {share:.0%} of the numbers" if config.codec != "dense" else "dense"
    residuals = ", error feedback" if exchange.keeps else ""
    warming = config.warmup_steps if coded else 0
    first = f", dense in the first {warming} steps" if warming else ""
    return f"gradients: {forms}{residuals}{first}, route {route.name} ({parts} replicas)"


def _within(path: str, stack: str | None) -> bool:
    return stack is not None and path.startswith(f"{stack}/")


def _tensor(
    config: GradSyncConfig, layout: Layout, path: str, leaf: Any, codec: Codec | None, windows: Sequence[int]
) -> Tensor:
    spec = layout.param_spec(path, leaf.shape)
    axes = tuple(
        (a, layout.axis_size(a)) for entry in spec for a in axes_of_entry(entry) if layout.axis_size(a) > 1
    )
    patterns = _EMBEDDINGS if config.dense is None else config.dense
    coded = (
        codec is not None
        and (not codec.lossy or math.prod(leaf.shape) >= config.min_size)
        and (not codec.lossy or is_matrix(layout.optimizer_names(path), len(leaf.shape)))
        and not (codec.lossy and any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns))
    )
    tensor = Tensor(tuple(leaf.shape), spec, axes, (), coded)
    rows = tensor.local[0] if leaf.shape else 1
    return Tensor(tensor.shape, spec, axes, tuple(windows) or (rows,), coded)


def _windows(
    config: GradSyncConfig, layout: Layout, leaves: dict[str, Any], stack: str | None
) -> tuple[int, ...]:
    """Layers of each group whose gradients fill a bucket; () where they are exchanged all at once."""
    stacked = {path: leaf for path, leaf in leaves.items() if _within(path, stack)}
    if not stacked:
        return ()
    depth = next(iter(stacked.values())).shape[0]
    tensors = [_tensor(config, layout, path, leaf, None, ()) for path, leaf in stacked.items()]
    if any(t.windows != (depth,) for t in tensors):
        return ()  # layers that are cut over an axis themselves cannot be told apart here
    each = 4 * sum(sum(t.numbers) for t in tensors) // depth
    size = max(1, min(depth, config.bucket_bytes // max(1, each)), math.ceil(depth / _MOST_GROUPS))
    if size >= depth:
        return ()
    first = depth % size
    return (*([first] if first else []), *[size] * (depth // size))

"""Words of a plan: mesh axes as a config has them, resources of a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dsjax.aot import Target

RESOURCES = {
    "compute": "compute",
    "memory": "device memory",
    "node": "links inside nodes",
    "network": "links between nodes",
}


def mesh_words(mesh: Mapping[str, int]) -> str:
    """Axes and their sizes, `tensor` as the pair of `mesh.tensor: [columns, rows]` where it is one."""
    sizes: dict[str, int | str] = dict(mesh)
    rows = sizes.pop("tensor_rows", 1)
    if rows != 1:
        sizes["tensor"] = f"[{mesh.get('tensor', 1)},{rows}]"
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items()) or "one device"


def axes_words(axes: Iterable[str], mesh: Mapping[str, int]) -> list[str]:
    """Names of axes: of a pair its columns or its rows, `tensor` where it is both.

    Args:
      axes: of `mesh`, an axis -> size.
    """
    names = list(axes)
    if mesh.get("tensor_rows", 1) == 1:
        return names
    if "tensor" in names and "tensor_rows" in names:
        return [name for name in names if name != "tensor_rows"]
    pair = {"tensor": "tensor columns", "tensor_rows": "tensor rows"}
    return [pair.get(name, name) for name in names]


def target_notes(target: Target) -> list[str]:
    """What is to be said of a cluster itself."""
    return [target.doubt] if target.doubt else []

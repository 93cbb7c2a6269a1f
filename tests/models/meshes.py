"""Meshes of eight simulated devices that cut every dimension at least once."""

from __future__ import annotations

from typing import Any

from dsjax.mesh import Layout, make_mesh

MESHES = {
    "data2_fsdp4": {"data": 2, "fsdp": 4},
    "fsdp2_context4": {"fsdp": 2, "context": 4},
    "data2_tensor4": {"data": 2, "tensor": 4},
    "fsdp2_context2_tensor2": {"fsdp": 2, "context": 2, "tensor": 2},
}


def layout(name: str, **settings: Any) -> Layout:
    """The layout of a mesh of this table."""
    return Layout(make_mesh(MESHES[name]), **settings)

"""Over which mesh axes each kind of operator is cut: matrices along two dimensions, the rest along one."""

from __future__ import annotations

from typing import Any

from dsjax.mesh import Layout
from dsjax.mesh.axes import SHARD_AXES
from dsjax.plan.words import axes_words


def placement(layout: Layout) -> dict[str, str]:
    """Kind of operator -> how it lies on the mesh, in words; nothing where there is one device."""
    if layout.mesh.size == 1:
        return {}
    rest, used = (layout.param_entries(("embed", "mlp"), without) for without in ((), SHARD_AXES))

    def cut(**dimensions: Any) -> str:
        told = []
        for name, axes in dimensions.items():
            names = axes_words((axes,) if isinstance(axes, str) else axes or (), layout.mesh.shape)
            if names:
                told.append(f"{name} over {' x '.join(names)}")
        return ", ".join(told) or "whole on every device"

    return {
        "matrices at rest (and their gradients, their optimizer state)": cut(rows=rest[0], columns=rest[1]),
        "matrices in products": cut(rows=used[0], columns=used[1]),
        "attention": cut(
            batch=layout.active("batch"), heads=layout.active("heads"), queries=layout.active("sequence")
        ),
        "norms, dropout, residual sums": cut(
            batch=layout.active("batch"), sequence=layout.active("residual"), features=layout.active("embed")
        ),
    }

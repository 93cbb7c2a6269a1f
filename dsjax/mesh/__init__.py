"""Named mesh axes and the rules that place parameters and activations on them."""

from dsjax.mesh.axes import (
    AXES,
    BATCH_AXES,
    batch_shards,
    devices_by_shard,
    divisors,
    make_mesh,
    process_rows,
    resolve_sizes,
    zigzag_order,
)
from dsjax.mesh.gather import gather_all, gathered
from dsjax.mesh.layout import (
    Layout,
    constrain,
    current_layout,
    manual,
    use_layout,
)
from dsjax.mesh.paths import is_matrix, map_named, named_leaves, path_name

__all__ = [
    "AXES",
    "BATCH_AXES",
    "Layout",
    "batch_shards",
    "constrain",
    "current_layout",
    "devices_by_shard",
    "divisors",
    "gather_all",
    "gathered",
    "is_matrix",
    "make_mesh",
    "manual",
    "map_named",
    "named_leaves",
    "path_name",
    "process_rows",
    "resolve_sizes",
    "use_layout",
    "zigzag_order",
]

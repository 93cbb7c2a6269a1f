"""Snapshots in the memory of the hosts: a tier that costs little, and outlives the processes."""

from dsjax.checkpoint.snapshots.file import StoredSnapshot, listing
from dsjax.checkpoint.snapshots.memory import MemorySnapshots, snapshot_directory

__all__ = ["MemorySnapshots", "StoredSnapshot", "listing", "snapshot_directory"]

"""Saving and restoring the state of a run, in tiers that offer the same few calls.

`snapshots` lie in the memory of the hosts, `disk` holds numbered Orbax checkpoints, `remote` copies of those in
object stores.
"""

from dsjax.checkpoint.disk import DiskCheckpoints
from dsjax.checkpoint.remote import RemoteCheckpoints
from dsjax.checkpoint.snapshots import MemorySnapshots
from dsjax.checkpoint.stored import StoredCheckpoint, listing

__all__ = ["DiskCheckpoints", "MemorySnapshots", "RemoteCheckpoints", "StoredCheckpoint", "listing"]

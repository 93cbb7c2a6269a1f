"""Saving and restoring the state of a run.

One tier so far: numbered Orbax checkpoints on disk.  Further tiers stand beside `disk` and offer
the same few calls.
"""

from dsjax.checkpoint.disk import DiskCheckpoints, StoredCheckpoint, listing

__all__ = ["DiskCheckpoints", "StoredCheckpoint", "listing"]

"""The k largest magnitudes without a sort, with error feedback, and their places as a bitmap."""

from pallas_kernels.top_k.api import key, pack_mask, scatter_from_mask, select, threshold

__all__ = ["key", "pack_mask", "scatter_from_mask", "select", "threshold"]

"""Exchanges of quantised values, packed in one buffer."""

from pallas_kernels.collectives.api import all_gather, exchange, reduce_scatter
from pallas_kernels.collectives.packed import pack, packed_bytes, unpack, unpack_sum

__all__ = ["all_gather", "exchange", "pack", "packed_bytes", "reduce_scatter", "unpack", "unpack_sum"]

"""Exchanges of quantised values, packed in one buffer (`block_quant.pack`)."""

from pallas_kernels.collectives.api import all_gather, exchange, reduce_scatter

__all__ = ["all_gather", "exchange", "reduce_scatter"]

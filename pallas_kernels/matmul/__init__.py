"""Matrix products with fused epilogues."""

from pallas_kernels.matmul.api import gated_matmul, matmul, quantised_matmul

__all__ = ["gated_matmul", "matmul", "quantised_matmul"]

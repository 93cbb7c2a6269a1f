"""Matrix products in fp8, scaled by blocks."""

from pallas_kernels.fp8_matmul.api import fp8_linear, fp8_matmul, quantise_activations, quantise_weights

__all__ = ["fp8_linear", "fp8_matmul", "quantise_activations", "quantise_weights"]

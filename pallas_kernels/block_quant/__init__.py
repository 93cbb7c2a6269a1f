"""Quantisation by blocks, with error feedback: int8, int4, e2m4 (7 bits) and fp8."""

from pallas_kernels.block_quant.api import FORMATS, code_bytes, decode, decode_sum, encode
from pallas_kernels.block_quant.packed import pack, packed_bytes, unpack, unpack_sum

__all__ = [
    "FORMATS",
    "code_bytes",
    "decode",
    "decode_sum",
    "encode",
    "pack",
    "packed_bytes",
    "unpack",
    "unpack_sum",
]

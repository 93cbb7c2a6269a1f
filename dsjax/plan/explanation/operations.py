"""What one operation of a jaxpr computes and moves: its kind, FLOPs, bytes read and written.

Bytes are those of the operation alone, as if it read its operands from memory and wrote its results
there: what fusing saves is counted from them.  What only renames, repeats or numbers (reshape,
broadcast, iota) moves nothing; what takes or sets a part of an array moves the part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsjax.aot.hlo import bits

MATMUL, CONVOLUTION, ATTENTION, KERNEL = "matmul", "convolution", "attention", "kernel"
ELEMENTWISE, CAST, REDUCTION, LAYOUT, FREE = "elementwise", "cast", "reduction", "layout", "free"
INDEXING, COLLECTIVE, RANDOM, SORT, OTHER = "indexing", "collective", "random", "sort", "other"
PRODUCTS = (MATMUL, CONVOLUTION)

_KINDS = {
    **dict.fromkeys(("dot_general", "ragged_dot", "ragged_dot_general", "scaled_matmul_wrapper"), MATMUL),
    "conv_general_dilated": CONVOLUTION,
    "convert_element_type": CAST,
    **dict.fromkeys(("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "iota", "stop_gradient", "copy",
                     "copy_p", "sharding_constraint", "optimization_barrier", "pvary", "pcast", "mesh_cast",
                     "bitcast_convert_type", "axis_index", "name", "split"), FREE),
    **dict.fromkeys(("transpose", "rev", "concatenate", "pad"), LAYOUT),
    **dict.fromkeys(("slice", "dynamic_slice", "gather", "dynamic_update_slice", "scatter", "scatter-add",
                     "scatter_add", "scatter-mul", "scatter-min", "scatter-max"), INDEXING),
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant",
                     "all_to_all", "reduce_scatter", "ppermute", "ragged_all_to_all", "reshard"), COLLECTIVE),
    **dict.fromkeys(("random_bits", "random_seed", "random_wrap", "random_unwrap", "random_fold_in",
                     "threefry2x32", "rng_bit_generator", "random_split"), RANDOM),
    **dict.fromkeys(("sort", "top_k", "approx_top_k"), SORT),
    **dict.fromkeys(("argmax", "argmin", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), REDUCTION),
    **dict.fromkeys(("pallas_call", "triton_kernel_call", "custom_partitioning", "ffi_call", "mosaic_gpu_p",
                     "tpu_custom_call", "pure_callback", "io_callback"), KERNEL),
}  # fmt: skip
_SHORT = {"bool": "pred", "complex64": "c64", "complex128": "c128"}


@dataclass(frozen=True)
class Array:
    """An array of a jaxpr: its element type as HLO writes it (`bf16`, `f32`, `s32`) and its dimensions."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> float:
        """Bytes, types of less than a byte packed."""
        return self.size * _bits(self.dtype) / 8


def _bits(dtype: str) -> int:
    try:
        return bits(dtype)
    except ValueError:
        return 64  # a random key: two words


def array_of(aval: Any) -> Array:
    """The array of an abstract value; what is none (a token) is empty."""
    return Array(short(getattr(aval, "dtype", "token")), tuple(getattr(aval, "shape", (0,))))


def short(dtype: Any) -> str:
    """An element type as HLO writes it."""
    name = str(dtype)
    if name in _SHORT:
        return _SHORT[name]
    for long, letter in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s")):
        if name.startswith(long):
            return letter + name.removeprefix(long).replace("_", "")
    return name


def kind_of(primitive: str, operands: Sequence[Array], results: Sequence[Array]) -> str:
    """The kind of a primitive, as the constants above name them."""
    if primitive in _KINDS:
        return _KINDS[primitive]
    if primitive.startswith("dot_product_attention"):
        return ATTENTION
    if primitive.startswith("reduce_") and primitive != "reduce_precision":
        return REDUCTION
    alike = len(results) == 1 and all(_spreads(a.shape, results[0].shape) for a in operands)
    return ELEMENTWISE if alike else OTHER


def _spreads(shape: tuple[int, ...], over: tuple[int, ...]) -> bool:
    """Whether an operand of a shape meets every element of a result: dimensions of 1 repeat."""
    return not shape or (
        len(shape) == len(over) and all(a in (1, b) for a, b in zip(shape, over, strict=True))
    )


def flops_of(
    kind: str, primitive: str, params: Any, operands: Sequence[Array], results: Sequence[Array]
) -> float:
    """FLOPs of one run.

    A multiply-add is two. An elementwise operation is one an element of its result, whatever function it
    is; a reduction one an element that it reads. Attention is two products forward and five backward, half
    of them under a causal mask. 0 where a kernel tells nothing.
    """
    if kind == MATMUL:
        return 2.0 * _matmul(primitive, params, operands, results)
    if kind == CONVOLUTION:
        features = params["dimension_numbers"].rhs_spec[0]
        return 2.0 * results[0].size * operands[1].size / operands[1].shape[features]
    if kind == ATTENTION:
        return _attention(primitive, params, operands)
    if kind == KERNEL:
        return float(getattr(params.get("cost_estimate"), "flops", 0) or 0)
    if kind == REDUCTION:
        return float(operands[0].size) if operands else 0.0
    return float(results[0].size) if kind == ELEMENTWISE else 0.0


def _matmul(primitive: str, params: Any, operands: Sequence[Array], results: Sequence[Array]) -> float:
    """Multiply-adds: of a ragged product each row meets the matrix of its own group only."""
    lhs = operands[0]
    if primitive == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return results[0].size * math.prod(lhs.shape[d] for d in contracted)
    if primitive.startswith("ragged_dot"):
        return lhs.size * results[0].shape[-1]
    return results[0].size * lhs.shape[-1]


def _attention(primitive: str, params: Any, operands: Sequence[Array]) -> float:
    """cuDNN's attention over query [b, s, n, h] and key [b, t, k, h], or both with heads before positions."""
    query, key = operands[0].shape, operands[1].shape
    if len(query) != 4 or len(key) != 4:
        return 0.0
    positions = 1 if params.get("layout", 0) == 0 else 2
    scores = query[0] * query[1] * query[2] * key[positions]
    share = 0.5 if "CAUSAL" in str(params.get("mask_type", "")) else 1.0
    return (5 if "bwd" in primitive else 2) * share * 2.0 * scores * query[3]


def bytes_of(
    kind: str, primitive: str, operands: Sequence[float], results: Sequence[float]
) -> tuple[float, float]:
    """Bytes read and bytes written by one run, from the bytes of its operands and of its results."""
    if kind == FREE:
        return 0.0, 0.0
    written = sum(results)
    if kind != INDEXING:
        return sum(operands), written
    if primitive == "dynamic_update_slice":
        return operands[1], operands[1]
    if primitive.startswith("scatter"):
        # What is added to is read as well.
        return operands[1] + operands[2] * (1 if primitive == "scatter" else 2), operands[2]
    return written + sum(operands[1:]), written

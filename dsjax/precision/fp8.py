"""Matrix products in fp8 (Micikevicius et al. 2022): operands rounded to 8 bits, sums in fp32.

What a scale belongs to is the setting `precision.fp8.scaling`:

* tensor: a whole operand. E4M3 forward, E5M2 for gradients; all three products of a layer are in fp8.
* delayed: likewise, but an activation's and a gradient's scale comes from the largest magnitudes of the steps before
  (`dsjax.precision.delayed`), so that nothing waits for one more pass over them.
* block: a 1 x 128 tile of an activation or gradient, a 128 x 128 block of a weight, all E4M3; a weight's gradient,
  which sums along what tiles do not follow, is a product in the compute type (DeepSeek-AI 2024, "DeepSeek-V3").

On GPUs from Ada on the operands of a product are fp8. Elsewhere the same rounded numbers are multiplied in a wider
type that holds them, and their products, exactly: the same result up to the order of sums, without the speed.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from dsjax.errors import ConfigError
from dsjax.mesh.cut_product import cut_product
from dsjax.mesh.remat import kept
from pallas_kernels import hardware
from pallas_kernels.fp8_matmul import api as fp8_matmul
from pallas_kernels.fp8_matmul import mosaic, triton
from pallas_kernels.matmul import scaling
from pallas_kernels.matmul.scaling import TILE, amax_of, scale_of, to_e4m3

Scaling = Literal["tensor", "block"]
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
# Below this a largest magnitude counts as this: its scale is far from subnormal, and one of zeros is no division by 0.
_LEAST = 1e-30


def has_fp8(generation: int) -> bool:
    """Whether GPUs of a generation (ten times the compute capability) multiply fp8 numbers."""
    return generation >= 89


@dataclass(frozen=True)
class Fp8Dot:
    """A `jax.lax.dot_general` that multiplies in fp8, for layers whose products can be given from outside.

    The contracted dimensions are the last of the left operand and the first of the right one, which is the weight.
    """

    scaling: Scaling = "tensor"

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """lhs [..., *k] times rhs [*k, ...], in the type of the operands or the preferred one.

        Raises:
          ConfigError: other dimensions are contracted, or there are batch dimensions.
        """
        contracted = contracted_of(lhs, dimension_numbers)
        dtype = preferred_element_type or jnp.result_type(lhs, rhs)
        if self.scaling == "block":
            return _by_block(contracted, dtype, lhs, rhs)
        return scaled_product(contracted, dtype, lhs, rhs, None)


def contracted_of(lhs: jax.Array, dimension_numbers: Any) -> int:
    """How many dimensions are contracted: the last of the left operand with the first of the right one.

    Raises:
      ConfigError: it is another product.
    """
    (left, right), batch = dimension_numbers
    count = len(left)
    left = tuple(d % lhs.ndim for d in left)
    if any(map(len, batch)) or (left, tuple(right)) != (
        tuple(range(lhs.ndim - count, lhs.ndim)),
        tuple(range(count)),
    ):
        raise ConfigError(
            f"precision: fp8 multiplies the last dimensions of an input by the first of a weight, and this layer asks "
            f"for {dimension_numbers}; leave it out by precision.table: {{its path: bf16}}"
        )
    return count


# ---- a scale for a whole operand -------------------------------------------------------------------


def scale_for(amax: jax.Array, dtype: Any) -> jax.Array:
    """The fp32 scale that brings a largest magnitude to the largest number of an fp8 type."""
    return jnp.maximum(amax.astype(jnp.float32), _LEAST) / float(jnp.finfo(dtype).max)


def rounded(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """x / scale in an fp8 type, ties to even; what is too large becomes the largest, NaN stays NaN."""
    top = float(jnp.finfo(dtype).max)
    part = x.astype(jnp.float32) / scale
    return jnp.where(jnp.isfinite(x), jnp.clip(part, -top, top), jnp.nan).astype(dtype)


def _times(
    a: jax.Array, b: jax.Array, scale: jax.Array, contracted: int, dtype: Any, exactly: bool
) -> jax.Array:
    """scale * a [*rows, *k] b [*k, *columns] of fp8 operands, made in a type: in it devices add up what each has.

    What the compiler cuts is the scaled product: of several that are added up it then sends the sum, once.

    Args:
      contracted: dimensions of k.
      exactly: sums are in fp32 throughout on Hopper, whose own have about 14 bits.
    """
    here = hardware.chip()
    native = here.platform == "gpu" and has_fp8(here.generation)
    wider = "" if native else "bfloat16" if here.platform in ("gpu", "tpu") else "float32"
    made = jnp.zeros((), dtype)
    how: dict[str, Any] = {"columns": b.ndim - contracted, "wider": wider, "exactly": exactly}
    if jax.sharding.get_abstract_mesh().manual_axes:
        return _local(a, b, scale, made, **how)
    return cut_product(_local, contracted, (sys.modules[__name__],), **how)(a, b, scale, made)


def _local(a: Any, b: Any, scale: Any, made: Any, columns: int, wider: str, exactly: bool) -> jax.Array:
    contracted = b.ndim - columns
    dimensions = (tuple(range(a.ndim - contracted, a.ndim)), tuple(range(contracted))), ((), ())
    precision = lax.Precision.HIGHEST if exactly and not wider else lax.Precision.DEFAULT
    if wider:
        a, b = a.astype(wider), b.astype(wider)
    y = lax.dot_general(a, b, dimensions, precision, preferred_element_type=jnp.float32)
    return (y * scale).astype(made.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def scaled_product(contracted: int, dtype: Any, x: jax.Array, w: jax.Array, given: Any) -> jax.Array:
    """x [..., *k] times w [*k, *n] in fp8, a scale an operand.

    Args:
      contracted: dimensions of k.
      dtype: of the result.
      given: (scale of x, scale of the result's gradient or 0, float32 []; zeros [2] whose gradient is the largest
        magnitude of that gradient, and 1); None, or a scale of 0: it is made from the operand.
    """
    return _scaled_fwd(contracted, dtype, x, w, given)[0]


def _scaled_fwd(contracted: int, dtype: Any, x: jax.Array, w: jax.Array, given: Any) -> tuple[jax.Array, Any]:
    x_scale = scale_for(amax_of(x, None), E4M3) if given is None else given[0]
    w_scale = scale_for(amax_of(w, None), E4M3)
    qx, qw = rounded(x, x_scale, E4M3), rounded(w, w_scale, E4M3)
    y = kept(_times(qx, qw, x_scale * w_scale, contracted, dtype, exactly=False))
    # Of the unrounded operands the types alone are needed.
    return y, (qx, x_scale, qw, w_scale, given, jnp.empty(0, x.dtype), jnp.empty(0, w.dtype))


def _scaled_bwd(contracted: int, dtype: Any, saved: Any, dy: jax.Array) -> tuple[Any, Any, Any]:
    qx, x_scale, qw, w_scale, given, x, w = saved
    made, lead = qw.ndim - contracted, qx.ndim - contracted
    largest = amax_of(dy, None).astype(jnp.float32)
    dy_scale = scale_for(largest, E5M2)
    if given is not None:
        dy_scale = jnp.where(given[1] > 0, given[1], dy_scale)
    qdy = rounded(dy, dy_scale, E5M2)
    dx = _times(qdy, _turned(qw, contracted), dy_scale * w_scale, made, x.dtype, exactly=True)
    dw = _times(_turned(qx, lead), qdy, x_scale * dy_scale, lead, w.dtype, exactly=True)
    back = None
    if given is not None:
        back = (jnp.zeros_like(given[0]), jnp.zeros_like(given[1]), jnp.stack([largest, jnp.ones(())]))
    return dx, dw, back


def _turned(x: jax.Array, first: int) -> jax.Array:
    """The first dimensions last."""
    return x.transpose(*range(first, x.ndim), *range(first))


scaled_product.defvjp(_scaled_fwd, _scaled_bwd)


# ---- scales by blocks ------------------------------------------------------------------------------


def _tiled(x: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """A matrix or rows padded with zeros and cut into blocks of these sizes along its last dimensions.

    What is smaller than a block is one, without padding, which the compiler would move between devices.
    """
    first = x.ndim - len(sizes)
    sizes = tuple(min(n, size) for n, size in zip(x.shape[first:], sizes, strict=True))
    up = [(0, 0)] * first + [(0, -n % size) for n, size in zip(x.shape[first:], sizes, strict=True)]
    x = jnp.pad(x, up)
    cut = [part for n, size in zip(x.shape[first:], sizes, strict=True) for part in (n // size, size)]
    return x.reshape(*x.shape[:first], *cut)


def by_rows(x: jax.Array) -> jax.Array:
    """x [..., k], each 1 x 128 tile rounded to E4M3 under its scale, as the numbers that they stand for (fp32)."""
    tiles = _tiled(x.astype(jnp.float32), (TILE,))
    scale = scale_of(amax_of(tiles, axis=-1))[..., None]
    return (to_e4m3(tiles / scale).astype(jnp.float32) * scale).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]


def by_blocks(w: jax.Array) -> jax.Array:
    """w [k, n], each 128 x 128 block rounded likewise."""
    blocks = _tiled(w.astype(jnp.float32), (TILE, TILE))
    scale = scale_of(amax_of(blocks, axis=(1, 3)))[:, None, :, None]
    whole = to_e4m3(blocks / scale).astype(jnp.float32) * scale
    return whole.reshape(blocks.shape[0] * blocks.shape[1], -1)[: w.shape[0], : w.shape[1]]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_block(contracted: int, dtype: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    return _block_fwd(contracted, dtype, x, w)[0]


def _matrix(w: jax.Array, contracted: int) -> jax.Array:
    return w.reshape(math.prod(w.shape[:contracted]), -1)


def _rows(x: jax.Array, last: int) -> jax.Array:
    """The last dimensions as one."""
    return x.reshape(*x.shape[: x.ndim - last], -1)


def _block_fwd(contracted: int, dtype: Any, x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    y = kept(block_product(_rows(x, contracted), _matrix(w, contracted), dtype))
    return y.reshape(*x.shape[: x.ndim - contracted], *w.shape[contracted:]), (x, w)


def _block_bwd(contracted: int, dtype: Any, saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    # The blocks of a transposed weight are the transposed blocks: it is rounded to the same numbers.
    dx = block_product(_rows(dy, w.ndim - contracted), _matrix(w, contracted).T, x.dtype)
    lead = tuple(range(x.ndim - contracted))
    dw = lax.dot_general(x, dy.astype(x.dtype), ((lead, lead), ((), ())))
    return dx.reshape(x.shape), dw.astype(w.dtype)


_by_block.defvjp(_block_fwd, _block_bwd)


def block_product(x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    """x [..., k] times w [k, n], both rounded to E4M3 by tiles and blocks of 128; summed in fp32, made in a type.

    By a kernel on GPUs that have one, but not inside a shard_map that leaves axes of several devices to the compiler: a
    kernel is cut over devices by names of axes, which the compiler does not tell there.
    """
    chosen, mesh = hardware.choose(fp8_matmul.KERNELS), jax.sharding.get_abstract_mesh()
    left = [axis for axis in mesh.axis_names if axis not in mesh.manual_axes and mesh.shape[axis] > 1]
    if mesh.manual_axes and not left and chosen != "reference":
        return _kernel(x, w, jnp.zeros((), dtype), chosen)
    if mesh.manual_axes or chosen == "reference":
        return jnp.dot(by_rows(x), by_blocks(w), preferred_element_type=dtype)
    return cut_product(_kernel, 1, _KERNELS, chosen=chosen)(x, w, jnp.zeros((), dtype))


_KERNELS = (sys.modules[__name__], fp8_matmul, mosaic, triton, scaling)


def _kernel(x: jax.Array, w: jax.Array, like: jax.Array, chosen: str) -> jax.Array:
    # The compiler calls this when nothing tells any more what is compiled for.
    with hardware.use(chosen):
        a, b = fp8_matmul.quantise_activations(x), fp8_matmul.quantise_weights(w)
        return fp8_matmul.fp8_matmul(*a, *b, out_dtype=like.dtype)

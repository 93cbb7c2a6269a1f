"""Exchanges of bytes over NVLink, between the GPUs of one host that one process drives (Mosaic GPU).

`all_gather` is jax's own kernel, which stores each word once through the switch to all GPUs. jax ships no
all-to-all: ours stores each part straight into the memory of the GPU that it is for.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.ops.gpu import all_gather_mgpu

from pallas_kernels import compat

GENERATIONS = range(90, 110)  # NVSwitch with multicast
_BLOCKS = 32  # enough to fill the links; the other multiprocessors go on with what they do
_VECTOR = 4  # words that a thread moves at once
_ROW = 128 * _VECTOR  # words of a warpgroup's move
_TILE = 8 * _ROW


def all_gather(packed: jax.Array, axis_name: Any) -> jax.Array:
    """[bytes] of each device -> [devices, bytes], in the order of the axis."""
    words = _words(packed)
    # A tuple: jax takes a name alone for the set of its letters.
    out = all_gather_mgpu.all_gather(words, axis_name=(axis_name,), num_blocks=_BLOCKS)
    out = compat.vary(out, words)
    return _bytes(out.reshape(lax.axis_size(axis_name), words.size), packed.shape[-1])


def all_to_all(packed: jax.Array, axis_name: Any) -> jax.Array:
    """[devices, bytes], row i for device i -> [devices, bytes], row i from device i."""
    words = _words(packed)
    devices, width = words.shape
    tile = min(width, _TILE)

    def kernel(x: Any, y: Any, arrived: Any) -> None:
        me = lax.axis_index(axis_name)
        _meet(arrived, axis_name, devices, 1)  # everybody's y is free by now

        @plgpu.nd_loop((devices, width // tile), collective_axes="block")
        def _(loop: plgpu.NDLoopInfo) -> None:
            step, part = loop.index
            # Each starts with another receiver, so that no link is everybody's target.
            to = lax.rem(me + step, jnp.int32(devices))
            words = pl.ds(part * tile, tile)
            layout = plgpu.Layout.WG_STRIDED((tile,), vec_size=_VECTOR)
            device: Any = {axis_name: to}
            there = plgpu.remote_ref(y, device)
            there[me, words] = plgpu.layout_cast(x[to, words], layout)

        _meet(arrived, axis_name, devices, 2)

    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(words.shape, words.dtype),
        scratch_types=[plgpu.SemaphoreType.REGULAR],
        grid=(_BLOCKS,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(words)
    return _bytes(compat.vary(out, words), packed.shape[-1])


def _meet(semaphore: Any, axis_name: Any, devices: int, times: int) -> None:
    """Waits until this block of every device has come here so many times."""
    plgpu.semaphore_signal_multicast(semaphore, collective_axes=axis_name)
    pl.semaphore_wait(semaphore, times * devices, decrement=False)


def _words(packed: jax.Array) -> jax.Array:
    """Bytes [..., n] as words [..., m], padded to whole tiles; fp32 in name only, for wide moves."""
    n = packed.shape[-1]
    unit = 4 * (_TILE if n > 4 * _TILE else _ROW)
    more = [*[(0, 0)] * (packed.ndim - 1), (0, -n % unit)]
    return lax.bitcast_convert_type(jnp.pad(packed, more).reshape(*packed.shape[:-1], -1, 4), jnp.float32)


def _bytes(words: jax.Array, n: int) -> jax.Array:
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-1], -1)[..., :n]

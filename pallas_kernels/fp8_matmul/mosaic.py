"""The product of E4M3 operands scaled by blocks for Hopper: TMA loads, wgmma (Mosaic GPU).

A block computes 128 by 128 results. One warpgroup fetches, two multiply 64 rows each: a step of 128 along k goes
into fresh fp32 sums, which are added to the total with their scales. Hopper's tensor cores keep about 14
bits while they add fp8 products, so nothing longer than a step is summed there.

Legend: m rows, n columns, k contraction.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.epilogue import Epilogue
from pallas_kernels.matmul.mosaic import launch, place
from pallas_kernels.matmul.scaling import TILE
from pallas_kernels.matmul.strips import GROUP_M, GROUPS, TILE_M, Strips, transforms

GENERATIONS = range(90, 91)  # wgmma is Hopper's alone
MULTIPLES = TILE_M, TILE, TILE
"""What m, n and k have to be multiples of."""
_STEPS = 5  # tiles on their way, 32.5 KiB each


def product(
    a: jax.Array,
    a_scales: jax.Array,
    b: jax.Array,
    b_scales: jax.Array,
    out_dtype: Any,
) -> jax.Array:
    """As `reference.product`; m, n and k are multiples of MULTIPLES."""
    # Transposed scales: those that a block needs at a step lie together.
    inputs = {"x": a, "x_scales": a_scales.T, "w": b, "w_scales": b_scales}
    strips = Strips.of(Epilogue(dtype=out_dtype), TILE, out_dtype, {})
    return launch(_kernel, inputs, strips, len(b))["y"]


def _kernel(ins: dict[str, Any], outs: dict[str, Any], scratch: dict[str, Any], strips: Strips) -> None:
    (m, k), n = ins["x"].shape, ins["w"].shape[0]
    here = i, j, group = place(m // TILE_M, n // TILE)
    own, lie = pl.ds(group * GROUP_M, GROUP_M), transforms(TILE, jnp.float8_e4m3fn)

    def step(index: Any, x: Any, w: Any, x_scales: Any, total: Any) -> Any:
        # Read before the product, which hides how long it takes.
        column = ins["w_scales"][j, index[0]]
        rows = x_scales[0, own] * column

        def fresh(sums: Any) -> Any:
            plgpu.wgmma(sums, x.at[own], w.T)
            return sums[...]

        part = pl.run_scoped(fresh, plgpu.ACC((GROUP_M, TILE), jnp.float32))
        return total + part * lax.broadcast_in_dim(rows, part.shape, (0,))

    def compute(run: Any) -> None:
        epilogue = strips.begin(here, ins, outs, scratch)
        epilogue.finish([run(jnp.zeros((GROUP_M, TILE), jnp.float32))])

    plgpu.emit_pipeline_warp_specialized(
        step,
        grid=(k // TILE,),
        in_specs=[
            plgpu.BlockSpec((TILE_M, TILE), lambda s: (0, s), transforms=lie),
            plgpu.BlockSpec((TILE, TILE), lambda s: (0, s), transforms=lie),
            plgpu.BlockSpec((1, TILE_M), lambda s: (s, 0)),
        ],
        wg_axis="group",
        num_compute_wgs=GROUPS,
        memory_registers=40,
        max_concurrent_steps=min(_STEPS, k // TILE),
        compute_context=compute,
    )(
        ins["x"].at[pl.ds(i * TILE_M, TILE_M)],
        ins["w"].at[pl.ds(j * TILE, TILE)],
        ins["x_scales"].at[:, pl.ds(i * TILE_M, TILE_M)],
    )

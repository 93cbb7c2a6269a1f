"""The product with its epilogue for Hopper: TMA loads, wgmma, results out by TMA (Mosaic GPU).

A block computes 128 rows by 128 or 256 columns with three warpgroups: one fetches tiles of x and of the
weights through a ring of buffers, two multiply 64 rows each into fp32 registers and run the epilogue on these.

Legend: m rows, n columns, k contraction.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.matmul.epilogue import Epilogue
from pallas_kernels.matmul.scaling import TILE
from pallas_kernels.matmul.strips import GROUP_M, GROUPS, SHARED, TILE_M, Strips, transforms

GENERATIONS = range(90, 91)  # wgmma is Hopper's alone
TILE_K = 64
MULTIPLES = TILE_M, TILE, TILE_K
"""What m, n and k have to be multiples of."""
SNAKE = 8  # rows of tiles whose blocks run side by side, for the second-level cache
_STEPS = 4  # tiles on their way, where they fit


def product(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    bias: jax.Array | None,
    residual: jax.Array | None,
    scale: jax.Array | None,
    epilogue: Epilogue,
) -> dict[str, Any]:
    """As `reference.product`; m, n and k are multiples of MULTIPLES, x and weights both bf16 or both fp16."""
    n = weights[0].shape[1]
    tile_n = 256 if n % 256 == 0 and not epilogue.gated else 128
    given = {"bias": bias, "residual": residual, "scale": scale}
    inputs = {"x": x, **{f"w{i}": w for i, w in enumerate(weights)}}
    inputs |= {name: value for name, value in given.items() if value is not None}
    strips = Strips.of(epilogue, tile_n, x.dtype, inputs)
    out = launch(_kernel, inputs, strips, n)
    return {"y": out["y"], "scales": out.get("scales"), "z": [out[name] for name in strips.saved]}


def launch(kernel: Any, inputs: dict[str, jax.Array], strips: Strips, n: int) -> dict[str, jax.Array]:
    """Runs a kernel (ins, outs, scratch, strips) with a block for each tile of x's rows and n columns.

    Returns:
      The results by name (`Strips.out_type`), but scales [m, n / TILE].
    """
    m = inputs["x"].shape[0]
    outputs, scratch = strips.out_type(m, n), strips.scratch

    def body(*refs: Any) -> None:
        left = iter(refs)
        ins, outs, buffers = ({name: next(left) for name in names} for names in (inputs, outputs, scratch))
        kernel(ins, outs, buffers, strips)

    results = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=list(scratch.values()),
        grid=(m // TILE_M * (n // strips.tile_n),),
        grid_names=("block",),
        num_threads=GROUPS + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(*inputs.values())
    out = dict(zip(outputs, compat.vary(results, inputs), strict=True))
    return out | ({"scales": out["scales"].T} if "scales" in out else {})


def place(rows: int, columns: int) -> tuple[Any, Any, Any]:
    """This block's row and column among so many tiles, and the warpgroup."""
    row, column = plgpu.planar_snake(lax.axis_index("block"), (rows, columns), 0, SNAKE)
    return row, column, lax.axis_index("group")


def steps(k: int, tile_k: int, each: int, strips: Strips) -> int:
    """Depth of the ring of tiles, of so many bytes each."""
    return min(_STEPS, k // tile_k, (SHARED - strips.bytes) // each)


def _kernel(ins: dict[str, Any], outs: dict[str, Any], scratch: dict[str, Any], strips: Strips) -> None:
    x, weights = ins["x"], [ins[f"w{i}"] for i in range(strips.epilogue.weights)]
    (m, k), tile_n, size = x.shape, strips.tile_n, x.dtype.itemsize
    here = i, j, group = place(m // TILE_M, weights[0].shape[1] // tile_n)
    own, lie = pl.ds(group * GROUP_M, GROUP_M), transforms(TILE_K, x.dtype)

    def multiply(_: Any, x: Any, *rest: Any) -> Any:
        *weights, sums = rest
        for weight, total in zip(weights, sums, strict=True):
            plgpu.wgmma(total, x.at[own], weight)
        plgpu.wgmma_wait(0)
        return sums

    def compute(run: Any) -> None:
        def scoped(*sums: Any) -> None:
            epilogue = strips.begin(here, ins, outs, scratch)
            run(sums)
            epilogue.finish([total[...] for total in sums])

        pl.run_scoped(scoped, *[plgpu.ACC((GROUP_M, tile_n), jnp.float32)] * len(weights))

    plgpu.emit_pipeline_warp_specialized(
        multiply,
        grid=(k // TILE_K,),
        in_specs=[
            plgpu.BlockSpec((TILE_M, TILE_K), lambda s: (0, s), transforms=lie),
            *[plgpu.BlockSpec((TILE_K, tile_n), lambda s: (s, 0), transforms=lie)] * len(weights),
        ],
        wg_axis="group",
        num_compute_wgs=GROUPS,
        memory_registers=40,
        max_concurrent_steps=steps(k, TILE_K, size * TILE_K * (TILE_M + tile_n * len(weights)), strips),
        compute_context=compute,
    )(x.at[pl.ds(i * TILE_M, TILE_M)], *[w.at[:, pl.ds(j * tile_n, tile_n)] for w in weights])

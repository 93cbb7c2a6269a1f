"""The epilogue of a Mosaic GPU kernel: fp32 sums in the registers of a warpgroup, written out strip by strip.

A block has 128 rows, two warpgroups 64 of these each. A strip is some columns of a warpgroup's part; it goes
through a buffer in shared memory, from where TMA takes it while the next strip is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.epilogue import Epilogue
from pallas_kernels.matmul.scaling import TILE

TILE_M, GROUP_M = 128, 64
GROUPS = TILE_M // GROUP_M
SHARED = 225 * 1024  # bytes of shared memory that a block may fill; two more KiB hold barriers
_READ = ("bias", "residual", "scale")


def transforms(columns: int, dtype: Any) -> tuple[Any, ...]:
    """How rows of so many elements lie in shared memory, for wgmma and for TMA without bank conflicts."""
    bits = 8 * jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * bits)
    return plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle)


@dataclass(frozen=True)
class Strips:
    """The epilogue of a block of 128 rows and tile_n columns.

    Attributes:
      inputs: "bias" [n], "residual" [m, n] and "scale" [1], those that there are, and their dtypes.
      operand: dtype in which pre-activations are saved.
    """

    epilogue: Epilogue
    tile_n: int
    inputs: dict[str, Any]
    operand: Any

    @classmethod
    def of(cls, epilogue: Epilogue, tile_n: int, operand: Any, inputs: dict[str, Any]) -> Strips:
        """For these inputs; those that are None are not there."""
        found = {name: inputs[name].dtype for name in _READ if inputs.get(name) is not None}
        return cls(epilogue, tile_n, found, operand)

    @property
    def strip(self) -> int:
        """Columns of a strip; fewer where much is written, so that its buffers leave room for tiles."""
        return TILE if self.epilogue.quantise else 64 if self._row <= 8 else 32

    @property
    def slots(self) -> int:
        """Buffers that take turns."""
        return 1 if self.epilogue.quantise else 2

    @property
    def count(self) -> int:
        """Strips of a block."""
        return self.tile_n // self.strip

    @property
    def saved(self) -> list[str]:
        """Names of the pre-activations that are written."""
        return [f"z{i}" for i in range(self.epilogue.weights)] if self.epilogue.save else []

    def out_type(self, m: int, n: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the results: y, those of `saved`, and scales [n / TILE, m]."""
        e, shape = self.epilogue, jax.ShapeDtypeStruct
        out = {"y": shape((m, n), jnp.float8_e4m3fn if e.quantise else e.dtype)}
        out |= {name: shape((m, n), self.operand) for name in self.saved}
        if e.quantise == "tile":
            out["scales"] = shape((n // TILE, m), jnp.float32)  # those of a strip lie together
        return out

    @property
    def _staged(self) -> dict[str, Any]:
        """What goes through buffers, and its dtypes."""
        out = {name: self.out_type(TILE_M, TILE)[name].dtype for name in ["y", *self.saved]}
        return out | {name: dtype for name, dtype in self.inputs.items() if name == "residual"}

    @property
    def _row(self) -> int:
        """Bytes that pass through buffers for an element."""
        return sum(jnp.dtype(dtype).itemsize for dtype in self._staged.values())

    @property
    def scratch(self) -> dict[str, Any]:
        """Buffers and barriers, for `begin`."""
        made: dict[str, Any] = {name: self._buffer(dtype) for name, dtype in self._staged.items()}
        if "residual" in self.inputs:
            made["residual_there"] = plgpu.Barrier(num_barriers=GROUPS * self.slots)
        if "bias" in self.inputs:
            made["bias"] = plgpu.SMEM((GROUPS, self.tile_n), self.inputs["bias"])
            made["bias_there"] = plgpu.Barrier(num_barriers=GROUPS)
        return made

    @property
    def bytes(self) -> int:
        """Of shared memory that `scratch` takes."""
        bias = jnp.dtype(self.inputs["bias"]).itemsize if "bias" in self.inputs else 0
        return GROUPS * (self.slots * GROUP_M * self.strip * self._row + self.tile_n * bias)

    def _buffer(self, dtype: Any) -> Any:
        shape = (GROUPS, self.slots, GROUP_M, self.strip)
        return plgpu.SMEM(shape, dtype, transforms=transforms(self.strip, dtype))

    def begin(self, place: tuple[Any, Any, Any], ins: Any, outs: Any, scratch: Any) -> Part:
        """A warpgroup's part of the epilogue; what it reads is under way from now on.

        Args:
          place: the block's row and column, the warpgroup.
          ins, outs, scratch: references to what `inputs`, `out_type` and `scratch` tell.
        """
        part = Part(self, place, ins, outs, scratch)
        part.prefetch()
        return part


@dataclass(frozen=True)
class Part:
    """The epilogue of a warpgroup's 64 rows (see `Strips.begin`)."""

    strips: Strips
    place: tuple[Any, Any, Any]
    ins: Any
    outs: Any
    scratch: Any

    def finish(self, sums: list[Any]) -> None:
        """Computes and writes the results of sums, fp32 [64, tile_n] for each weight."""
        if "bias" in self.strips.inputs:
            plgpu.barrier_wait(self.scratch["bias_there"].at[self.group])
        for s in range(self.strips.count):
            columns = slice(s * self.strips.strip, (s + 1) * self.strips.strip)
            self.strip(s, [total[:, columns] for total in sums])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @property
    def group(self) -> Any:
        return self.place[2]

    @property
    def rows(self) -> Any:
        return pl.ds(self.place[0] * TILE_M + self.group * GROUP_M, GROUP_M)

    def columns(self, s: int) -> Any:
        return pl.ds(self.place[1] * self.strips.tile_n + s * self.strips.strip, self.strips.strip)

    def fetch(self, s: int) -> None:
        """Starts the copy of a strip of the residual."""
        slot = s % self.strips.slots
        plgpu.copy_gmem_to_smem(
            self.ins["residual"].at[self.rows, self.columns(s)],
            self.scratch["residual"].at[self.group, slot],
            self.scratch["residual_there"].at[self.group * self.strips.slots + slot],
        )

    def prefetch(self) -> None:
        """Starts the copies of the bias and of the first strips of the residual."""
        if "residual" in self.strips.inputs:
            for s in range(min(self.strips.slots, self.strips.count)):
                self.fetch(s)
        if "bias" in self.strips.inputs:
            tile_n = self.strips.tile_n
            plgpu.copy_gmem_to_smem(
                self.ins["bias"].at[pl.ds(self.place[1] * tile_n, tile_n)],
                self.scratch["bias"].at[self.group],
                self.scratch["bias_there"].at[self.group],
            )

    def strip(self, s: int, sums: list[Any]) -> None:
        """One strip: sums fp32 [64, strip]."""
        slot, epilogue = s % self.strips.slots, self.strips.epilogue
        bias = None
        if "bias" in self.strips.inputs:
            columns = pl.ds(s * self.strips.strip, self.strips.strip)
            row = self.scratch["bias"][self.group, columns].astype(jnp.float32)
            bias = lax.broadcast_in_dim(row, sums[0].shape, (1,))
        y, z = epilogue.combine(sums, bias)
        if "residual" in self.strips.inputs:
            plgpu.barrier_wait(self.scratch["residual_there"].at[self.group * self.strips.slots + slot])
            y = y + self.scratch["residual"][self.group, slot].astype(jnp.float32)
        if epilogue.quantise:
            y, scales = epilogue.encode(y, self.ins["scale"][0] if "scale" in self.strips.inputs else None)
            if scales is not None:
                self.outs["scales"][self.place[1] * self.strips.count + s, self.rows] = scales
        self.write(s, {"y": y, **dict(zip(self.strips.saved, z, strict=False))})
        if "residual" in self.strips.inputs and s + self.strips.slots < self.strips.count:
            self.fetch(s + self.strips.slots)  # after `write`, so that every thread has read the slot

    def write(self, s: int, results: dict[str, Any]) -> None:
        """Sends a strip's results on their way."""
        slot = s % self.strips.slots
        plgpu.wait_smem_to_gmem(
            len(results) * (self.strips.slots - 1), wait_read_only=True
        )  # this slot's last copy
        for name, value in results.items():
            buffer = self.scratch[name]
            buffer[self.group, slot] = value.astype(buffer.dtype)
        plgpu.commit_smem()
        for name in results:
            out = self.outs[name].at[self.rows, self.columns(s)]
            plgpu.copy_smem_to_gmem(self.scratch[name].at[self.group, slot], out)

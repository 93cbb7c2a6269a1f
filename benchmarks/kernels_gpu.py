"""Every kernel of pallas_kernels on the GPU at hand: is it right, and what share of the chip does it reach.

    python benchmarks/kernels_gpu.py [--quick] [--json FILE]

A row for each kernel, implementation and shape: whether it gives what the reference gives on the same device,
seconds a call (median of rounds in which kernel and reference take turns), the reference's seconds, and the share of
the chip's peak, of memory traffic (each input read once, each output written once) or of tensor cores.

Without a GPU it says so, compiles the kernels for an H100 where the extra `aot` is installed and tells their
registers, and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from gpu_truth import target_here
from rich.console import Console
from rich.table import Table

from dsjax import aot
from pallas_kernels import block_quant, collectives, fp8_matmul, hardware, matmul, resources, top_k

BF16, F32, U8, E4M3 = jnp.bfloat16, jnp.float32, jnp.uint8, jnp.float8_e4m3fn
ABSENT = "H100"  # compiled for where no GPU is here
WIDTH = 140  # of the table where the output is no terminal


@dataclass(frozen=True)
class Case:
    """A call to check and to time.

    Attributes:
      implementation: what `hardware.use` is given.
      shape: the sizes, as they are shown.
      shapes: a (shape, dtype) for each argument.
      flops: of tensor cores, in products of `dtype`; 0: bound by memory.
      tolerance: of the norm of the difference over the norm; 0: the same bits.
      quick: one of those that `--quick` takes.
    """

    kernel: str
    implementation: str
    shape: str
    function: Callable[..., Any]
    shapes: tuple[tuple[tuple[int, ...], Any], ...]
    flops: float = 0
    dtype: str = "bf16"
    tolerance: float = 0.0
    quick: bool = False


def cases(quick: bool) -> list[Case]:
    """All, or the first of each kernel in a small size."""
    n, m, k, width = (1 << 20, 512, 512, 1024) if quick else (1 << 26, 8192, 4096, 14336)
    return [case for case in [*_bytes(n), *_products(m, k, width)] if case.quick or not quick]


def _bytes(n: int) -> Iterator[Case]:
    """Kernels bound by memory, on n values."""
    for format in block_quant.FORMATS:
        size = block_quant.code_bytes(format, 128)
        one = ((n // 128, size), U8), ((n // 128,), BF16)
        eight = tuple(((8, *dims), dtype) for dims, dtype in one)
        of = partial(Case, implementation="triton", shape=f"{n}", quick=format == "int4")
        encode = partial(block_quant.encode, format=format)
        yield of(f"encode {format}, feedback", function=encode, shapes=(((n,), F32),) * 2)
        yield of(f"decode {format}", function=partial(block_quant.decode, format=format), shapes=one)
        decode_sum = partial(block_quant.decode_sum, format=format)
        yield of(f"decode_sum {format}, 8", function=decode_sum, shapes=eight)
    share = n // 100
    of = partial(Case, implementation="triton", shape=f"{n}", quick=True)
    yield of("top-k select, 1%", function=lambda x, e: top_k.select(x, e, share), shapes=(((n,), F32),) * 2)
    yield of(
        "top-k scatter, 1%",
        function=partial(top_k.scatter_from_mask, n=n),
        shapes=(((share,), F32), ((-(-n // 8),), U8)),
    )


def _products(m: int, k: int, n: int) -> Iterator[Case]:
    """Kernels bound by tensor cores: x [m, k], weights [k, n]."""
    x, w, bias, y = ((m, k), BF16), ((k, n), BF16), ((n,), F32), ((m, n), BF16)
    fp8 = ((m, k), E4M3), ((m, k // 128), F32), ((n, k), E4M3), ((n // 128, k // 128), F32)
    one, size = 2.0 * m * k * n, f"{m}x{k}x{n}"
    # bf16 results may round to a neighbour, E4M3 ones to one of 2^-4; Hopper adds fp8 products in 14 bits.
    for name, function, shapes, products, tolerance, quick in (
        ("matmul", matmul.matmul, (x, w), 1, 2**-8, True),
        ("matmul bias gelu", partial(matmul.matmul, activation="gelu"), (x, w, bias), 1, 2**-8, False),
        ("matmul residual", matmul.matmul, (x, w, bias, y), 1, 2**-8, False),
        ("matmul gated", matmul.gated_matmul, (x, w, w), 2, 2**-8, True),
        ("matmul gated, gradient", _gradient, (x, w, w), 6, 2**-7, False),
        ("matmul to fp8", partial(matmul.quantised_matmul, activation="silu"), (x, w), 1, 2**-6, False),
        ("matmul gated to fp8", _gated_to_fp8, (x, w, w), 2, 2**-6, False),
    ):
        for implementation in ("mosaic", "triton") if quick else ("mosaic",):
            yield Case(name, implementation, size, function, shapes, products * one, "bf16", tolerance, quick)
    for implementation in ("mosaic", "triton"):
        yield Case("fp8 matmul", implementation, size, fp8_matmul.fp8_matmul, fp8, one, "fp8", 2**-8, True)
    # Half the rows: a kernel that this process has compiled would leave no report.
    linear, half = fp8_matmul.fp8_linear, ((m // 2, k), BF16)
    yield Case("fp8 linear", "mosaic", f"{m // 2}x{k}x{n}", linear, (half, w), one / 2, "fp8", 2**-8)


def _gated_to_fp8(x: jax.Array, gate: jax.Array, up: jax.Array) -> Any:
    return matmul.quantised_matmul(x, (gate, up), activation="silu")


def _gradient(x: jax.Array, gate: jax.Array, up: jax.Array) -> Any:
    y, back = jax.vjp(matmul.gated_matmul, x, gate, up)
    return back(y)


# ---- on a GPU -----------------------------------------------------------------------------------


def arguments(case: Case) -> list[jax.Array]:
    """Numbers of the shapes, made on the device."""
    return [_numbers(jax.random.key(i), *shape) for i, shape in enumerate(case.shapes)]


def _numbers(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if dtype == U8:
        return jax.random.bits(key, shape, U8)
    values = jax.random.normal(key, shape, BF16 if dtype == E4M3 else dtype)
    # Matrices that give products of about one; scales, which have fp32's dtype and two dimensions, are positive.
    if dtype == F32 and len(shape) == 2:
        return jnp.abs(values) + 1
    return (values / (shape[0] ** 0.5 if dtype == BF16 and len(shape) == 2 else 1)).astype(dtype)


def measure(case: Case, rounds: int, each: int) -> dict[str, Any]:
    """A case on the device at hand."""
    given = arguments(case)
    runs = {}
    for name in (case.implementation, "reference"):
        with hardware.use(name):
            runs[name] = jax.jit(lambda *a: case.function(*a)).lower(*given).compile()
    results = [run(*given) for run in runs.values()]
    off = difference(*results)
    moved = sum(a.nbytes for a in [*given, *jax.tree.leaves(results[0])])
    del results
    own, reference = in_turns([partial(run, *given) for run in runs.values()], rounds, each)
    return {
        **described(case),
        "seconds": own,
        "reference_seconds": reference,
        "fraction_of_peak": _share(case, moved, own),
        "bound_by": "tensor cores" if case.flops else "memory",
        "difference": off,
        "equal": off <= case.tolerance,
    }


def difference(got: Any, want: Any) -> float:
    """The largest, over results: the norm of the difference over the norm, or of integers the share that differ.

    NaN equals NaN; NaN beside a number is infinitely far.
    """
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(_difference(*pair)) for pair in pairs)


@jax.jit
def _difference(a: jax.Array, b: jax.Array) -> jax.Array:
    if jnp.issubdtype(a.dtype, jnp.integer):
        return jnp.mean(a != b)
    a, b = a.astype(F32), b.astype(F32)
    off = jnp.linalg.norm(jnp.nan_to_num(a - b)) / jnp.maximum(jnp.linalg.norm(jnp.nan_to_num(b)), 1e-30)
    return jnp.where(jnp.any(jnp.isnan(a) != jnp.isnan(b)), jnp.inf, off)


def in_turns(calls: list[Callable[[], Any]], rounds: int, each: int) -> list[float]:
    """Median seconds of each call, after a round that warms up."""
    seconds: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 1):
        for taken, call in zip(seconds, calls, strict=True):
            started = time.perf_counter()
            for _ in range(each):
                result = call()
            jax.block_until_ready(result)
            if number:
                taken.append((time.perf_counter() - started) / each)
    return [statistics.median(taken) for taken in seconds]


def _share(case: Case, moved: int, seconds: float) -> float | None:
    target = target_here()
    if target is None:
        return None
    if case.flops:
        return case.flops / seconds / target.chip.flops(case.dtype)
    return moved / seconds / target.chip.memory.bandwidth


def exchanges(quick: bool) -> list[dict[str, Any]]:
    """Packed exchanges between the GPUs at hand, beside XLA's own in fp32."""
    devices = jax.devices()
    names = [(call, nvlink) for call in ("all_gather", "reduce_scatter") for nvlink in (False, True)]
    listed = [
        {"kernel": f"{call} int4", "implementation": "nvlink" if nvlink else "xla", "shape": ""}
        for call, nvlink in names
    ]
    if devices[0].platform != "gpu" or len(devices) < 2:
        return [{**one, "skipped": f"takes several GPUs (found {len(devices)})"} for one in listed]
    return [_guarded(one, partial(_exchange, *name, quick)) for one, name in zip(listed, names, strict=True)]


def _exchange(call: str, nvlink: bool, quick: bool) -> dict[str, Any]:
    devices, n = jax.devices(), 1 << (16 if quick else 26)
    mesh = jax.make_mesh((len(devices),), ("data",), (jax.sharding.AxisType.Auto,), devices=devices)
    spec = jax.sharding.PartitionSpec("data")
    x = jax.device_put(jnp.ones((len(devices), n), F32), jax.NamedSharding(mesh, spec))
    packed = partial(getattr(collectives, call), axis_name="data", format="int4")
    plain = jax.lax.all_gather if call == "all_gather" else jax.lax.psum_scatter

    def on(function: Callable[..., Any]) -> Any:
        local = lambda x: function(x[0])[None]  # noqa: E731
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)).lower(x).compile()

    own, xla, dense = (
        on(partial(packed, nvlink=nvlink)),
        on(packed),
        on(lambda x: plain(x, "data", tiled=True)),
    )
    off = difference(own(x), xla(x))
    seconds, reference = in_turns([partial(own, x), partial(dense, x)], 3, 3)
    return {
        "shape": f"{len(devices)}x{n}",
        "seconds": seconds,
        "reference_seconds": reference,
        "fraction_of_peak": None,
        "bound_by": "links",
        "difference": off,
        "equal": off == 0,
    }


# ---- without one --------------------------------------------------------------------------------


def compiled(case: Case) -> dict[str, Any]:
    """What a case's kernels take of a chip that is not here."""
    target = aot.parse_target(f"1x{ABSENT}")
    here = jax.sharding.SingleDeviceSharding(target.devices()[0])
    given = [jax.ShapeDtypeStruct(shape, dtype, sharding=here) for shape, dtype in case.shapes]
    with hardware.use(case.implementation), _reports() as folder:
        lowered = aot.lower_for(target, jax.jit(lambda *a: case.function(*a)), *given)
        program, kernels = resources.compiled(lambda options: aot.compile_for(target, lowered, options))
        said = "".join(path.read_text() for path in Path(folder).glob("*.ptxas"))
    registers = [int(found) for found in re.findall(r"Used (\d+) registers", said)]
    spilled = sum(int(found) for found in re.findall(r"(\d+) bytes spill", said))
    return {
        "compiled_for": ABSENT,
        "registers": max([*registers, *(kernel.registers for kernel in kernels)], default=None),
        "spilled_bytes": spilled + sum(kernel.spilled for kernel in kernels),
        "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
    }


@contextlib.contextmanager
def _reports() -> Iterator[str]:
    """A folder in which Mosaic leaves what ptxas says of kernels that this process compiles first."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        try:
            yield folder
        finally:
            del os.environ["MOSAIC_GPU_DUMP_TO"]


# ---- the table ----------------------------------------------------------------------------------


def described(case: Case) -> dict[str, Any]:
    """What a case is called."""
    return {"kernel": case.kernel, "implementation": case.implementation, "shape": case.shape}


def _guarded(named: dict[str, Any], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A case that fails is a row, and the next is run."""
    try:
        return {**named, **run()}
    except Exception as error:  # of whatever kind: a kernel that this chip or jax does not take
        said = str(error).strip().splitlines() or [type(error).__name__]
        return {**named, "skipped": f"{type(error).__name__}: {said[0][:200]}", "failed": True}


def run(quick: bool) -> dict[str, Any]:
    """All cases, on the GPU at hand or compiled."""
    device = jax.devices()[0]
    found = []
    missing = aot.missing_for("gpu")
    for case in cases(quick):
        if device.platform == "gpu":
            chip, written = hardware.chip().generation, _generations(case)
            if chip not in written:
                why = f"not written for compute capability {chip / 10}"
                found.append({**described(case), "skipped": why})
            else:
                found.append(
                    _guarded(described(case), partial(measure, case, *((2, 2) if quick else (5, 5))))
                )
            continue
        row = {**described(case), "skipped": f"no GPU here (found {device.device_kind})"}
        found.append({**row, **({} if missing else _guarded({}, partial(compiled, case)))})
    return {
        "device": device.device_kind,
        "not_compiled": missing if device.platform != "gpu" else None,
        "cases": [*found, *exchanges(quick)],
    }


def _generations(case: Case) -> range:
    """The chips that a case's kernel is written for."""
    package = {"fp8": fp8_matmul, "matmul": matmul, "top-k": top_k}.get(case.kernel.split()[0], block_quant)
    return package.api.KERNELS[case.implementation]


def table(result: dict[str, Any]) -> Table:
    """The result to look at."""
    columns = (
        "shape",
        "by",
        "equal",
        "seconds",
        "reference",
        "of peak",
        "bound by",
        "compiled: registers, spills",
    )
    shown = Table("kernel", *columns, title=f"pallas_kernels on {result['device']}", box=None)
    for one in result["cases"]:
        measured = ["skipped", "", "", "", ""]
        if "seconds" in one:
            share = one["fraction_of_peak"]
            measured = [
                "yes" if one["equal"] else f"NO ({one['difference']:.2g})",
                f"{one['seconds']:.3g}", f"{one['reference_seconds']:.3g}",
                "" if share is None else f"{share:.0%}", one["bound_by"],
            ]  # fmt: skip
        built = f"{one['registers']}, {one['spilled_bytes']}" if "registers" in one else ""
        shown.add_row(one["kernel"], one["shape"], one["implementation"], *measured, built)
    return shown


def main() -> None:
    """Measure, print one table, write --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one small case of each kernel")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    options = parser.parse_args()
    result = run(options.quick)
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(table(result))
    for why in dict.fromkeys(one["skipped"] for one in result["cases"] if "skipped" in one):
        console.print(f"skipped: {why}", markup=False)
    if result["not_compiled"]:
        console.print(f"not compiled: {result['not_compiled']}", markup=False)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""What compiled kernels take of a chip: registers, spills, shared memory."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Resources:
    """A kernel's needs.

    Attributes:
      name: of the kernel.
      registers: a thread's.
      spilled: bytes a thread keeps in local memory for want of registers, stores and loads together.
      shared: bytes of shared memory of a program, static and dynamic.
      threads: of a program.
    """

    name: str
    registers: int
    spilled: int
    shared: int
    threads: int


def compiled(compile: Callable[[Mapping[str, Any]], Any]) -> tuple[Any, list[Resources]]:
    """Compiles for a GPU, here or not, and reads what its Triton kernels and XLA's own take.

    Args:
      compile: takes XLA's `compiler_options` and compiles, such as
        `lambda options: lowered.compile(compiler_options=options)`; the result must not come from a cache.

    Returns:
      What `compile` returned, and each kernel's needs.

    Raises:
      FileNotFoundError: no ptxas here (pip install nvidia-cuda-nvcc-cu12).
    """
    with tempfile.TemporaryDirectory() as folder:
        program = compile({"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"})
        texts = [path.read_text() for path in sorted(Path(folder).glob("*.ptx"))]
        launches = "\n".join(path.read_text() for path in Path(folder).glob("*thunk_sequence.txt"))
    return program, [kernel for text in texts for kernel in of_ptx(text, launches)]


def of_ptx(ptx: str, launches: str = "") -> list[Resources]:
    """Needs of the kernels in a PTX text, from `ptxas -v`.

    Args:
      launches: XLA's list of launches, which tells the dynamic shared memory and the threads.

    Raises:
      FileNotFoundError: no ptxas here.
    """
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    if target is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [ptxas(), "-v", f"-arch={target.group(1)}", str(source), "-o", str(source) + ".out"]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    report = re.split(r"Compiling entry function '", said.stderr + said.stdout)[1:]
    return [_resources(part, launches) for part in report]


def _resources(report: str, launches: str) -> Resources:
    def number(pattern: str, text: str = report) -> int:
        found = re.search(pattern, text)
        return int(found.group(1)) if found else 0

    name = report.partition("'")[0]
    launch = next((line for line in launches.splitlines() if f" {name} grid" in line), "")
    return Resources(
        name,
        registers=number(r"Used (\d+) registers"),
        spilled=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        shared=number(r"(\d+) bytes smem") + number(r"shared_memory: (\d+)", launch),
        threads=number(r"threads: \[(\d+)", launch),
    )


def ptxas() -> str:
    """Path of NVIDIA's assembler: of its wheel, or on the PATH.

    Raises:
      FileNotFoundError: neither is there.
    """
    spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cuda_nvcc")
    for place in (spec and spec.submodule_search_locations) or []:
        path = Path(place) / "bin" / "ptxas"
        if path.exists():
            return str(path)
    found = shutil.which("ptxas")
    if found is None:
        raise FileNotFoundError("no ptxas: pip install nvidia-cuda-nvcc-cu12, or put CUDA's on the PATH")
    return found

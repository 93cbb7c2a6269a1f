"""What a compiled program does, read from its optimised HLO: a microscope for tests and for planning."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from dsjax.aot.collectives import Collectives, kind_of, read_collective
from dsjax.aot.groups import Coordinates
from dsjax.aot.hlo import Module, Shape, flat, parse
from dsjax.aot.uniform import Uniformity
from dsjax.aot.walk import Branch, Loop, Site, Turns, as_it_says, walk
from dsjax.aot.work import Work, Works, own_flops, target_of
from dsjax.errors import InputError


@dataclass(frozen=True)
class Dot:
    """A matrix product or convolution, wherever it stands (alone, in a fusion, as a library call).

    Attributes:
      lhs, rhs, result: shapes on one device.
      flops: each time; a multiply-add is two.
      times: how often it runs in a step.
    """

    name: str
    lhs: Shape
    rhs: Shape
    result: Shape
    flops: float
    loops: tuple[Loop, ...]
    branches: tuple[Branch, ...]
    times: int
    op_name: str

    @property
    def dtype(self) -> str:
        """Element type of what is multiplied."""
        return self.lhs.dtype


@dataclass(frozen=True)
class CustomCall:
    """A call of something that XLA did not make: a library, a kernel.

    Attributes:
      target: the name that XLA calls (`__cudnn$fmhaSoftmax`, `__gpu$xla.gpu.triton`, `mosaic_gpu_v2`).
      kind: attention (cuDNN), kernel (Pallas: Triton or Mosaic), matmul (or convolution), other.
      kernel: a Pallas kernel's name, where it is told.
      flops: each time; 0 where it is not known (kernels).
    """

    name: str
    target: str
    kind: str
    kernel: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    flops: float
    loops: tuple[Loop, ...]
    branches: tuple[Branch, ...]
    times: int
    op_name: str


@dataclass(frozen=True)
class Memory:
    """XLA's account of a device's memory, bytes.

    Attributes:
      alias: of outputs that lie where (donated) arguments lay.
      temporary: the most that is in use at once beside arguments and outputs.
    """

    argument: int
    output: int
    alias: int
    temporary: int
    code: int

    @property
    def total(self) -> int:
        """What a device needs to run the program."""
        return self.argument + self.output + self.temporary + self.code - self.alias


@dataclass(frozen=True)
class Conditional:
    """A conditional.

    Attributes:
      differs_over: mesh axes along which what decides it may differ between devices.
    """

    name: str
    differs_over: frozenset[str]
    op_name: str


@dataclass(frozen=True)
class Inspection:
    """A compiled program as seen by one device.

    Attributes:
      mesh: axis -> size, of axes with more than one device.
      dots: matrix products and convolutions; custom_calls: all others' code.
      work: FLOPs of products by element type, and device memory traffic, of one run.
      memory: None where only text was given.
      turns: how often loops run, where more is known than the program tells.
      decided: name of a conditional or loop -> axes along which what decides it may differ between devices.
      rare: name of a conditional -> of so many runs of the program one takes the branch that counts.
    """

    mesh: Mapping[str, int]
    collectives: Collectives
    dots: tuple[Dot, ...]
    custom_calls: tuple[CustomCall, ...]
    conditionals: tuple[Conditional, ...]
    loops: tuple[Loop, ...]
    work: Work
    memory: Memory | None
    module: Module = field(repr=False)
    turns: Turns = field(default=as_it_says, repr=False)
    decided: Mapping[str, frozenset[str]] = field(default_factory=dict, repr=False)
    rare: Mapping[str, int] = field(default_factory=dict, repr=False)

    def seldom(self, name: str, every: int) -> Inspection:
        """The same program, where conditionals whose jax operation's name holds `name` matter once in `every` runs.

        Counted so are collectives in their branches and their part of `work`; what is in loops of other turns is not
        (`counted` comes first).
        """
        rare = dict.fromkeys((c.name for c in self.conditionals if name in c.op_name), every)
        works, work = Works(self.module, self.turns), self.work
        for site in walk(self.module, self.turns):
            if site.instruction.name in rare:
                work += works.of(site.computation, site.instruction) * (site.times * (Fraction(1, every) - 1))
        collectives = Collectives(
            replace(c, every=every) if any(b.conditional in rare for b in c.branches) else c
            for c in self.collectives
        )
        return replace(self, collectives=collectives, work=work, rare=rare)

    def counted(self, turns: Turns) -> Inspection:
        """The same program with other turns of its loops."""
        return _read(self.module, Coordinates(self.mesh), self.decided, self.memory, turns)

    @property
    def flops(self) -> float:
        """FLOPs of products in one run, on one device."""
        return self.work.total_flops

    def kernels(self, name: str = "") -> tuple[CustomCall, ...]:
        """Pallas kernels (whose name holds `name`)."""
        return tuple(c for c in self.custom_calls if c.kind == "kernel" and name in c.kernel)


def inspect(compiled: Any, mesh: Any = None) -> Inspection:
    """Reads a compiled program.

    Args:
      compiled: from `jax.jit(f).lower(...).compile()`, or HLO text.
      mesh: the `jax.sharding.Mesh` that it was compiled over, or axis -> size in the order of the
        devices; by default the mesh of the program's arguments.

    Raises:
      InputError: the mesh is not known, or has another number of devices than the program.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    module = parse(text)
    shape = _mesh_shape(compiled, mesh, module.devices)
    coordinates = Coordinates(shape)
    if coordinates.size != module.devices:
        shown = " x ".join(f"{a} {s}" for a, s in shape.items())
        raise InputError(
            f"the program runs on {module.devices} devices and the mesh ({shown}) has {coordinates.size}"
        )
    branches = any(
        i.opcode in ("conditional", "while") for computation in module for i in computation.instructions
    )
    decided = Uniformity(module, coordinates, _cut_over(compiled, shape)).decided_over if branches else {}
    memory = None if isinstance(compiled, str) else _memory(compiled)
    return _read(module, coordinates, decided, memory, as_it_says)


def _read(
    module: Module,
    coordinates: Coordinates,
    decided: Mapping[str, frozenset[str]],
    memory: Memory | None,
    turns: Turns,
) -> Inspection:
    works = Works(module, turns)
    sites = list(walk(module, turns))
    return Inspection(
        mesh=coordinates.shape,
        collectives=Collectives(
            read_collective(s, module, coordinates, works, decided) for s in sites if kind_of(s.instruction)
        ),
        dots=tuple(_dot(s) for s in sites if _is_product(s)),
        custom_calls=tuple(_custom_call(s) for s in sites if s.instruction.opcode == "custom-call"),
        conditionals=tuple(
            {
                s.instruction.name: Conditional(
                    s.instruction.name, decided.get(s.instruction.name, frozenset()), s.instruction.op_name
                )
                for s in sites
                if s.instruction.opcode == "conditional"
            }.values()
        ),
        loops=tuple(dict.fromkeys(loop for s in sites for loop in s.loops)),
        work=works.of_computation(module.entry.name),
        memory=memory,
        module=module,
        turns=turns,
        decided=decided,
    )


def _mesh_shape(compiled: Any, mesh: Any, devices: int) -> dict[str, int]:
    """Axes of more than one device; one device needs no mesh."""
    if mesh is None and devices == 1:
        return {}
    if mesh is None and not isinstance(compiled, str):
        import jax

        found = [getattr(s, "mesh", None) for s in jax.tree.leaves(compiled.input_shardings)]
        mesh = next((m for m in found if m is not None and m.size == devices), None)
    if mesh is None:
        raise InputError("the mesh of the program is not known; give it to inspect(compiled, mesh)")
    shape = mesh if isinstance(mesh, Mapping) else mesh.shape
    return {axis: size for axis, size in shape.items() if size > 1}


def _cut_over(compiled: Any, shape: Mapping[str, int]) -> list[frozenset[str]] | None:
    """The axes along which each argument is cut; None where there is only text."""
    if isinstance(compiled, str):
        return None
    import jax

    cut = []
    for sharding in jax.tree.leaves(compiled.input_shardings):
        known = isinstance(sharding, jax.sharding.NamedSharding) and set(shape) <= set(sharding.mesh.shape)
        axes = (
            [a for e in sharding.spec if e for a in (e if isinstance(e, tuple) else (e,))] if known else shape
        )
        cut.append(frozenset(axes) & frozenset(shape))
    return cut


def _is_product(site: Site) -> bool:
    opcode = site.instruction.opcode
    if opcode in ("dot", "scaled-dot", "ragged-dot", "convolution"):
        return True
    return opcode == "custom-call" and _kind(site) == "matmul"


def _dot(site: Site) -> Dot:
    instruction, operands = site.instruction, site.computation.operands(site.instruction)
    flops = sum(own_flops(site.computation, instruction).values())
    shapes = [flat(operands[0].shape)[0], flat(operands[1].shape)[0], flat(instruction.shape)[0]]
    return Dot(
        instruction.name, shapes[0], shapes[1], shapes[2], flops, site.loops, site.branches, site.times,
        instruction.op_name,
    )  # fmt: skip


def _kind(site: Site) -> str:
    target = target_of(site.instruction)
    if target.startswith("__cudnn$fmha"):
        return "attention"
    if target.startswith(("__cublas$", "__onednn$matmul", "__cudnn$conv")):
        return "matmul"
    kernels = ("__gpu$xla.gpu.triton", "triton_kernel_call", "mosaic_gpu", "tpu_custom_call")
    return "kernel" if target.startswith(kernels) else "other"


def _custom_call(site: Site) -> CustomCall:
    instruction = site.instruction
    operands = [array for o in site.computation.operands(instruction) for array in flat(o.shape)]
    flops = sum(own_flops(site.computation, instruction).values())
    return CustomCall(
        instruction.name, target_of(instruction), _kind(site), _kernel_name(site), tuple(operands),
        tuple(flat(instruction.shape)), flops, site.loops, site.branches, site.times, instruction.op_name,
    )  # fmt: skip


def _kernel_name(site: Site) -> str:
    """The name given to `pallas_call`, or the function's own."""
    if _kind(site) != "kernel":
        return ""
    # The settings of a kernel are MLIR's attributes, not JSON; its code comes before its name.
    told = re.findall(r'\bname = "([^"\\]*)"', site.instruction.attributes.get("backend_config", ""))
    path = [
        part for part in site.instruction.op_name.split("/") if part not in ("", "pallas_call", "mpmd_map")
    ]
    return (told or path or [site.instruction.name])[-1]


def _memory(compiled: Any) -> Memory | None:
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return Memory(
        argument=stats.argument_size_in_bytes,
        output=stats.output_size_in_bytes,
        alias=stats.alias_size_in_bytes,
        temporary=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )

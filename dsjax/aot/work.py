"""How much an instruction computes and moves: FLOPs of products, bytes to and from device memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from dsjax.aot.hlo import Computation, Instruction, Module, Shape, bytes_of, flat
from dsjax.aot.uniform import COLLECTIVES
from dsjax.aot.walk import Turns, as_it_says, loop_of


@dataclass(frozen=True)
class Work:
    """Computation and memory traffic of one device.

    Attributes:
      flops: HLO element type of the operands -> FLOPs of products (a multiply-add is two); of f32 that asks
        for the highest precision, `fp32` (see `Chip.unit`).
      bytes: read from and written to device memory, as if nothing stayed in a cache.
    """

    flops: Mapping[str, float] = field(default_factory=dict)
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        keys = {**self.flops, **other.flops}
        return Work({k: self.flops.get(k, 0) + other.flops.get(k, 0) for k in keys}, self.bytes + other.bytes)

    def __mul__(self, times: int | Fraction) -> Work:
        return Work({k: float(v * times) for k, v in self.flops.items()}, float(self.bytes * times))

    @property
    def total_flops(self) -> float:
        """FLOPs of all types."""
        return sum(self.flops.values())


# Nothing is moved: they name, number or stand for what another instruction makes.
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id",
         "after-all", "optimization-barrier", "iota")  # fmt: skip
_SLICES = ("dynamic-slice", "slice", "gather")
_PASSING = ("bitcast", "convert", "copy", "reshape", "transpose")


class Works:
    """The work of a module's instructions and computations, each counted once."""

    def __init__(self, module: Module, turns: Turns = as_it_says):
        self._module, self._turns = module, turns
        self._computations: dict[str, Work] = {}

    def of_computation(self, name: str) -> Work:
        """The work of one run of a computation."""
        if name not in self._computations:
            computation = self._module.computations[name]
            self._computations[name] = self.of_all(computation, computation.instructions)
        return self._computations[name]

    def of_all(self, computation: Computation, instructions: Iterable[Instruction]) -> Work:
        """The work of several instructions of a computation."""
        return sum((self.of(computation, i) for i in instructions), Work())

    def of(self, computation: Computation, instruction: Instruction) -> Work:
        """The work of an instruction and all that it calls: loops by their trips, the largest branch."""
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith(("-done", "-update")):
            return Work()
        if opcode.removesuffix("-start") in COLLECTIVES:
            return Work()
        if opcode == "while":
            trips = loop_of(self._module, computation, instruction, self._turns).trips
            once = self.of_computation(instruction.called["body"][0])
            return once * (1 if trips is None else trips)
        if opcode == "conditional":
            works = [self.of_computation(name) for name in instruction.branches]
            return max(works, key=lambda work: (work.total_flops, work.bytes))
        if opcode in ("call", "async-start"):
            called = instruction.called.get("calls") or instruction.called.get("to_apply") or []
            return sum((self.of_computation(name) for name in called), Work())
        if opcode == "fusion":
            inner = self._module.computations[instruction.called["calls"][0]]
            if any(i.opcode.removesuffix("-start") in COLLECTIVES for i in inner.instructions):
                return Work()
            return Work(self._flops_inside(inner), _fusion_bytes(computation, instruction, inner))
        return Work(own_flops(computation, instruction), _plain_bytes(computation, instruction))

    def _flops_inside(self, computation: Computation) -> dict[str, float]:
        total = Work()
        for instruction in computation.instructions:
            total += Work(own_flops(computation, instruction))
            for name in instruction.called.get("calls", []) if instruction.opcode == "fusion" else []:
                total += Work(self._flops_inside(self._module.computations[name]))
        return dict(total.flops)


def _plain_bytes(computation: Computation, instruction: Instruction) -> float:
    if instruction.opcode in _SLICES:
        return 2 * bytes_of(instruction.shape)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * bytes_of(computation.operands(instruction)[1].shape)
    if instruction.opcode == "broadcast":
        return bytes_of(instruction.shape)
    return bytes_of(instruction.shape) + sum(bytes_of(o.shape) for o in computation.operands(instruction))


def _fusion_bytes(computation: Computation, instruction: Instruction, inner: Computation) -> float:
    """What a fusion reads and writes: of an array of which it takes or sets a slice, the slice."""
    read = 0.0
    for parameter in inner.parameters:
        users = _through(inner, parameter)
        if users and all(_takes_slice_of(inner, user, parameter) for user in users):
            read += sum(bytes_of(user.shape) for user in users)
        elif users and all(_sets_slice_of(inner, user, parameter) for user in users):
            continue
        else:
            read += bytes_of(parameter.shape)
    root = inner.root
    results = inner.operands(root) if root.opcode == "tuple" else [root]
    return read + sum(_written(inner, result) for result in results)


def _through(computation: Computation, instruction: Instruction) -> list[Instruction]:
    """Who reads a value, past what only renames or retypes it."""
    users = []
    for user in computation.users[instruction.name]:
        users += _through(computation, user) if user.opcode == "bitcast" else [user]
    return users


def _takes_slice_of(computation: Computation, user: Instruction, parameter: Instruction) -> bool:
    return user.opcode in _SLICES and _source(computation, user) is parameter


def _sets_slice_of(computation: Computation, user: Instruction, parameter: Instruction) -> bool:
    return user.opcode == "dynamic-update-slice" and _source(computation, user) is parameter


def _source(computation: Computation, slicing: Instruction) -> Instruction:
    """What a slice is taken of or set in, by its own name and type."""
    source = computation.operands(slicing)[0]
    while source.opcode in _PASSING:
        source = computation.operands(source)[0]
    return source


def _written(computation: Computation, result: Instruction) -> float:
    made = result
    while made.opcode in _PASSING and computation.operands(made)[0].opcode != "parameter":
        made = computation.operands(made)[0]
    if made.opcode == "dynamic-update-slice":
        return bytes_of(computation.operands(made)[1].shape)
    return bytes_of(result.shape)


# ---- products --------------------------------------------------------------------------------


def own_flops(computation: Computation, instruction: Instruction) -> dict[str, float]:
    """FLOPs of a product, convolution or library call by element type; empty for anything else."""
    opcode = instruction.opcode
    if opcode in ("dot", "scaled-dot", "ragged-dot"):
        lhs = flat(computation.operands(instruction)[0].shape)[0]
        contracted = _numbers(instruction.attributes.get("lhs_contracting_dims", ""))
        unit = _unit(lhs.dtype, instruction.attributes.get("operand_precision", ""))
        return {unit: 2.0 * flat(instruction.shape)[0].size * math.prod(lhs.dims[d] for d in contracted)}
    if opcode == "convolution":
        lhs, kernel = (flat(o.shape)[0] for o in computation.operands(instruction))
        unit = _unit(lhs.dtype, instruction.attributes.get("operand_precision", ""))
        return {unit: _convolution(instruction, flat(instruction.shape)[0], kernel)}
    if opcode == "custom-call":
        return _library(computation, instruction)
    return {}


def _unit(dtype: str, precision: str) -> str:
    """An f32 product runs exact only where its operands ask for the highest precision."""
    return "fp32" if dtype == "f32" and "highest" in precision.lower() else dtype


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _convolution(instruction: Instruction, output: Shape, kernel: Shape) -> float:
    """Every output element sums over the kernel's dimensions but that of output features."""
    labels = re.match(r"\w+_(\w+)->", instruction.attributes.get("dim_labels", ""))
    if labels is None:
        return 0.0
    summed = math.prod(d for label, d in zip(labels.group(1), kernel.dims, strict=True) if label != "o")
    return 2.0 * output.size * summed


def _library(computation: Computation, instruction: Instruction) -> dict[str, float]:
    target = target_of(instruction)
    operands = [array for o in computation.operands(instruction) for array in flat(o.shape)]
    if target.startswith(("__cublas$", "__onednn$matmul")) and operands:
        config = _gemm_config(instruction.backend_config)
        unit = _unit(operands[0].dtype, str(config.get("precision_config", "")))
        numbers = config.get("dot_dimension_numbers", {})
        contracted = [int(d) for d in numbers.get("lhs_contracting_dimensions", [len(operands[0].dims) - 1])]
        depth = math.prod(operands[0].dims[d] for d in contracted)
        return {unit: 2.0 * flat(instruction.shape)[0].size * depth}
    if target.startswith("__cudnn$fmha") and operands:
        return {operands[0].dtype: _attention(instruction, operands)}
    if target.startswith("__cudnn$conv") and len(operands) > 1:
        # Labels are those of the forward convolution, whose output or kernel may stand elsewhere.
        made = flat(instruction.shape)[0]
        output, kernel = {
            "__cudnn$convBackwardInput": (operands[0], operands[1]),
            "__cudnn$convBackwardFilter": (operands[1], made),
        }.get(target, (made, operands[1]))
        return {operands[0].dtype: _convolution(instruction, output, kernel)}
    return _product_of_kernel(instruction, operands)


def _product_of_kernel(instruction: Instruction, operands: list[Shape]) -> dict[str, float]:
    """FLOPs of a Pallas kernel that is given two fp8 matrices, [m, k] and [n, k], and makes one [m, n].

    Of other kernels nothing tells what they compute.
    """
    matrices = [operand for operand in operands if operand.dtype.startswith("f8") and len(operand.dims) == 2]
    made = flat(instruction.shape)
    if len(matrices) != 2 or not made or len(made[0].dims) != 2:
        return {}
    (m, k), (n, depth) = (matrix.dims for matrix in matrices)
    return {matrices[0].dtype: 2.0 * m * n * k} if depth == k and tuple(made[0].dims) == (m, n) else {}


def target_of(instruction: Instruction) -> str:
    """The name of the library function of a custom call."""
    return instruction.attributes.get("custom_call_target", "").strip('"')


def _gemm_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in ("gemm_backend_config", "onednn_matmul_config"):
        if key in config:
            return config[key]
    return {}


def _attention(instruction: Instruction, operands: list[Shape]) -> float:
    """FLOPs of fused attention: two products forward, five backward; half of them under a causal mask."""
    config = instruction.backend_config.get("cudnn_fmha_backend_config", {})
    scores = [int(n) for n in config.get("intermediate_tensor_shape", {}).get("dimensions", [])]
    products = 5 if "Backward" in target_of(instruction) else 2
    share = 0.5 if "CAUSAL" in config.get("mask_type", "") else 1.0
    return products * share * 2.0 * math.prod(scores) * operands[0].dims[-1]

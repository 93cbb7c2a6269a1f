"""What the compiler made of a candidate, read from the compiled HLO by the numbers in its names.

`jaxpr.walk` numbers the operations; what was compiled from `Step.tagged` carries these numbers in its
metadata, so that each instruction inside a fusion tells which operation it is.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from dsjax.aot.hlo import Instruction, Module
from dsjax.aot.uniform import COLLECTIVES
from dsjax.aot.walk import Site, walk
from dsjax.aot.work import own_flops, target_of
from dsjax.plan.explanation.fusion import Candidate
from dsjax.plan.explanation.jaxpr import TAG

FUSED, PARTLY, APART, REMOVED, UNREAD = "fused", "partly", "apart", "removed", "unread"
_PLAIN = ("bitcast", "get-tuple-element", "copy", "reshape", "transpose")
_DOTS = ("dot", "scaled-dot", "ragged-dot", "convolution")


@dataclass(frozen=True)
class Reading:
    """What became of a product and the chain behind it.

    Attributes:
      state: fused: the whole chain is in the product's kernel; partly; apart: none of it is; removed: the
        chain is in no instruction of its own, simplified away; unread: the product was not found.
      kernel: what runs the product: a Triton fusion, a library, a fusion, a loop.
      inside: how many operations of the chain are in that kernel, of `present` that were found at all.
      others: kernels that read the product's result for the rest.
      collective: the product's result goes into a collective before the chain.
      places: at how many places the product was compiled (peeled and unrolled loops repeat it).
    """

    state: str
    kernel: str = ""
    inside: int = 0
    present: int = 0
    others: int = 0
    collective: str = ""
    places: int = 0

    @property
    def text(self) -> str:
        """One phrase."""
        if self.state == UNREAD:
            return "the product is not in the compiled program: merged with an equal one, or removed"
        where = f"in the {self.kernel}"
        if self.state == REMOVED:
            return f"nothing of it is left beside the product ({self.kernel})"
        if self.state == FUSED:
            return f"XLA has it {where}"
        rest = (
            f"the result goes into the collective {self.collective}"
            if self.collective
            else _count(self.others)
        )
        if self.state == PARTLY:
            # How much a library computes leaves no trace.
            part = "part of it" if " epilogue " in where else f"{self.inside} of {self.present} operations"
            return f"XLA has {part} {where}; {rest}"
        return f"XLA has none of it {where}; {rest}"


def _count(kernels: int) -> str:
    if kernels == 1:
        return "one other kernel reads the result"
    return f"{kernels or 'no'} other kernels read the result"


@dataclass(frozen=True, eq=False)
class _Kernel:
    """An instruction that is launched: a fusion with all in it, or one instruction alone."""

    site: Site
    name: tuple[str, str]


class Compiled:
    """A compiled program, asked where numbered operations are."""

    def __init__(self, module: Module):
        self._module = module
        self._kernels: dict[tuple[str, str], _Kernel] = {}
        self._numbers: dict[tuple[str, str], set[int]] = defaultdict(set)
        self._places: dict[int, list[tuple[Site, tuple[str, str]]]] = defaultdict(list)
        for site in walk(module):
            found = TAG.findall(site.instruction.op_name)
            if found and site.instruction.opcode not in ("fusion", "parameter", "constant"):
                kernel = _kernel(site)
                self._kernels.setdefault(kernel.name, kernel)
                self._numbers[kernel.name].add(int(found[-1]))
                self._places[int(found[-1])].append((site, kernel.name))

    def read(self, candidate: Candidate) -> Reading:
        """What became of a candidate."""
        # A product that XLA turned takes the name of the operation that turned it.
        numbers = (candidate.product.number, *candidate.renames)
        dots = [p for n in numbers for p in self._places.get(n, []) if _is_dot(p[0].instruction)]
        if not dots:
            return Reading(UNREAD)
        chain = {o.number for o in candidate.chain}
        present = {n for n in chain if self._places.get(n)}
        homes = list(dict.fromkeys(name for _, name in dots))
        # The copy that runs most often speaks for all.
        home = max(homes, key=lambda name: self._kernels[name].site.times)
        inside = present & self._numbers[home]
        site = self._kernels[home].site
        readers, collective = self._readers(site)
        others = sum(bool(self._numbers[name] & (present - inside)) for name in readers)
        found, count = len(inside), len(present)
        if _epilogue(site.instruction):
            # A library takes in what it computes without a trace of it.
            found, count = len(chain - present), len(chain)
            state = PARTLY if others else FUSED
        else:
            state = REMOVED if not present else FUSED if found == count else PARTLY if inside else APART
        return Reading(state, _describe(site.instruction), found, count, others, collective, len(homes))

    def product_flops(self) -> dict[int, float]:
        """FLOPs of the products that carry each number, of a step on one device."""
        found: dict[int, float] = defaultdict(float)
        for number, places in self._places.items():
            for site, _ in places:
                own = sum(own_flops(site.computation, site.instruction).values())
                found[number] += own * site.times if own else 0.0
        return {number: flops for number, flops in found.items() if flops}

    def _readers(self, site: Site) -> tuple[list[tuple[str, str]], str]:
        """The kernels that read a kernel's result, past what only turns or renames it; a collective that takes it."""
        seen, front, readers, collective = set[str](), [site.instruction], [], ""
        while front:
            for user in site.computation.users.get(front.pop().name, []):
                if user.name in seen:
                    continue
                seen.add(user.name)
                kind = user.opcode.removesuffix("-start")
                if kind in COLLECTIVES:
                    collective = kind
                elif self._only_turns(user):
                    front.append(user)
                else:
                    readers.append((user.computation, user.name))
        return readers, collective

    def _only_turns(self, instruction: Instruction) -> bool:
        if instruction.opcode != "fusion":
            return instruction.opcode in _PLAIN
        inner = self._module.computations[instruction.called["calls"][0]]
        return all(i.opcode in (*_PLAIN, "parameter") for i in inner.instructions)


def _kernel(site: Site) -> _Kernel:
    """The outermost fusion around an instruction; the instruction itself where there is none."""
    outer = next((s for s in site.wrappers if s.instruction.opcode == "fusion"), site)
    return _Kernel(outer, (outer.computation.name, outer.instruction.name))


def _is_dot(instruction: Instruction) -> bool:
    if instruction.opcode in _DOTS:
        return True
    return instruction.opcode == "custom-call" and target_of(instruction).startswith(
        ("__cublas$", "__onednn$matmul", "__cudnn$conv")
    )


def _epilogue(instruction: Instruction) -> str:
    """What a library call computes beside the product, as the library names it."""
    if instruction.opcode != "custom-call":
        return ""
    told = str(instruction.backend_config.get("gemm_backend_config", {}).get("epilogue", "DEFAULT"))
    if told != "DEFAULT":
        return told
    if "BiasActivation" not in target_of(instruction):
        return ""
    mode = str(
        instruction.backend_config.get("cudnn_conv_backend_config", {}).get("activation_mode", "kNone")
    )
    return "BIAS" if mode == "kNone" else f"BIAS_{mode.removeprefix('k').upper()}"


def _describe(instruction: Instruction) -> str:
    """What runs a product, in words."""
    if instruction.opcode == "custom-call":
        epilogue = _epilogue(instruction)
        return f"library call {target_of(instruction)}{epilogue and f' with the epilogue {epilogue}'}"
    if instruction.opcode != "fusion":
        return "product alone"
    config = instruction.backend_config
    kinds = (config.get(key, {}).get("kind", "") for key in ("fusion_backend_config", "fusion_config"))
    kind = next((str(kind) for kind in kinds if kind), "")
    if "triton" in kind:
        return "Triton fusion of the product"
    if kind.strip("_"):
        return f"{kind.strip('_').removesuffix('_fusion')} fusion of the product"
    return (
        f"{instruction.attributes.get('kind', '').removeprefix('k').lower() or 'one'} fusion of the product"
    )

"""Decisions: which candidates are worth a fused kernel, and who brings it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsjax.aot import Chip
from dsjax.plan.explanation.fused import FUSED, PARTLY, REMOVED, UNREAD, Compiled, Reading
from dsjax.plan.explanation.fusion import THRESHOLD, Candidate
from dsjax.plan.explanation.places import collapsed


@dataclass(frozen=True)
class FusedKernel:
    """A kernel that computes a product and what follows it.

    Attributes:
      followed_by: the chain that it takes, as `fusion.Candidate.followed_by`.
      chips: names of chips that it was made for; dtypes: of what it multiplies.
    """

    name: str
    followed_by: tuple[str, ...]
    chips: frozenset[str]
    dtypes: frozenset[str]

    def takes(self, candidate: Candidate, chip: Chip) -> bool:
        """Whether it can replace a candidate on a chip."""
        fits = chip.name in self.chips and candidate.product.dtype in self.dtypes
        return fits and candidate.followed_by == self.followed_by


# What `pallas_kernels` has; none of its kernels is a product with an epilogue yet.
KERNELS: tuple[FusedKernel, ...] = ()


@dataclass(frozen=True)
class Judged:
    """Like candidates (of repeated layers) and what is decided for them.

    Attributes:
      path, phase: where; product: the arrays of the largest; followed_by: the chain.
      places: of the program; runs: of a step.
      share: the predicted gain over the time apart; gain_seconds, apart_seconds: of all runs of a step.
      saved_bytes, recomputed_flops: of all runs of a step.
      pinned: a sharding is pinned in the chain, where devices may have to exchange.
      taken: the share is over the threshold.
      by: kernel, xla (it is fused already), open (taken, but nobody fuses it), blocked (a collective takes the
        result), gone (not in the compiled program), unread (not compiled), left.
      decision: in words; read: what the compiled program showed, also where it is left.
    """

    path: str
    phase: str
    product: str
    followed_by: tuple[str, ...]
    places: int
    runs: int
    share: float
    gain_seconds: float
    apart_seconds: float
    saved_bytes: float
    recomputed_flops: float
    pinned: bool
    taken: bool
    by: str
    decision: str
    read: str


def judge(
    found: Sequence[Candidate],
    chip: Chip,
    compiled: Compiled | None,
    kernels: Sequence[FusedKernel] = KERNELS,
) -> tuple[Judged, ...]:
    """The candidates with decisions, like ones together, the largest gain of a step first."""
    groups: dict[object, list[tuple[Candidate, Reading | None]]] = {}
    for candidate in found:
        reading = None if compiled is None else compiled.read(candidate)
        product = candidate.product
        key = (
            collapsed(product.path), product.phase, candidate.followed_by, product.dtype,
            candidate.share > THRESHOLD, reading and (reading.state, reading.kernel, reading.collective),
        )  # fmt: skip
        groups.setdefault(key, []).append((candidate, reading))
    judged = [_judged(members, chip, kernels) for members in groups.values()]
    return tuple(sorted(judged, key=lambda j: -j.gain_seconds))


def _judged(
    members: Sequence[tuple[Candidate, Reading | None]], chip: Chip, kernels: Sequence[FusedKernel]
) -> Judged:
    candidate, reading = max(members, key=lambda m: m[0].product.flops)
    product = candidate.product
    kernel = next((k.name for k in kernels if k.takes(candidate, chip)), "")
    by, decision = _decided(candidate, kernel, reading)
    arrays = [
        f"{a.dtype}[{','.join(map(str, a.shape))}]" for a in (*product.operands[:2], product.results[0])
    ]

    def total(each: Callable[[Candidate], float]) -> float:
        return sum(each(c) * c.product.times for c, _ in members)

    gain, apart = total(lambda c: c.gain_seconds), total(lambda c: c.apart_seconds)
    return Judged(
        path=collapsed(product.path),
        phase=product.phase,
        product=f"{arrays[0]} x {arrays[1]} -> {arrays[2]}",
        followed_by=candidate.followed_by,
        places=len(members),
        runs=sum(c.product.times for c, _ in members),
        share=gain / apart,
        gain_seconds=gain,
        apart_seconds=apart,
        saved_bytes=total(lambda c: c.saved_bytes),
        recomputed_flops=total(lambda c: c.recomputed_flops),
        pinned=candidate.pinned,
        taken=candidate.share > THRESHOLD,
        by=by,
        decision=decision,
        read="" if reading is None else reading.text,
    )


def _decided(candidate: Candidate, kernel: str, reading: Reading | None) -> tuple[str, str]:
    """Who fuses a candidate, and that in words."""
    if candidate.share <= THRESHOLD:
        return "left", f"left: under {THRESHOLD:.0%}"
    if kernel:
        return "kernel", f"taken: kernel {kernel}"
    if reading is None:
        exchange = "; devices may have to exchange the result first" if candidate.pinned else ""
        return "unread", f"taken: no kernel here; what XLA does is not known, nothing was compiled{exchange}"
    if reading.state == UNREAD:
        return "gone", f"taken, but {reading.text}"
    if reading.state in (FUSED, REMOVED):
        return "xla", f"taken: left to XLA; {reading.text}"
    if reading.collective:
        return "blocked", f"taken by the numbers, but devices exchange the result first: {reading.text}"
    if reading.state == PARTLY:
        return "open", f"taken, in part: {reading.text}; no kernel here for the rest"
    return "open", f"taken, but open: no kernel here, and {reading.text}"

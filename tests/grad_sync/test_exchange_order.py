"""On a CPU no exchange runs beside a loop that has collectives of its own, where devices would wait for each other."""

from __future__ import annotations

import itertools

import numpy as np
import oracle

from dsjax.aot.groups import parse_groups
from dsjax.aot.hlo import Computation, Module, parse
from dsjax.aot.uniform import COLLECTIVES


def before(computation: Computation) -> dict[str, set[str]]:
    """All that has to be there before an instruction can start."""
    found: dict[str, set[str]] = {}
    for one in computation.instructions:
        found[one.name] = set(one.operands).union(*(found[name] for name in one.operands))
    return found


def has_collectives(module: Module, computation: str) -> bool:
    return any(
        one.opcode in COLLECTIVES
        or any(has_collectives(module, name) for names in one.called.values() for name in names)
        for one in module.computations[computation].instructions
    )


def test_every_exchange_is_before_or_after_every_loop_with_collectives() -> None:
    case = {**oracle.PLAIN, "data": 2, "context": 2, "gradient_accumulation_steps": 2, "layers": 9,
            "exchange": "groups"}  # fmt: skip
    program = oracle.program_of(case)
    batch = program.place(oracle.batch_of("full", 0))
    module = parse(program.lower_step(batch).compile().as_text())
    entry = module.entry
    earlier = before(entry)
    loops = [
        one.name
        for one in entry.instructions
        if one.opcode == "while" and has_collectives(module, one.called["body"][0])
    ]
    between = [
        [0, 2],
        [1, 3],
    ]  # devices of two replicas; within one, the compiler's own sums keep to their order
    sums = [
        one.name
        for one in entry.instructions
        if one.opcode in COLLECTIVES
        and np.asarray(parse_groups(one.attributes["replica_groups"], 4)).tolist() == between
    ]
    assert len(loops) > 3 and len(sums) > 3
    for one, other in [*itertools.product(sums, loops), *itertools.combinations(loops, 2)]:
        assert one in earlier[other] or other in earlier[one], f"{one} may run beside {other}"

"""Compiling for clusters that are not here, and reading what was compiled.

target = parse_target("2x8xH100")
mesh = make_mesh({"data": 2, "fsdp": 8}, target.devices())
compiled = compile_for(target, lower_for(target, step, *abstract_arguments))
inspect(compiled, mesh).collectives.over("data").of("all-reduce").in_loop()
"""

from dsjax.aot.chips import Chip, Link, load_chips
from dsjax.aot.collectives import Collective, Collectives
from dsjax.aot.compile import choose_options, compile_chosen, compile_for, lower_for, on
from dsjax.aot.inspection import Inspection, inspect
from dsjax.aot.target import INSTALL_AOT, Target, missing_for, parse_target
from dsjax.aot.walk import Loop, Turns
from dsjax.aot.work import Work

__all__ = [
    "INSTALL_AOT",
    "Chip",
    "Collective",
    "Collectives",
    "Inspection",
    "Link",
    "Loop",
    "Target",
    "Turns",
    "Work",
    "choose_options",
    "compile_chosen",
    "compile_for",
    "inspect",
    "load_chips",
    "lower_for",
    "missing_for",
    "on",
    "parse_target",
]

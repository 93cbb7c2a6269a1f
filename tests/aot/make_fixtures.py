"""Compiles `programs.known` for eight H100s and keeps its HLO, so that tests read it where no compiler for GPUs is.

Run with each supported jax and the extra `aot`: JAX_PLATFORMS=cpu python tests/aot/make_fixtures.py
"""

from __future__ import annotations

import re

import jax
import programs

from dsjax import aot


def main() -> None:
    """Writes fixtures/known-VERSION.hlo for the jax that runs it."""
    target = aot.parse_target("2x4xH100")
    function, arguments = programs.known(programs.mesh_of(target.devices()))
    text = aot.compile_for(target, aot.lower_for(target, function, *arguments)).as_text()
    # Tables of file names, and what the tests have no use for.
    text = re.sub(r"\nFileNames\n.*?(?=\n\n%|\n\nENTRY)", "", text, flags=re.DOTALL)
    text = re.sub(r"\nStackFrames\n.*?(?=\n\n%|\n\nENTRY)", "", text, flags=re.DOTALL)
    programs.FIXTURES.mkdir(exist_ok=True)
    place = programs.FIXTURES / f"known-{'.'.join(jax.__version__.split('.')[:2])}.hlo"
    place.write_text(text)
    print(f"{place.name}: {len(text)} characters")


if __name__ == "__main__":
    main()

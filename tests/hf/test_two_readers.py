"""Two processes that start from a saved model: each reads its own half of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FIXTURE = Path(__file__).parents[1] / "models" / "fixtures" / "llama-plain"
SCRIPT = """
import sys
import jax
from dsjax.backend.platform import setup
from dsjax.config import load
from dsjax.hf.tensors import Tensors
from dsjax.train.assemble import program_for
from dsjax.train.resume import fresh_state

made, begin = [], Tensors.__init__
Tensors.__init__ = lambda self, *args: (begin(self, *args), made.append(self))[0]
config = load([], sys.argv[1:])
setup(config.runtime)
program, _ = program_for(config, jax.devices())
state = fresh_state(program, config)
of = sum(tensors.stored_bytes for tensors in made) / len(made)
print(f"of {jax.process_count()}: read {sum(tensors.read for tensors in made) / of:.3f}", flush=True)
"""


def test_each_process_reads_what_its_devices_hold(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [
        "mesh.fsdp=2", "model.kind=llama", f"model.config={FIXTURE}", f"run.init_from={FIXTURE}",
        f"run.dir={tmp_path / 'run'}", "data.kind=synthetic", "train.sequence_length=16", "runtime.platform=cpu",
        "runtime.cpu_devices=1",
    ]  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "dsjax",
        "launch",
        "--workers",
        "2",
        "--",
        sys.executable,
        "script.py",
        *words,
    ]
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    said = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if "of 2: read" in line]
    assert len(said) == 2, done.stdout + done.stderr
    # The vocabulary's padding is no part of the files, and lies with the second half.
    assert abs(sum(said) - 1) < 0.002 and max(said) < 0.65

"""Readying jax: each case in a process of its own, as jax starts once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BEGIN = (
    "from dsjax.backend.platform import setup\nfrom dsjax.cli_errors import guarded\n"
    "from dsjax.config.schema import RuntimeConfig as R\nimport sys\n"
)


def run(code: str, **environ: str) -> tuple[int, str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "DSJAX_", "XLA_", "SLURM_"))}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code],
        env={**clean, "PYTHONPATH": str(ROOT), **environ}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    # A GPU plugin on a machine without a GPU writes to stderr whatever it is told.
    lines = [
        line
        for line in done.stderr.splitlines()
        if not re.match(r"[IWE]\d{4} |WARNING: All log messages", line)
    ]
    return done.returncode, done.stdout.strip(), "\n".join(lines)


def test_the_module_does_not_import_jax():
    assert run("print('jax' in sys.modules)")[1] == "False"


def test_simulated_devices_on_the_cpu(tmp_path):
    code, out, err = run(
        "setup(R(cpu_devices=3))\nimport jax\nprint(jax.default_backend(), jax.device_count())\n"
        "setup(R(cpu_devices=3))",
        XDG_CACHE_HOME=str(tmp_path),
    )
    assert (code, out, err) == (0, "cpu 3", "")


def test_settings_that_come_too_late_are_refused():
    late = "import jax\njax.devices()\nsys.exit(guarded(lambda: setup(R({}, compilation_cache=None))))"
    code, _, err = run(late.format("cpu_devices=5"), JAX_PLATFORMS="cpu")
    assert code == 2 and "runtime.cpu_devices: 5 were asked for but there are 1" in err
    code, _, err = run(late.format("platform='gpu'"), JAX_PLATFORMS="cpu")
    assert code == 2 and "runtime.platform: gpu was asked for but runs on cpu" in err
    assert run(late.format("cpu_devices=1, platform='cpu'"), JAX_PLATFORMS="cpu") == (0, "", "")


@pytest.mark.parametrize(("platform", "advice"), [("gpu", "dsjax[gpu]"), ("tpu", "jax[tpu]")])
def test_a_platform_that_is_not_there_is_refused_with_advice(platform, advice):
    code, out, err = run(
        f"sys.exit(guarded(lambda: setup(R(platform='{platform}', compilation_cache=None))))"
    )
    assert code == 2 and out == ""
    assert (
        err.splitlines()[-1].startswith(f"dsjax: runtime.platform: no {platform.upper()}") and advice in err
    )
    assert "Traceback" not in err


def test_simulated_devices_are_not_gpus():
    code, _, err = run("sys.exit(guarded(lambda: setup(R(platform='gpu', cpu_devices=2))))")
    assert code == 2 and "runtime.cpu_devices" in err and "runtime.platform is gpu" in err


COMPILES = (
    "import jax, jax.numpy as jnp\nprint(jax.config.jax_compilation_cache_dir)\n"
    "jax.jit(lambda x: jnp.tanh(x @ x).sum() + {})(jnp.ones((8, 8)))\n"
)


def test_compiled_programs_are_kept_in_the_users_cache(tmp_path):
    code, out, err = run("setup(R(platform='cpu'))\n" + COMPILES.format(1), XDG_CACHE_HOME=str(tmp_path))
    assert (code, out, err) == (0, str(tmp_path / "dsjax" / "xla"), "")
    assert list((tmp_path / "dsjax" / "xla").glob("*-cache"))


def test_a_directory_of_the_users_own(tmp_path):
    place = tmp_path / "new" / "cache"
    _, out, _ = run(f"setup(R(platform='cpu', compilation_cache={str(place)!r}))\n" + COMPILES.format(2))
    assert out == str(place) and list(place.glob("*-cache"))
    kept = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "mine")}
    assert run("setup(R(platform='cpu'))\n" + COMPILES.format(3), **kept)[1] == str(tmp_path / "mine")
    none = "setup(R(platform='cpu', compilation_cache=None))\n"
    assert run(none + COMPILES.format(4), **kept)[1] == "None"


def test_a_cache_that_cannot_be_written_is_told_and_the_run_goes_on(tmp_path):
    (tmp_path / "file").write_text("")
    code, out, err = run(
        f"setup(R(platform='cpu', compilation_cache='{tmp_path}/file/cache'))\n" + COMPILES.format(5)
    )
    assert (code, out) == (0, "None")
    assert err.startswith("dsjax: runtime.compilation_cache:") and "each start compiles again" in err


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_directory_of_somebody_else_is_told_too(tmp_path):
    tmp_path.chmod(0o500)
    code, _, err = run(f"setup(R(platform='cpu', compilation_cache='{tmp_path}'))\n" + COMPILES.format(6))
    assert code == 0 and "it cannot be written; compiled programs are not kept" in err


def test_none_runs_alone_whatever_the_environment_says():
    environ = {"DSJAX_COORDINATOR": "10.255.255.1:1", "DSJAX_NUM_PROCESSES": "2", "DSJAX_PROCESS_ID": "0"}
    code = "setup(R(platform='cpu', distributed='none', compilation_cache=None))\n"
    assert run(code + "import jax\nprint(jax.process_count())", **environ) == (0, "1", "")

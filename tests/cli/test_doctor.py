"""The doctor says what is here, and refuses only what is broken."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest

import dsjax.doctor
from dsjax.cli import main
from dsjax.doctor import EXTRAS, doctor, examine
from dsjax.errors import InputError

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    """A directory, a cache and an environment of the test's own; small probes of the disk."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(dsjax.doctor, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(dsjax.doctor, "PROBE_BLOCK", 1 << 18)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "DSJAX_", "OMPI_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Make dsjax look installed with these requirements beside those of pyproject.toml."""

    def install(*more: str) -> None:
        lines = [f"Requires-Dist: {requirement}" for requirement in (*PROJECT["dependencies"], *more)]
        for extra, requirements in PROJECT["optional-dependencies"].items():
            lines += [f"Provides-Extra: {extra}"]
            lines += [f'Requires-Dist: {requirement}; extra == "{extra}"' for requirement in requirements]
        where = tmp_path / "site" / f"dsjax-{PROJECT['version']}.dist-info"
        where.mkdir(parents=True)
        head = f"Metadata-Version: 2.1\nName: dsjax\nVersion: {PROJECT['version']}\n"
        (where / "METADATA").write_text(head + "\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(where.parent)

    return install


def verdicts(report: dict, level: str) -> list[str]:
    return [verdict["text"] for verdict in report["verdicts"] if verdict["level"] == level]


def test_extras_are_those_of_the_project():
    assert list(EXTRAS) == list(PROJECT["optional-dependencies"])


def test_a_whole_installation_is_told_as_one_json_object(installed, capsys, tmp_path):
    installed()
    assert doctor(as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"][1] == {"name": "dsjax", "version": "0.1.0", "wants": "", "fault": None}
    assert {row["name"] for row in report["versions"]} >= {"jax", "flax", "optax", "typer"}
    assert not any(row["fault"] for row in report["versions"])
    assert report["devices"]["platform"] == "cpu" and len(report["devices"]["devices"]) == 8
    assert report["host"]["memory_bytes"] > 1 << 20
    assert [row["for"] for row in report["disks"]] == ["runs", "cache"]
    assert all(row["free_bytes"] > 0 and row["write_bytes_per_second"] > 0 for row in report["disks"])
    assert report["cluster"] is None
    assert verdicts(report, "works") and not verdicts(report, "broken")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site"]  # the probes left nothing


def test_tables_name_what_json_holds(installed, capsys):
    installed()
    assert doctor() == 0
    out = capsys.readouterr().out
    for part in ("devices (cpu)", "versions", "extras", "disks", "verdicts", "JAX_PLATFORMS"):
        assert part in out


def test_a_broken_installation_ends_with_2_and_what_to_run(installed, capsys):
    installed("flax>=99,<100", "no-such-package-here>=1")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--json"])
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    extras = json.loads(out)["extras"]
    assert not [row for row in extras if "flax" in str(row["missing"])]  # what is always needed is no extra's
    flax, missing = err.splitlines()
    assert flax.startswith("dsjax: flax ") and flax.endswith(": run pip install 'flax<100,>=99'")
    assert missing == (
        "dsjax: no-such-package-here is not installed: run pip install 'no-such-package-here>=1'"
    )


def test_a_missing_extra_is_a_note_with_its_remedy(installed, monkeypatch):
    installed()
    real = dsjax.doctor._installed
    monkeypatch.setattr(dsjax.doctor, "_installed", lambda name: None if name == "pyarrow" else real(name))
    report = examine()
    (row,) = [row for row in report["extras"] if row["name"] == "parquet"]
    assert row["missing"][0].startswith("pyarrow is not installed: run pip install 'pyarrow")
    said = (
        "will not work: data.kind parquet (pyarrow is not installed); pip install 'dsjax[parquet]' mends it"
    )
    assert said in verdicts(report, "note")


def test_an_extra_of_a_requirement_is_looked_into(installed):
    """The gpu extra is jax's own cuda12: jax being there says nothing."""
    installed()
    (row,) = [row for row in examine()["extras"] if row["name"] == "gpu"]
    assert any(fault.startswith("jax-cuda12-plugin is not installed") for fault in row["missing"])


def fake_nvidia_smi(tmp_path: Path, monkeypatch, script: str) -> None:
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")


def test_gpus_that_jax_does_not_use_are_noted(tmp_path, monkeypatch, capsys):
    script = (
        'case "$1" in topo) echo "GPU0 X NV18";; *) echo "NVIDIA H100, 560.1, 81559 MiB, 0 MiB, N/A";; esac'
    )
    fake_nvidia_smi(tmp_path, monkeypatch, script)
    report = examine()
    assert report["nvidia"]["gpus"] == ["NVIDIA H100, 560.1, 81559 MiB, 0 MiB, N/A"]
    assert report["nvidia"]["links"] == "GPU0 X NV18"
    assert "JAX_PLATFORMS=cpu hides 1 GPUs from jax" in verdicts(report, "note")
    monkeypatch.delenv("JAX_PLATFORMS")
    assert any("pip install 'dsjax[gpu]'" in text for text in verdicts(examine(), "note"))
    doctor()
    assert "NV18" in capsys.readouterr().out


def test_a_driver_that_fails_is_noted(tmp_path, monkeypatch):
    fake_nvidia_smi(tmp_path, monkeypatch, "echo 'Driver/library version mismatch' >&2; exit 18")
    assert any("Driver/library version mismatch" in text for text in verdicts(examine(), "note"))


def test_jax_that_cannot_start_is_broken(monkeypatch):
    import jax

    def fail() -> None:
        raise RuntimeError("Unable to initialize backend 'cuda':\n no driver")

    monkeypatch.setattr(jax, "local_devices", fail)
    report = examine()
    assert verdicts(report, "broken") == [
        "jax finds no device: Unable to initialize backend 'cuda': no driver"
    ]


def test_a_disk_that_cannot_be_written_or_is_full_is_noted(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr(dsjax.doctor, "LITTLE_DISK", 1 << 60)
    notes = verdicts(examine(), "note")
    assert any(text.startswith("/proc/nowhere/dsjax cannot be written (") for text in notes)
    assert any(text.startswith(f"{tmp_path} has ") and "set run.dir" in text for text in notes)


def test_a_cluster_is_told_and_a_wrong_one_refused(monkeypatch):
    monkeypatch.setenv("DSJAX_COORDINATOR", "localhost:1234")
    monkeypatch.setenv("DSJAX_NUM_PROCESSES", "4")
    monkeypatch.setenv("DSJAX_PROCESS_ID", "2")
    report = examine()
    assert report["cluster"]["coordinator"] == "localhost:1234"
    assert any("process 2 of 4" in text for text in verdicts(report, "works"))
    monkeypatch.setenv("DSJAX_PROCESS_ID", "9")
    with pytest.raises(InputError, match="DSJAX_PROCESS_ID"):
        doctor(as_json=True)

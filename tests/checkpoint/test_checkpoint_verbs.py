"""`dsjax checkpoints list|inspect|prune|copy|diff`, as typed."""

from __future__ import annotations

import shutil

import filelock
import jax.numpy as jnp
import pytest

from dsjax.checkpoint import DiskCheckpoints
from dsjax.cli import main
from dsjax.config.checkpoint import DiskConfig


@pytest.fixture
def dsjax(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["checkpoints", *argv])
        out, err = capfd.readouterr()
        return ended.value.code, out, err

    return run


@pytest.fixture
def run(tmp_path):
    """A run with three checkpoints; only the last one has another kernel."""
    directory = tmp_path / "runs" / "a"
    directory.mkdir(parents=True)
    config = "checkpoint: {disk: {keep: 1, keep_best: 1}, memory: {path: mem}}\n"
    (directory / "config.yaml").write_text(config)
    checkpoints = DiskCheckpoints(directory / "checkpoints", DiskConfig(keep=9))
    for step, loss in ((1, 2.0), (2, 1.0), (3, 3.0)):
        kernel = jnp.arange(12.0).reshape(3, 4).at[1, 2].add(0.5 * (step == 3))
        state = {"params": {"kernel": kernel, "bias": jnp.ones(4)}, "step": jnp.int32(step)}
        facts = {"mesh": {"data": 2, "fsdp": 1}, "processes": 1}
        checkpoints.save(step, state, facts, {"heldout": {"loss": loss}})
    checkpoints.close()
    return directory


def test_list_names_step_size_tier_and_place(dsjax, run):
    assert dsjax("copy", "runs/a", "2", f"file://{run}/store")[0] == 0
    code, out, err = dsjax("list", "runs/a", f"checkpoint.remote.urls=file://{run}/store")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()[1:]]
    assert [(row[0], row[-2], row[-1]) for row in rows] == [
        ("1", "disk", "runs/a/checkpoints/1"),
        ("2", "disk", "runs/a/checkpoints/2"),
        ("3", "disk", "runs/a/checkpoints/3"),
        ("2", "remote", f"file://{run}/store/2"),
    ]
    assert dsjax("list", f"file://{run}/store")[1].splitlines()[1].split()[0] == "2"
    assert dsjax("list", "runs/a/checkpoints")[1].count("disk") == 3
    assert "no such file" in dsjax("list", "nothing.yaml")[2]


@pytest.mark.parametrize(
    "words", [["runs/a"], ["runs/a", "3"], ["runs/a/checkpoints"], ["runs/a/checkpoints/3"]]
)
def test_inspect_shows_arrays_and_verifies(dsjax, run, words):
    code, out, err = dsjax("inspect", *words, "--verify")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert rows["params/kernel"][:4] == ["3", "x", "4", "float32"]
    assert rows["step"][:2] == ["scalar", "int32"]
    assert "over a mesh of data 2" in out
    assert "heldout: loss 3" in out
    assert out.endswith("3 arrays are as they were saved\n")


def test_inspect_finds_damage_and_what_there_is_not(dsjax, run):
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "3" / "state", checkpoints / "2" / "state", dirs_exist_ok=True)
    (checkpoints / "2" / "state" / "manifest.ocdbt").write_bytes(
        (checkpoints / "3" / "state" / "manifest.ocdbt").read_bytes()
    )
    assert dsjax("inspect", "runs/a", "2")[0] == 0
    code, _, err = dsjax("inspect", "runs/a", "2", "--verify")
    assert (code, "params/kernel not as saved" in err) == (2, True)
    code, _, err = dsjax("inspect", "runs/a", "7")
    assert (code, err) == (
        2,
        "dsjax: runs/a/checkpoints: holds no checkpoint of step 7; steps on disk: 1, 2, 3\n",
    )


def test_prune_follows_the_rules_of_the_run(dsjax, run):
    code, out, _ = dsjax("prune", "runs/a", "--dry-run")
    assert code == 0
    assert out.startswith("runs/a/checkpoints: would remove 1 of 3 (")
    assert out.endswith("): 1\n")
    assert len(list((run / "checkpoints").iterdir())) == 3
    with filelock.FileLock(run / ".lock"):
        code, _, err = dsjax("prune", "runs/a")
    assert (code, "a run is using this directory" in err) == (2, True)
    assert dsjax("prune", "runs/a")[0] == 0
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["2", "3"]
    assert "nothing to remove, 2 kept" in dsjax("prune", "runs/a")[1]
    shutil.copytree(run / "checkpoints", run / "loose")
    code, _, err = dsjax("prune", "runs/a/loose")
    assert (code, "--keep: say how many to keep" in err) == (2, True)
    assert dsjax("prune", "runs/a/loose", "--keep", "1")[0] == 0
    assert [path.name for path in (run / "loose").iterdir()] == ["3"]


def test_copies_go_out_and_come_back(dsjax, run):
    url = f"file://{run}/store"
    assert dsjax("copy", "runs/a", "1", "3", url)[0] == 0
    code, out, _ = dsjax("prune", url, "--keep", "1")
    assert (code, "removed 1 of 2" in out) == (0, True)
    assert dsjax("copy", url, "runs/b")[0] == 0
    assert dsjax("copy", "runs/a/checkpoints/1", "runs/b")[0] == 0
    code, _, err = dsjax("copy", f"{url}/3", "runs/b")
    assert (code, err.startswith("dsjax: runs/b/3: exists already")) == (2, True)
    assert dsjax("inspect", f"{url}/3", "--verify")[0] == 0
    assert dsjax("diff", "runs/a", "3", "runs/b", "3")[:2] == (0, "3 arrays are the same, 0 differ\n")
    assert "holds no checkpoint of step 9" in dsjax("copy", url, "9", "runs/b")[2]


def test_diff_reads_only_what_differs(dsjax, run, monkeypatch):
    from dsjax.checkpoint import command

    read, names = command._read, []
    monkeypatch.setattr(
        command, "_read", lambda path, name, array: names.append(name) or read(path, name, array)
    )
    code, out, _ = dsjax("diff", "runs/a", "2", "3")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert code == 1
    assert rows["params/kernel"] == ["1", "of", "12", "elements", "0.5"]
    assert rows["step"] == ["1", "of", "1", "elements", "1"]
    assert out.endswith("1 arrays are the same, 2 differ\n")
    assert set(names) == {"params/kernel", "step"}
    assert dsjax("diff", "runs/a", "2")[0] == 2

"""What is typed after `dsjax`: help, usage errors, settings, and faults before anything starts."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from dsjax.cli import _settings, main
from dsjax.errors import ConfigError

VERBS = {"train", "eval", "generate", "plan", "hf", "init", "launch", "doctor", "data", "checkpoints"}


@pytest.fixture
def dsjax(capfd, tmp_path, monkeypatch):
    """Run the command line in this process, in a directory of its own: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(argv)
        out, err = capfd.readouterr()
        return ended.value.code, out, err

    return run


def process(*argv: str, **options) -> subprocess.Popen:
    """`python -m dsjax` with these words as a real process."""
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environ = {**os.environ, "PYTHONPATH": here}
    return subprocess.Popen(
        [sys.executable, "-m", "dsjax", *argv],
        env=environ, stderr=subprocess.PIPE, text=True,
        # Tests that run in the background of a script have inherited that Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **options,
    )  # fmt: skip


def test_help_is_quick_and_imports_nothing_heavy():
    seconds = []
    for _ in range(5):
        # The processor's seconds: the same on a busy machine, and no less than the clock's on an idle one.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with process("--help", stdout=subprocess.PIPE) as helped:
            out, err = helped.communicate()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert (helped.returncode, err) == (0, "")
    assert "train" in out
    assert min(seconds) < 0.5
    code = "from dsjax.cli import main\ntry: main(['--help'])\nfinally: import sys; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    heavy = {"jax", "numpy", "flax", "pydantic", "yaml"}
    assert not heavy & set(modules.split()) and "dsjax.cli" in modules


def test_help_lists_the_verbs_that_are_built(dsjax):
    code, out, _ = dsjax("--help")
    commands = out.partition("Commands")[2]
    listed = {line.split()[1] for line in commands.splitlines() if line[:2] == "│ " and line[2:3].isalpha()}
    assert (code, listed) == (0, VERBS)
    for verb in VERBS:
        code, out, err = dsjax(verb, "-h")
        assert code == 0 and f"Usage: dsjax {verb}" in out and not err


def test_no_words_show_the_help(dsjax):
    code, out, err = dsjax()
    assert code == 2 and "Usage: dsjax" in out and not err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("trian c.yaml", "no such command 'trian'. Did you mean 'train'?"),
        ("train", "train: missing argument 'CONFIG' (see dsjax train --help)"),
        ("train c.yaml --dryrun", "train: no such option"),
        ("generate c.yaml", "--prompt: is missing; give a text to go on from, or a file of them"),
        (
            "generate c.yaml --prompt x --top-p 0",
            "--top-p: takes a number > 0 and <= 1, got 0; --temperature 0",
        ),
        ("generate c.yaml --prompt x --samples 0", "generate: invalid value for '--samples'"),
        ("generate c.yaml --prompt x --temperature -1", "generate: invalid value for '--temperature'"),
        ("launch --workers none -- train c.yaml", "launch: invalid value for '--workers'"),
        ("launch --workers 0 -- train c.yaml", "launch: invalid value for '--workers'"),
        ("launch -- train c.yaml", "launch: missing option '--workers'"),
        ("data bulid c.yaml", "data: no such command 'bulid'. Did you mean 'build'?"),
        ("profile c.yaml", "no such command 'profile'"),
    ],
)
def test_a_usage_error_is_one_line(dsjax, words, line):
    code, out, err = dsjax(*words.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"dsjax: {line}") and err.count("\n") == 1


def test_settings_and_files_come_in_any_order(dsjax, tmp_path):
    (tmp_path / "one.yaml").write_text("train: {steps: 1, sequence_length: 1}\n")
    (tmp_path / "two.yaml").write_text("train: {sequence_length: 2}\n")
    config = _settings("run.name=a=b", ["one.yaml", "model.bias=-1", "two.yaml", "train.steps=3"])
    assert (config.run.name, config.train.steps, config.train.sequence_length) == ("a=b", 3, 2)
    assert config.model.fields == {"bias": -1}
    with pytest.raises(ConfigError, match="no config file is given"):
        _settings("train.steps=3", [])
    (tmp_path / "lr=1").mkdir()  # a path is not an override because it holds an equals sign
    (tmp_path / "lr=1/c.yaml").write_text("run: {seed: 5}\n")
    assert _settings("./lr=1/c.yaml", []).run.seed == 5


@pytest.mark.parametrize("verb", [["train"], ["eval"], ["data", "build"], ["checkpoints", "list"]])
def test_a_bad_config_ends_with_2_and_a_line_a_fault(dsjax, tmp_path, verb, monkeypatch):
    (tmp_path / "c.yaml").write_text("train:\n  stepz: 5\n")
    monkeypatch.setenv("DSJAX_RUN__SEED", "x")
    code, out, err = dsjax(*verb, "c.yaml", "train.steps=-1")
    assert (code, out) == (2, "")
    assert sorted(err.splitlines()) == [
        'dsjax: run.seed: takes an integer >= 0 and <= 4294967295, got "x" [DSJAX_RUN__SEED]',
        "dsjax: train.steps: takes an integer >= 1, got -1",
        "dsjax: train.stepz: unknown key (got 5); did you mean train.steps? [c.yaml:2]",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]  # nothing half-written
    code, _, err = dsjax(*verb, "d.yaml")
    assert (code, err) == (2, "dsjax: d.yaml: no such file; did you mean c.yaml?\n") or "RUN__SEED" in err


def test_checkpoints_are_listed_by_config_or_directory(dsjax, tmp_path):
    (tmp_path / "c.yaml").write_text("run: {name: little}\n")
    assert dsjax("checkpoints", "list", "c.yaml") == (0, "no checkpoints in runs/little/checkpoints\n", "")
    stored = tmp_path / "runs/little/checkpoints/12/state"
    stored.mkdir(parents=True)
    (stored / "data").write_bytes(b"x" * (3 << 19))
    (stored.parents[1] / "13").mkdir()  # not finished: it has no state
    code, out, err = dsjax("checkpoints", "list", "c.yaml")
    assert (code, err) == (0, "")
    header, row = (line.split() for line in out.splitlines())
    assert header == ["step", "MiB", "written", "tier", "path"] and row[:2] == ["12", "1.5"]
    assert row[-1] == "runs/little/checkpoints/12"
    code, _, err = dsjax("checkpoints", "list", "runs/little")
    assert (code, err) == (2, "dsjax: runs/little: is not the directory of a run (it holds no config.yaml)\n")
    (tmp_path / "runs/little/config.yaml").write_text("run: {name: moved}\n")
    code, out, _ = dsjax("checkpoints", "list", "runs/little")
    assert code == 0 and out.splitlines()[1].split()[0] == "12"


def test_ctrl_c_before_training_is_one_line(tmp_path):
    config = tmp_path / "config.yaml"
    os.mkfifo(config)
    with (
        process("train", "config.yaml", cwd=tmp_path, stdout=subprocess.PIPE) as waiting,
        config.open("w"),  # opens once it is being read; that reading then waits for us
    ):
        # A signal between the opening and the read that waits would be seen only when that read ends.
        time.sleep(0.5)
        waiting.send_signal(signal.SIGINT)
        out, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, out) == (130, "")
    assert err == "dsjax: interrupted; a run goes on from its last checkpoint\n"


@pytest.mark.parametrize(("unbuffered", "stored"), [("", False), ("1", True)])
def test_a_reader_that_goes_away_is_no_error(tmp_path, monkeypatch, unbuffered, stored):
    (tmp_path / "c.yaml").write_text("")
    if stored:  # a table, which rich prints
        (tmp_path / "runs/run/checkpoints/1/state").mkdir(parents=True)
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    read, write = os.pipe()
    os.close(read)
    with process("checkpoints", "list", "c.yaml", cwd=tmp_path, stdout=write) as piped:
        os.close(write)
        _, err = piped.communicate(timeout=60)
    assert (piped.returncode, err) == (141, "")

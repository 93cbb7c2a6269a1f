"""`dsjax plan` and `dsjax init` as they are typed."""

from __future__ import annotations

import json

import pytest

from dsjax.cli import main
from dsjax.config import load

SMALL = """
model: {kind: llama, hidden_size: 64, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 128}
train: {global_batch_size: 8, sequence_length: 64, steps: 20}
"""


@pytest.fixture
def dsjax(capfd, tmp_path, monkeypatch):
    """Run the command line in this process, in a directory of its own: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(SMALL)

    def run(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(argv)
        out, err = capfd.readouterr()
        return ended.value.code, out, err

    return run


def test_plan_prints_and_writes_what_it_found(dsjax, tmp_path):
    words = "plan c.yaml --on cpu:8 mesh.fsdp=4 mesh.data=2 --json p.json --html p.html --tokens 1e6"
    code, out, err = dsjax(*words.split())
    assert code == 0, err
    assert out.startswith("cpu:8, data 2 x fsdp 4: fits")
    found = json.loads((tmp_path / "p.json").read_text())
    assert (
        found["fits"] and found["forecast"]["tokens"] == 1e6 and found["settings"]["global_batch_size"] == 8
    )
    assert found["memory"]["total"] < found["memory"]["capacity"] == 4e9
    page = (tmp_path / "p.html").read_text()
    assert page.startswith("<!doctype html>") and "data 2 x fsdp 4" in page


def test_what_does_not_fit_ends_with_71(dsjax, tmp_path):
    (tmp_path / "chips.yaml").write_text("cpu:\n  memory: {bytes: 1000}\n")
    code, out, _ = dsjax("plan", "c.yaml", "--on", "cpu:8", "--chips", "chips.yaml")
    assert code == 71 and "DOES NOT FIT" in out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("plan c.yaml --on 8xH1000", "target: no chip is called H1000; did you mean H100?"),
        ("plan c.yaml --on many", "target: 'many' is not the name of a cluster"),
        ("plan c.yaml --on cpu:8 mesh.fsdp=3", "cpu:8: mesh: fsdp 3 is 3 devices but there are 8"),
        (
            "plan c.yaml --on cpu:8 --write b.yaml",
            "--write: writes the config that --search finds; add --search",
        ),
        ("plan c.yaml", "plan: missing option '--on' (see dsjax plan --help)"),
        ("plan c.yaml --on cpu:8 --chips none.yaml", "none.yaml: the file of chips cannot be read"),
        ("plan c.yaml --on cpu:8 --tokens nan", "--tokens: takes a number above 0, got nan"),
        ("plan c.yaml --on cpu:8 --tokens -1", "--tokens: takes a number above 0, got -1"),
        (
            "plan c.yaml --on cpu:8 --json none/p.json",
            "none/p.json: cannot be written (there is no directory none)",
        ),
        ("init --model llama3-9b --on 8xH100", "--model: no model is called llama3-9b; did you mean"),
        ("init --model llama3-8b --on 8xH100 --write c.yaml", "c.yaml: is there already"),
    ],
)
def test_a_fault_is_one_line(dsjax, words, line):
    code, out, err = dsjax(*words.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"dsjax: {line}") and err.count("\n") == 1


def test_init_says_where_nothing_fits(dsjax):
    code, _, err = dsjax("init", "--model", "llama3-70b", "--on", "1xL40S")
    assert code == 0 and "no layout was found with which it fits on 1xL40S" in err


def test_init_writes_a_config_that_loads(dsjax, tmp_path):
    code, out, err = dsjax("init", "--model", "llama3.2-1b", "--on", "2x8xH100")
    assert code == 0 and "llama3.2-1b-2x8xH100.yaml" in out, err
    config = load([tmp_path / "llama3.2-1b-2x8xH100.yaml"], environ={})
    assert (config.train.global_batch_size, config.train.gradient_accumulation_steps) == (32, 8)

"""Real runs of a tiny model from the command line: how they end, and what a resume refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsjax.cli import main

CONFIG = """\
run: {name: tiny}
model: {kind: llama, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
        intermediate_size: 32, vocab_size: 258}
data: {kind: text, paths: [text], packing: concat, holdout: 0.2, cache_dir: cache}
train: {steps: 2, global_batch_size: 8, sequence_length: 16}
optimizer: {schedule: {warmup_steps: 0}}
observe: {log_every: 1, progress: none}
"""


@pytest.fixture
def dsjax(capfd, tmp_path, monkeypatch):
    """A directory with a config and text; run the command line there: (exit code, stdout, faults)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    (tmp_path / "text").mkdir()
    for name in range(20):
        (tmp_path / "text" / f"{name}.txt").write_text(f"{name} is a number, and so is {name + 1}. " * 3)

    def run(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(argv)
        out, err = capfd.readouterr()
        return ended.value.code, out, faults(err)

    return run


def faults(err: str) -> str:
    """What stderr tells, less the word of the data being built."""
    return "".join(line for line in err.splitlines(True) if "tokenising data" not in line)


def records(name: str) -> list[dict]:
    return [json.loads(line) for line in Path("runs/tiny", name).read_text().splitlines()]


def test_a_run_stops_goes_on_and_refuses_another_config(dsjax):
    code, _, err = dsjax("eval", "tiny.yaml")
    assert code == 2 and err.startswith("dsjax: no checkpoint in ") and err.count("\n") == 1
    code, _, err = dsjax("train", "tiny.yaml", "train.stop_after=1")
    assert code == 75
    assert err.startswith("dsjax: stopped at step 1 of 2 ") and err.count("\n") == 1
    code, out, err = dsjax("train", "tiny.yaml")
    assert (code, err) == (0, "") and "runs/tiny/checkpoints/2" in out
    assert [record["step"] for record in records("metrics.jsonl")] == [1, 2]
    code, _, err = dsjax("train", "tiny.yaml", "optimizer.learning_rate=1", "train.steps=3")
    assert code == 2 and "train.steps" not in err
    assert "optimizer.learning_rate: the run was started with 0.0003, now it is 1.0" in err
    words = ("optimizer.learning_rate=1", "train.steps=3", "--allow-config-change")
    code, _, err = dsjax("train", "tiny.yaml", *words)
    assert (code, err) == (0, "")
    (event,) = [event for event in records("events.jsonl") if event["kind"] == "config_changed"]
    assert event["changes"][0].startswith("optimizer.learning_rate: ")


def test_a_run_that_diverges_ends_with_3(dsjax):
    settings = ["optimizer.kind=sgd", "optimizer.learning_rate=1e38", "optimizer.max_grad_norm=null"]
    code, _, err = dsjax("train", "tiny.yaml", "train.steps=30", "stability.give_up_after=2", *settings)
    assert code == 3
    assert err.startswith("dsjax: training gave up at step ") and err.count("\n") == 1
    assert [event["kind"] for event in records("events.jsonl")].count("skipped") == 2


def test_a_step_that_goes_wrong_is_traced_to_its_operator(dsjax, monkeypatch):
    monkeypatch.setenv("DSJAX_FAULT", "nan@step=2,layer=0,op=ffn")
    code, out, err = dsjax("train", "tiny.yaml", "train.steps=4", "observe.progress=plain")
    assert code == 0
    assert "step 2: layer 0, mlp: output not finite in the forward pass; largest input " in out + err
    (event,) = [event for event in records("events.jsonl") if event["kind"] == "nonfinite_located"]
    assert (event["step"], event["direction"], event["layer"]) == (2, "forward", 0)
    assert event["operator"] == "layers/mlp"

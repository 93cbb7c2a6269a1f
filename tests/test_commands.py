"""The real command, as a person runs it: train, kill, resume, several processes, faults."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
CONFIG = """
model: {kind: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
        intermediate_size: 64, dropout: 0.1}
data: {kind: text, paths: text, tokenizer: bytes, cache_dir: cache, holdout: 0.2}
train: {steps: 8, global_batch_size: 8, sequence_length: 32}
eval: {every: 8}
optimizer: {learning_rate: 1e-2, schedule: {warmup_steps: 2}}
observe: {log_every: 1, progress: plain}
"""


def environment(place: Path) -> dict[str, str]:
    cache = os.environ.get("DSJAX_TEST_CACHE", "/tmp/dsjax-test-cache")
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "DSJAX_"))},
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "DSJAX_RUNTIME__COMPILATION_CACHE": f"{cache}/commands",
        "HOME": str(place),
        "XDG_CACHE_HOME": str(place / "home-cache"),
    }


def dsjax(place: Path, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dsjax", *words]
    return subprocess.run(
        command, cwd=place, env=environment(place), capture_output=True, text=True, timeout=300, **more
    )


def starting(place: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dsjax", *words],
        cwd=place, env=environment(place), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    for number in range(12):
        words = " ".join(f"word{(number * 7 + i) % 13}" for i in range(60))
        (tmp_path / "text" / f"{number}.txt").write_text(words)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def records(place: Path, run: str = "run", name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "runs" / run / name).read_text().splitlines()]


def losses(place: Path, run: str = "run") -> list[float]:
    return [r["loss"] for r in records(place, run) if "loss" in r]


def wait_for_step(place: Path, step: int, run: str = "run") -> None:
    log = place / "runs" / run / "metrics.jsonl"
    for _ in range(600):
        if log.exists() and f'"step": {step},' in log.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"no step {step} after a minute: {log.read_text() if log.exists() else 'no log'}")


def test_the_trunk_train_eval_generate_list_inspect(place: Path) -> None:
    done = dsjax(place, "train", "run.yaml")
    assert done.returncode == 0, done.stderr
    assert "heldout" in done.stdout and "report" in done.stdout
    assert len(losses(place)) == 8
    evaluated = [r for r in records(place) if "eval" in r][-1]["eval"]["heldout"]
    assert set(evaluated) >= {"loss", "tokens", "perplexity"}

    again = dsjax(place, "train", "run.yaml")
    assert again.returncode == 0 and "done already" in again.stdout

    shown = dsjax(place, "eval", "run.yaml", "runtime.cpu_devices=4", "mesh.tensor=2")
    assert shown.returncode == 0, shown.stderr
    assert f"{evaluated['loss']:.4f}" in shown.stdout

    first = dsjax(
        place, "generate", "run.yaml", "--prompt", "word1 ", "--max-tokens", "8", "--temperature", "0"
    )
    other = dsjax(
        place, "generate", "run.yaml", "mesh.context=2", "runtime.cpu_devices=2", "--prompt", "word1 ",
        "--max-tokens", "8", "--temperature", "0",
    )  # fmt: skip
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("word1 ") and first.stdout == other.stdout

    listed = dsjax(place, "checkpoints", "list", "run.yaml")
    assert listed.returncode == 0 and re.search(r"^\s*8\s", listed.stdout, re.M)
    seen = dsjax(place, "data", "inspect", "run.yaml")
    assert seen.returncode == 0 and "word" in seen.stdout


def test_sigterm_then_kill_then_the_same_losses(place: Path) -> None:
    assert dsjax(place, "train", "run.yaml", "run.name=calm", "train.steps=60").returncode == 0
    words = ["train", "run.yaml", "train.steps=60", "checkpoint.disk.every=5"]
    process = starting(place, *words)
    wait_for_step(place, 7)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75, process.communicate()
    process = starting(place, *words)
    stopped = records(place, name="events.jsonl")[-1]["step"]
    wait_for_step(place, stopped + 12)
    process.kill()
    process.wait()
    last = dsjax(place, *words)
    assert last.returncode == 0, last.stderr
    assert losses(place) == losses(place, "calm")
    assert [r["step"] for r in records(place) if "loss" in r] == list(range(1, 61))


def test_two_processes_train_as_one(place: Path) -> None:
    alone = dsjax(place, "train", "run.yaml", "run.name=one", "runtime.cpu_devices=4")
    assert alone.returncode == 0, alone.stderr
    two = dsjax(
        place, "launch", "--workers", "2", "--", "train", "run.yaml", "run.name=two", "runtime.cpu_devices=2",
        "mesh.data=2", "data.log_examples=true",
    )  # fmt: skip
    assert two.returncode == 0, two.stdout + two.stderr
    assert losses(place, "two") == pytest.approx(losses(place, "one"), rel=1e-5)
    ids = [{r["step"]: r["ids"] for r in records(place, "two", f"examples-{p}.jsonl")} for p in range(2)]
    assert set(ids[0]) == set(ids[1]) == set(range(1, 9))
    # A run of two processes goes on as one process, on another mesh.
    longer = ["run.name=two", "train.steps=10", "eval.every=0", "data.log_examples=true"]
    on = dsjax(place, "train", "run.yaml", *longer, "--allow-config-change")
    assert on.returncode == 0, on.stdout + on.stderr
    assert len(losses(place, "two")) == 10
    words = [
        "generate",
        "run.yaml",
        "run.name=two",
        "--prompt",
        "word1 ",
        "--prompt",
        "w",
        "--max-tokens",
        "6",
    ]
    alone = dsjax(place, *words, "--seed", "5")
    both = dsjax(
        place, "launch", "--workers", "2", "--", *words, "--seed", "5", "runtime.cpu_devices=2", "mesh.data=2",
    )  # fmt: skip
    assert alone.returncode == both.returncode == 0, alone.stderr + both.stdout + both.stderr
    assert alone.stdout.startswith("--- prompt 1\nword1 ") and "--- prompt 2\nw" in alone.stdout
    lines = [line.removeprefix("[0] ") for line in both.stdout.splitlines() if line.startswith("[0] ")]
    assert "\n".join(alone.stdout.splitlines()) in "\n".join(lines)
    assert "tokens/s" in alone.stderr and not re.search(r"^\[1\] .*(prompt|word)", both.stdout, re.M)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.stesp=3"], r"train\.stesp.*train\.steps"),
        (["train.steps=many"], r"train\.steps.*many"),
        (["mesh.fsdp=3"], r"mesh: .*3 devices but there are 1"),
        (["runtime.cpu_devices=8", "mesh.tensor=8"], r"num_attention_heads|q_proj|heads"),
        (["runtime.cpu_devices=8", "train.global_batch_size=12"], r"train\.global_batch_size: 12 .*8 or 16"),
        (
            ["runtime.cpu_devices=4", "mesh.context=4", "train.sequence_length=36"],
            r"train\.sequence_length 36",
        ),
        (["data.paths=nothing"], r"data\.paths: nothing does not exist"),
        (["model.vocab_size=100"], r"vocab_size"),
        (["model.hiden_size=100"], r"model\.hiden_size.*hidden_size"),
        (["data.tokenizer=missing.json"], r"missing\.json"),
        (["model.kind=nowhere:build"], r"model\.kind.*nowhere"),
        (["run.init_from=nothing"], r"run\.init_from nothing"),
        (["checkpoint.disk.path=/proc/here"], r"checkpoint\.disk\.path /proc/here"),
        (["run.dir=/proc/here"], r"run\.dir /proc/here"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_fault_is_a_line_and_exit_2(words: list[str], said: str, place: Path) -> None:
    ended = dsjax(place, "train", "run.yaml", *words)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert re.search(said, ended.stderr), ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout
    assert all(line.startswith("dsjax: ") for line in ended.stderr.splitlines()), ended.stderr
    assert not (place / "runs" / "run" / "checkpoints").exists() or not list(
        (place / "runs" / "run" / "checkpoints").glob("[0-9]*")
    )


def test_a_dry_run_tells_and_leaves_nothing(place: Path) -> None:
    told = dsjax(place, "train", "run.yaml", "runtime.cpu_devices=4", "--dry-run")
    assert told.returncode == 0, told.stderr
    assert "fsdp 4" in told.stdout and "learning_rate: 0.01" in told.stdout
    assert not (place / "runs").exists()


def test_a_model_that_no_device_holds_ends_with_71(place: Path) -> None:
    ended = dsjax(place, "train", "run.yaml", "model.hidden_size=131072", "model.num_hidden_layers=80")
    assert ended.returncode == 71, ended.stderr
    assert "GiB a device" in ended.stderr and "mesh.fsdp" in ended.stderr
    assert not (place / "runs").exists() or not list((place / "runs").rglob("checkpoints"))

"""Preparation: once, in parallel, interrupted and resumed, by several processes at a time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsjax.config import Config
from dsjax.data import load_tokenizer, open_eval, open_train, prepare
from dsjax.data.holdout import held_out
from dsjax.data.readers import Document, content_hash
from dsjax.errors import ConfigError, InputError, Preempted

ROWS = np.arange(4)


def all_tokens(config: Config) -> list[np.ndarray]:
    data = open_train(config, ROWS)
    return [data.sources[0].row(number)["tokens"] for number in range(data.rows_per_epoch)]


@pytest.fixture
def large(tmp_path: Path) -> str:
    """9 MB of JSON lines: three parts."""
    path = tmp_path / "large.jsonl"
    draws = np.random.default_rng(1)
    with open(path, "w") as stream:
        for number in range(6000):
            text = f"{number} " + " ".join(map(str, draws.integers(0, 10**6, 210)))
            stream.write(json.dumps({"text": text}) + "\n")
    return str(path)


def run_build(
    config: Config, tmp_path: Path, *words: str, code: str = "open_train(config, np.arange(4))"
) -> Any:
    """A process of its own that opens (and so builds) the data."""
    program = (
        "import json, sys, numpy as np\nfrom dsjax.config import from_dict\n"
        "from dsjax.data import open_train, open_eval, build\n"
        "config = from_dict(json.loads(sys.argv[1]))\n" + code
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(config.model_dump()), *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_processes_and_one_process_make_the_same(
    settings: Any, large: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel = settings({"kind": "jsonl", "paths": large, "cache_dir": str(tmp_path / "one")})
    alone = settings({"kind": "jsonl", "paths": large, "cache_dir": str(tmp_path / "two")})
    first = open_train(parallel, ROWS)
    monkeypatch.setattr(prepare, "_ALONE_BYTES", 1 << 40)
    second = open_train(alone, ROWS)
    assert first.fingerprint == second.fingerprint
    stores = [data.places()[0] for data in (first, second)]
    names = [sorted(path.name for path in store.iterdir()) for store in stores]
    assert (
        names[0]
        == names[1]
        == ["dataset.json", "documents.npy", *(f"part-0000{n}.arrayrecord" for n in range(3))]
    )
    for name in names[0]:
        assert (stores[0] / name).read_bytes() == (stores[1] / name).read_bytes()


def test_a_killed_build_goes_on(settings: Any, large: str, tmp_path: Path) -> None:
    config = settings({"kind": "jsonl", "paths": large})
    process = run_build(config, tmp_path)
    deadline = time.monotonic() + 60
    while not (found := list((tmp_path / "cache").glob("*.partial/part-*.json"))):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not list((tmp_path / "cache").glob("jsonl-*/dataset.json"))
    records = found[0].with_suffix(".arrayrecord")
    before = (records.stat().st_mtime_ns, records.stat().st_ino)
    whole = settings({"kind": "jsonl", "paths": large, "cache_dir": str(tmp_path / "other")})
    resumed = open_train(config, ROWS)
    assert resumed.fingerprint == open_train(whole, ROWS).fingerprint
    kept = resumed.places()[0] / records.name
    assert (kept.stat().st_mtime_ns, kept.stat().st_ino) == before, (
        "the finished part should not be made again"
    )
    assert not [path for path in resumed.places()[0].iterdir() if path.name.startswith(".")]


def test_ctrl_c_keeps_the_parts_and_says_so(
    settings: Any, large: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings({"kind": "jsonl", "paths": large})
    monkeypatch.setattr(prepare, "_ALONE_BYTES", 1 << 40)
    real = prepare.write_part

    def stop_at_the_second(job: Any, number: int, tokenizer: Any) -> None:
        if number == 1:
            raise KeyboardInterrupt
        real(job, number, tokenizer)

    monkeypatch.setattr(prepare, "write_part", stop_at_the_second)
    with pytest.raises(Preempted, match="1 of 3 parts are kept") as stopped:
        open_train(config, ROWS)
    assert stopped.value.exit_code == 75


def test_several_processes_build_once(settings: Any, corpus: Path, tmp_path: Path) -> None:
    data = {"kind": "text", "paths": str(corpus), "tokenizer": "bpe", "bpe_vocab_size": 300}
    config = settings(data)
    processes = [run_build(config, tmp_path, code="print(open_train(config, np.arange(4)).fingerprint)")
                 for _ in range(3)]  # fmt: skip
    results = [process.communicate(timeout=100) for process in processes]
    assert all(process.returncode == 0 for process in processes), results
    assert len({out for out, _ in results}) == 1
    said = "".join(err for _, err in results)
    assert said.count("tokenising data") == 1 and said.count("training a byte-pair tokenizer") == 1


def test_a_worker_that_dies_is_an_error(settings: Any, large: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare.sys, "executable", "/bin/false")
    with pytest.raises(Exception, match="ended without a word"):
        open_train(settings({"kind": "jsonl", "paths": large}), ROWS)


def test_a_fault_in_a_worker_names_its_line(settings: Any, large: str) -> None:
    with open(large, "a") as stream:
        stream.write('{"text": 5}\n')
    with pytest.raises(InputError, match=r"large.jsonl:6001: field text takes text, got int"):
        open_train(settings({"kind": "jsonl", "paths": large}), ROWS)


def test_what_changed_is_prepared_again(settings: Any, corpus: Path) -> None:
    config = settings({"kind": "text", "paths": str(corpus), "holdout": 0.0})
    before = open_train(config, ROWS).fingerprint
    file = corpus / "doc00.txt"
    status = file.stat()
    text = file.read_text()
    file.write_text(("z" if text[0] != "z" else "y") + text[1:])
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert open_train(config, ROWS).fingerprint != before


def test_every_kind_gives_the_same_documents(settings: Any, write_lines: Any, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    from array_record.python.array_record_module import ArrayRecordWriter

    texts = [f"text number {n} " + "é" * n for n in range(30)]
    (tmp_path / "txt").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "txt" / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    table = pyarrow.table({"n": list(range(30)), "text": texts})
    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=7)
    writer = ArrayRecordWriter(str(tmp_path / "t.arrayrecord"), "group_size:1")
    for text in texts:
        writer.write(text.encode())
    writer.close()
    paths = {
        "text": str(tmp_path / "txt"),
        "jsonl": write_lines("t.jsonl", [{"text": text} for text in texts]),
        "parquet": str(tmp_path / "t.parquet"),
        "arrayrecord": str(tmp_path / "t.arrayrecord"),
    }
    expected = all_tokens(settings({"kind": "text", "paths": paths["text"]}))
    for kind, path in paths.items():
        config = settings({"kind": kind, "paths": path})
        found = all_tokens(config)
        assert len(found) == len(expected)
        assert all((a == b).all() for a, b in zip(found, expected, strict=True)), kind
        held = open_eval(config, ROWS)["heldout"]
        assert held.num_bytes == sum(len(text.encode()) for text in held.texts())


def test_a_built_directory_is_a_source(settings: Any, corpus: Path) -> None:
    data = {"kind": "text", "paths": str(corpus), "tokenizer": "bpe", "bpe_vocab_size": 300, "holdout": 0.2}
    first = open_train(settings(data), ROWS)
    place = first.places()[0]
    built = settings(
        {"kind": "arrayrecord", "paths": str(place), "tokenizer": str(place / "tokenizer"), "holdout": 0.2}
    )
    second = open_train(built, ROWS)
    assert second.fingerprint == first.fingerprint and second.example_ids(3) == first.example_ids(3)
    texts = [open_eval(config, ROWS)["heldout"].texts() for config in (settings(data), built)]
    assert list(texts[0]) == list(texts[1])
    with pytest.raises(InputError, match=r"built with tokenizer .*, not with bytes"):
        open_train(settings({"kind": "arrayrecord", "paths": str(place)}), ROWS)
    with pytest.raises(ConfigError, match="tokenised already"):
        open_train(settings({**data, "kind": "arrayrecord", "paths": str(place)}), ROWS)


def test_bpe_learns_from_training_documents_only(settings: Any, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    words = [f" unique{chr(97 + n // 10)}z{chr(97 + n % 10)}word" for n in range(40)]
    for word in words:
        (folder / f"{word.strip()}.txt").write_text(word * 50)
    config = settings({"kind": "text", "paths": str(folder), "tokenizer": "bpe", "bpe_vocab_size": 3000,
                       "holdout": 0.2})  # fmt: skip
    held = held_out([content_hash(Document(0, "", 0, word * 50)) for word in words], 0.2)
    assert 0 < held.sum() < 40
    tokenizer = load_tokenizer(config)
    for word, out in zip(words, held, strict=True):
        assert (len(tokenizer.encode(word)) == 1) == (not out), word
    assert tokenizer.decode(tokenizer.encode("naïve <|eos|>\n\t🙂")) == "naïve <|eos|>\n\t🙂"
    assert tokenizer.eos_id not in tokenizer.encode("<|eos|>")


def test_stdlib_is_a_source(settings: Any) -> None:
    from dsjax.data.sources import list_files, training_sources

    config = settings({"kind": "text", "paths": "stdlib:"})
    files = list_files(training_sources(config.data)[0])
    assert len(files) > 300 and {"ast.py", "json/decoder.py"} <= {file.name for file in files}
    assert not any("site-packages" in file.path for file in files)


def test_hosts_with_different_files_are_told(settings: Any, corpus: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = (
        "from dsjax.errors import InputError\nimport jax\n"
        "jax.config.update('jax_cpu_collectives_implementation', 'gloo')\n"
        f"jax.distributed.initialize('127.0.0.1:{port}', 2, int(sys.argv[2]))\n"
        "open_train(from_dict(json.loads(sys.argv[1])), np.arange(2))\n"
        "config.data.paths = [config.data.paths[0] + ('-other' if sys.argv[2] == '1' else '')]\n"
        "try:\n    open_train(config, np.arange(2))\nexcept InputError as error:\n    print(error)\n"
    )
    shutil.copytree(corpus, f"{corpus}-other")
    Path(f"{corpus}-other", "doc00.txt").write_text("another")
    config = settings({"kind": "text", "paths": str(corpus)})
    processes = [run_build(config, tmp_path, str(number), code=code) for number in range(2)]
    for process in processes:
        said, trouble = process.communicate(timeout=100)
        assert "process 1 reads differ from those of process 0" in said, trouble


@pytest.mark.slow
def test_the_quickstarts_data_is_ready_in_seconds(settings: Any) -> None:
    config = settings(
        {"kind": "text", "paths": "stdlib:", "tokenizer": "bpe", "bpe_vocab_size": 4096}, sequence_length=256
    )
    started = time.monotonic()
    data = open_train(config, np.arange(8))
    assert time.monotonic() - started < 25
    assert 3000 < data.vocab_size <= 4096 and data.rows_per_epoch > 5000

"""Every fault of what a user gives is one clear line, and nothing half-made is taken for whole."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsjax.data import build, open_eval, open_train
from dsjax.errors import DsjaxError, InputError

ROWS = np.arange(4)


def fault(config: Any) -> str:
    with pytest.raises(DsjaxError) as caught:
        open_train(config, ROWS)
    assert caught.value.exit_code == 2
    assert len(caught.value.faults) == 1 and "\n" not in caught.value.faults[0]
    return caught.value.faults[0]


@pytest.fixture
def refused(settings: Any, tmp_path: Path) -> Any:
    """`refused(kind, content)`: the fault of a file with that content."""

    def give(kind: str, content: bytes, **more: Any) -> str:
        path = tmp_path / "given"
        path.write_bytes(content)
        return fault(settings({"kind": kind, "paths": str(path), **more})).replace(str(path), "given")

    return give


def test_paths_that_lead_nowhere(settings: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, told in (
        ("absent.txt", "data.paths: {root}/absent.txt does not exist"),
        ("*.absent", "data.paths: no file matches {root}/*.absent"),
        ("empty", "data.paths: directory {root}/empty holds no visible file"),
    ):
        config = settings({"kind": "text", "paths": str(tmp_path / path)})
        assert fault(config) == told.format(root=tmp_path)


@pytest.mark.parametrize(
    ("kind", "content", "told"),
    [
        ("text", b"", "no text in given (files: 1, empty documents: 1)"),
        ("jsonl", b"", "no text in given"),
        ("jsonl", b'{"text": ""}\n{"text": null}\n', "no text in given (files: 1, empty documents: 2)"),
        ("text", b"good\nbad \xff here", "given:2: not UTF-8 text (byte 0xff at offset 9"),
        ("jsonl", b'{"text": "a"}\n{"text": "b\xff"}\n', "given:2: not UTF-8 text (byte 0xff at offset 11"),
        ("jsonl", b'{"text": "a"}\n\n{"text": "b', "given:3: not JSON"),
        ("jsonl", b'{"text": "a"}\n[1]\n', "given:2: takes a JSON object a line, got list"),
        ("jsonl", b'{"body": "a"}\n', "given:1: has no field text (it has body); set data.field"),
        ("jsonl", b'{"text": 7}\n', "given:1: field text takes text, got int"),
        ("jsonl", b'{"text": "\\ud800"}\n', "given:1: holds half of a surrogate pair"),
        ("jsonl", b"[" * 100000 + b"\n", "given:1: not JSON"),
        ("parquet", b"PAR1 no", "given: no Parquet file that can be read"),
        ("arrayrecord", b"no record", "given: no ArrayRecord file that can be read"),
    ],
)
def test_contents(refused: Any, kind: str, content: bytes, told: str) -> None:
    assert told in refused(kind, content)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"messages": "hi"}', "given:1: field messages takes a list of messages, got str"),
        (b'{"messages": [{"content": "a"}]}', "given:1: message 1 takes an object with a role and content"),
        (b'{"messages": [{"role": "user", "content": 1}]}', "message 1: content takes text, got int"),
        (b'{"text": "a"}', "given:1: has no field messages"),
    ],
)
def test_conversations(refused: Any, chat_tokenizer: str, line: bytes, told: str) -> None:
    assert told in refused("chat", line + b"\n", tokenizer=chat_tokenizer)


def test_truncated_parquet(refused: Any, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    table = pyarrow.table({"text": [f"row {n}" for n in range(1000)], "n": list(range(1000))})
    parquet.write_table(table, tmp_path / "whole.parquet")
    content = (tmp_path / "whole.parquet").read_bytes()
    assert "given: no Parquet file that can be read" in refused("parquet", content[: len(content) // 2])
    assert "has no column body (it has text, n); set data.field" in refused("parquet", content, field="body")
    assert "column n takes text, got int" in refused("parquet", content, field="n")
    damaged = content[:20] + bytes(len(content) // 3) + content[20 + len(content) // 3 :]
    assert "given: damaged" in refused("parquet", damaged)


def test_truncated_arrayrecord(refused: Any, tmp_path: Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(tmp_path / "whole"), "group_size:1")
    for number in range(1000):
        writer.write(os.urandom(40).hex().encode() + b"%d" % number)
    writer.write(b"bad \xff")
    writer.close()
    content = (tmp_path / "whole").read_bytes()
    assert "given: no ArrayRecord file" in refused("arrayrecord", content[: len(content) // 2])
    assert "given: record 1000: not UTF-8 text" in refused("arrayrecord", content)


def test_tokenizers(settings: Any, corpus: Path, tmp_path: Path, chat_tokenizer: str) -> None:
    def of(tokenizer: Path) -> str:
        config = settings({"kind": "text", "paths": str(corpus), "tokenizer": str(tokenizer)})
        return fault(config)

    assert "data.tokenizer:" in of(tmp_path / "absent") and "does not exist" in of(tmp_path / "absent")
    (tmp_path / "tok").mkdir()
    assert "holds no tokenizer.json" in of(tmp_path / "tok")
    (tmp_path / "tok" / "tokenizer.json").write_text('{"version": "1.0", "mod')
    assert "is no tokenizer.json that can be read" in of(tmp_path / "tok")
    shutil.copy(Path(chat_tokenizer) / "tokenizer.json", tmp_path / "tok" / "tokenizer.json")
    (tmp_path / "tok" / "tokenizer_config.json").write_text("{")
    assert "cannot read its settings" in of(tmp_path / "tok")
    (tmp_path / "tok" / "tokenizer_config.json").write_text('{"bos_token": "<none>"}')
    assert "has no token <none>, which its bos_token names" in of(tmp_path / "tok")
    (tmp_path / "tok" / "tokenizer_config.json").write_text('{"chat_template": "{% if %}"}')
    assert "is not valid" in of(tmp_path / "tok")


def test_a_cache_that_cannot_be_written(settings: Any, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    data = {"kind": "text", "paths": str(corpus), "cache_dir": str(tmp_path / "file" / "below")}
    assert "data.cache_dir: cannot write" in fault(settings(data))
    assert "data.cache_dir: cannot write" in fault(settings({**data, "tokenizer": "bpe"}))


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Any:
    place = tmp_path / "tiny"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk(settings: Any, tmp_path: Path, tiny_disk: Path) -> None:
    (tmp_path / "big.txt").write_bytes(os.urandom(150_000).hex().encode())
    config = settings({"kind": "text", "paths": str(tmp_path / "big.txt"), "cache_dir": str(tiny_disk)})
    told = fault(config)
    assert "data.cache_dir: cannot write" in told and "No space left" in told
    assert not list(tiny_disk.glob("*/dataset.json"))


def test_damage_to_the_cache_is_told(settings: Any, corpus: Path) -> None:
    config = settings({"kind": "text", "paths": str(corpus)})
    place = open_train(config, ROWS).places()[0]
    part = place / "part-00000.arrayrecord"
    whole = part.read_bytes()
    part.write_bytes(whole[: len(whole) // 3])
    batches = open_train(config, ROWS).iterate(0)
    with pytest.raises(InputError, match=r"part-00000.arrayrecord.*cut off|no ArrayRecord|damaged"):
        for _ in range(20):
            next(batches)
    batches.close()
    (place / "documents.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(InputError, match="no built data set that can be read"):
        open_train(config, ROWS)


def test_everything_held_out(settings: Any, corpus: Path) -> None:
    mixture = [{"paths": str(corpus / f"doc{n:02d}.txt"), "name": str(n)} for n in range(12)]
    config = settings({"kind": "text", "mixture": mixture, "holdout": 0.5})
    assert "are held out; lower data.holdout or add some" in fault(config)


def test_an_evaluation_set_without_text(settings: Any, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "nothing.txt").write_text("")
    sets = {"mine": str(tmp_path / "nothing.txt")}
    config = settings({"kind": "text", "paths": str(corpus)}, {"eval": {"sets": sets}})
    for call in (lambda: open_eval(config, ROWS), lambda: build(config)):
        with pytest.raises(InputError, match=r"eval.sets.mine: no text in .*nothing.txt"):
            call()


def test_an_evaluation_set_of_another_kind(
    settings: Any, corpus: Path, write_lines: Any, tmp_path: Path
) -> None:
    train = write_lines("train.jsonl", [{"body": f"document {n}"} for n in range(9)])
    text = tmp_path / "wiki.txt"
    text.write_text("plain text\n")
    config = settings(
        {"kind": "jsonl", "paths": train, "field": "body", "holdout": 0.0},
        {"eval": {"sets": {"wiki": str(text)}}},
    )
    with pytest.raises(InputError) as caught:
        open_eval(config, ROWS)
    [told] = caught.value.faults
    assert told.startswith(f"eval.sets.wiki: {text}:1: not JSON")
    assert told.endswith("(its files are read as jsonl; eval.sets.wiki.kind takes another)")
    config.eval.sets["wiki"].kind = "text"
    assert open_eval(config, ROWS)["wiki"].num_documents == 1


def test_a_failed_build_leaves_no_directory(refused: Any, tmp_path: Path) -> None:
    assert "given:1: not JSON" in refused("jsonl", b"plain text\n")
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


def test_an_arrayrecord_file_without_records(refused: Any, tmp_path: Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    ArrayRecordWriter(str(tmp_path / "none"), "group_size:1").close()
    assert "no text in given" in refused("arrayrecord", (tmp_path / "none").read_bytes())

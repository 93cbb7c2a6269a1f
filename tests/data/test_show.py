"""`dsjax data build` and `inspect` as a person sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsjax.data import build, inspect, load_tokenizer
from dsjax.data.cache import sized


def test_build_says_what_there_is(settings: Any, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings({"kind": "text", "paths": str(corpus), "holdout": 0.2})
    assert build(config) == 0
    said = capsys.readouterr()
    assert "documents" in said.out and "rows of 32" in said.out and "heldout" in said.out
    assert f"kept in {config.data.cache_dir}" in said.out
    assert "tokenising data: 60 files, " in said.err and " kB\n" in said.err
    left = [path.name for path in Path(str(config.data.cache_dir)).iterdir()]
    assert len(left) == 1 and left[0].startswith("text-") and "." not in left[0]
    assert build(config) == 0
    assert "tokenising" not in capsys.readouterr().err


def test_inspect_shows_segments_masks_and_targets(
    settings: Any, write_lines: Any, chat_tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = [{"role": "user", "content": "[red]why[/red]?"}, {"role": "assistant", "content": "so"}]
    path = write_lines("talk.jsonl", [{"messages": talk}])
    data = {"kind": "chat", "paths": path, "tokenizer": chat_tokenizer, "holdout": 0.0}
    assert inspect(settings(data, sequence_length=64), rows=1, step=2) == 0
    said = capsys.readouterr().out
    assert "batch 2, row 0: 3 targets, 26 padding" in said
    assert "[segment 1: talk.jsonl@0]" in said
    assert "<|bos|><|im_start|>user\n[red]why[/red]?<|im_end|>\n<|im_start|>assistant\nso<|im_end|>" in said
    assert "0 '<|bos|>' BOS" in said and "1 '<|im_start|>'" in said and "2 '<|im_end|>' EOS" in said


def test_special_tokens_are_shown_where_that_is_asked_for(settings: Any, chat_tokenizer: str) -> None:
    for name, bos, eos in (("bytes", "<|bos|>", "<|eos|>"), (chat_tokenizer, "<|bos|>", "<|im_end|>")):
        tokenizer = load_tokenizer(settings({"tokenizer": name}))
        ids = tokenizer.frame(tokenizer.encode("é <|bos|>"))
        assert tokenizer.decode(ids) == "é <|bos|>"
        assert tokenizer.decode(ids, special=True) == f"{bos}é <|bos|>{eos}"


@pytest.mark.parametrize(
    ("number", "shown"), [(1, "1 byte"), (999, "999 bytes"), (3412, "3.4 kB"), (12 * 10**6, "12.0 MB")]
)
def test_sizes(number: int, shown: str) -> None:
    assert sized(number) == shown


def test_inspect_shows_as_many_rows_as_there_are(
    settings: Any, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect(settings({"kind": "text", "paths": str(corpus)}), rows=9) == 0
    assert capsys.readouterr().out.count("targets,") == 4

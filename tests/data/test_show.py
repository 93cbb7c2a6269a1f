"""`dsjax data build` and `inspect` as a person sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsjax.data import build, inspect


def test_build_says_what_there_is(settings: Any, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings({"kind": "text", "paths": str(corpus), "holdout": 0.2})
    assert build(config) == 0
    said = capsys.readouterr()
    assert "documents" in said.out and "rows of 32" in said.out and "heldout" in said.out
    assert f"kept in {config.data.cache_dir}" in said.out
    assert "tokenising data: 60 files" in said.err
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
    assert "[segment 1: talk.jsonl@0]" in said and "[red]why[/red]?" in said
    assert "BOS" in said and "EOS" in said


def test_inspect_shows_as_many_rows_as_there_are(
    settings: Any, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect(settings({"kind": "text", "paths": str(corpus)}), rows=9) == 0
    assert capsys.readouterr().out.count("targets,") == 4

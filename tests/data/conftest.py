"""Small sources on disk, and configs that read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsjax.config import Config, from_dict

CHAT_TOKENIZER = Path(__file__).parent / "fixtures" / "chat_tokenizer"
WORDS = [
    "the",
    "of",
    "light",
    "deep",
    "river",
    "stone",
    "quiet",
    "green",
    "moved",
    "across",
    "never",
    "seven",
]


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., Config]:
    """`settings(data, **train)`: a config whose cache and run lie in the test's own directory."""

    def make(data: dict[str, Any], sections: dict[str, Any] | None = None, **train: Any) -> Config:
        return from_dict(
            {
                "run": {"dir": str(tmp_path / "run"), "seed": 3},
                "data": {"cache_dir": str(tmp_path / "cache"), **data},
                "train": {"sequence_length": 32, "global_batch_size": 4, **train},
                **(sections or {}),
            }
        )

    return make


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A directory of 60 different texts of 5 to 400 bytes."""
    draws = np.random.default_rng(7)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(60):
        words = draws.choice(WORDS, int(draws.integers(1, 70)))
        (folder / f"doc{number:02d}.txt").write_text(f"{number} " + " ".join(words))
    return folder


@pytest.fixture
def chat_tokenizer() -> str:
    """A tokenizer of single bytes whose template and post-processor both add BOS."""
    return str(CHAT_TOKENIZER)


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., str]:
    """`write_lines(name, records)`: a JSON-lines file of them; returns its path."""

    def write(name: str, records: list[Any]) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(path)

    return write

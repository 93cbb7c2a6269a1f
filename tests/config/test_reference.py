"""docs/config.md says what the schema says."""

from __future__ import annotations

from pathlib import Path

from dsjax.config.messages import section_of, walk
from dsjax.config.reference import reference

DOCUMENT = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_document_is_current():
    assert DOCUMENT.read_text(encoding="utf-8") == reference(), (
        "write it anew: python -m dsjax.config.reference > docs/config.md"
    )


def test_every_key_is_listed_and_described():
    rows = {line.split("|")[1].strip(): line for line in reference().splitlines() if line.startswith("| `")}
    for key, field in walk():
        if section_of(field.annotation) is None:
            assert field.description
            assert f"`{key}`" in rows
    assert "`data.mixture[].weight`" in rows
    assert "| an integer >= 1 | `1000` | Optimizer steps" in rows["`train.steps`"]
    assert all(line.count("|") - line.count("\\|") == 5 for line in rows.values())

"""What the guides show runs as it stands, and their links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_commands import ROOT, dsjax, environment, losses

GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(guide: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / guide).read_text(), re.M | re.S)


def test_the_own_model_script_trains(tmp_path: Path) -> None:
    script = blocks("docs/own-model.md", "python")[0]
    assert "steps=200" in script
    (tmp_path / "own.py").write_text(script.replace("steps=200", "steps=6"))
    ended = subprocess.run(
        [sys.executable, "own.py"],
        cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "accuracy" in ended.stdout and len(losses(tmp_path, "own-model")) >= 1


def test_the_own_model_of_the_command_line_trains(tmp_path: Path) -> None:
    module = next(b for b in blocks("docs/own-model.md", "python") if b.startswith("# net.py"))
    config = next(b for b in blocks("docs/own-model.md", "yaml") if b.startswith("# mine.yaml"))
    (tmp_path / "net.py").write_text(module)
    (tmp_path / "mine.yaml").write_text(config)
    ended = dsjax(tmp_path, "train", "mine.yaml", "train.steps=6", "observe.log_every=1")
    assert ended.returncode == 0, ended.stderr
    found = losses(tmp_path, "mine")
    assert len(found) == 6 and found[-1] < found[0]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_a_guide_links_to_what_exists_and_ends(guide: Path) -> None:
    text = guide.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (guide.parent / target).exists(), target
    assert not re.search(r"^(FIGURES|TODO|TBD)", text, re.M), "a placeholder is left"

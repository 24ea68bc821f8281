"""The LlamaIndex examples run as their users run them, and each is a small step from a plain LLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("llama_index_*.py"))
MOST_LINES = 3


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_shows_its_diff(example: Path) -> None:
    text = example.read_text()
    head, _, code = text.partition("from __future__")
    added = [line.strip()[1:] for line in head.splitlines() if line.strip().startswith("+")]
    assert 0 < len(added) <= MOST_LINES
    for line in added:
        # The classes it brings are what the example itself uses.
        names = line.partition(" import ")[2] or "SemKV"
        assert all(name.strip() in code for name in names.split(","))


def run(example: str) -> str:
    ended = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-4000:]
    return ended.stdout


def test_chat_engine() -> None:
    said = run("llama_index_chat_engine.py")
    assert "have ? deer" in " ".join(said.split())
    assert said.count(" reused (") == 2
    assert " 0 exact, 0 reused" not in said


def test_ingestion() -> None:
    before, unchanged, changed = run("llama_index_ingestion.py").split(" documents, ")[1:]
    assert "have ? otter" in before
    assert unchanged.startswith("0 nodes")
    assert "have ? swan" in changed
    for answer in (before, changed):
        assert "no stored chunk" not in answer
        assert " 0 exact, 0 reused" not in answer


def test_remote_server() -> None:
    said = run("llama_index_remote.py")
    assert "computed by the server" in said
    assert "have ? deer" in said
    assert " 0 exact, 0 reused" not in said

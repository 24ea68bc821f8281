"""`examples/query_engine.py` as a user runs it, on some questions: twice, over one store."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from semkv_rag import ReuseOptions
from workbench.starts import run_program

pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).parents[2] / "examples" / "query_engine.py"
READER = SCRIPT.parent / "reader"
CORPUS = SCRIPT.parent / "corpus"
QUESTIONS = 8


def _ways(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {line["way"]: line for line in figures["ways"]}


def _run(folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    out = folder / "demo.json"
    command = [sys.executable, str(SCRIPT), "--model", str(READER), "--docs", str(CORPUS)]
    command += ["--store", str(folder / "store"), "--out", str(out)]
    ended = run_program(*command, *options)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout, json.loads(out.read_text())


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("demo")
    return folder, *_run(folder, "--limit", str(QUESTIONS))


def test_it_answers_right_with_reuse(first_run: tuple[Path, str, dict[str, Any]]) -> None:
    _, printed, figures = first_run
    assert figures["questions"] == QUESTIONS
    ways = _ways(figures)
    assert ways["plain"]["right"] >= 7 / 8
    assert ways["blended"]["right"] >= 7 / 8
    assert ways["as stored"]["right"] < ways["blended"]["right"]
    assert ways["blended"]["not_reused"] == []
    assert all(len(answer) == 5 for answer in figures["answers"])
    assert "0 found precomputed" in printed
    (titles,) = [line for line in printed.splitlines() if "as plain's" in line]
    assert "right" in titles
    assert "recomputed" in titles  # not cut, on a terminal of 80 columns


def test_its_figures_are_of_real_reuse(first_run: tuple[Path, str, dict[str, Any]]) -> None:
    folder, _, figures = first_run
    ways = _ways(figures)
    assert 0.5 < ways["blended"]["reused"] < 1
    whole_tokens = 0.005  # of prompts of some 100 tokens, what is picked is rounded to whole ones
    assert 0 < ways["blended"]["recomputed"] <= ReuseOptions().ratio + whole_tokens
    assert ways["plain"]["reused"] == ways["as stored"]["recomputed"] == 0
    assert ways["plain"]["as_plain"] == ways["plain"]["sooner"] == 1
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
def test_a_second_run_finds_everything_and_takes_questions_without_answers(
    first_run: tuple[Path, str, dict[str, Any]],
) -> None:
    folder, _, _ = first_run
    questions = folder / "asked.json"
    questions.write_text(json.dumps([{"question": "which mascot does Mir bol have ?"}]))
    printed, figures = _run(folder, "--questions", str(questions))
    assert "40 found precomputed, 0 chunks" in printed
    assert figures["questions"] == 1
    assert _ways(figures)["plain"]["right"] is None
    assert "✓" not in printed

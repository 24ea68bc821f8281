"""`examples/query_engine.py` on some questions: twice, over one store."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Settings
from llama_index.core.instrumentation import get_dispatcher

from semkv_rag import ReuseOptions
from workbench.starts import run_program

pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).parents[2] / "examples" / "query_engine.py"
READER = SCRIPT.parent / "reader"
CORPUS = SCRIPT.parent / "corpus"
QUESTIONS = 8


def _ways(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {line["way"]: line for line in figures["ways"]}


def _arguments(folder: Path, *options: str) -> list[str]:
    inputs = ["--model", str(READER), "--docs", str(CORPUS), "--store", str(folder / "store")]
    return [*inputs, "--out", str(folder / "demo.json"), *options]


@pytest.fixture(scope="module")
def first_run(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """In this process. `test_a_second_run…` and `make demo` run it as a program."""
    folder = tmp_path_factory.mktemp("demo")
    handlers = list(get_dispatcher().event_handlers)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as said:
        patch.syspath_prepend(str(SCRIPT.parent))
        patch.setenv("COLUMNS", "80")
        patch.setenv("TQDM_DISABLE", "1")  # as it does itself, for good
        importlib.import_module(SCRIPT.stem).main(_arguments(folder, "--limit", str(QUESTIONS)))
    yield folder, said.getvalue(), json.loads((folder / "demo.json").read_text())
    get_dispatcher().event_handlers[:] = handlers
    Settings.tokenizer = None  # type: ignore[assignment]  # the default again


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
    command = [sys.executable, SCRIPT, *_arguments(folder, "--questions", str(questions))]
    ended = run_program(*command)
    assert ended.returncode == 0, ended.stderr[-4000:]
    printed, figures = ended.stdout, json.loads((folder / "demo.json").read_text())
    assert "40 found precomputed, 0 chunks" in printed
    assert figures["questions"] == 1
    assert _ways(figures)["plain"]["right"] is None
    assert "✓" not in printed


def test_a_folder_that_is_not_there_is_told_before_vllm_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    demo = importlib.import_module(SCRIPT.stem)
    arguments = _arguments(tmp_path)
    arguments[arguments.index("--docs") + 1] = str(tmp_path / "missing")
    with pytest.raises(SystemExit, match="is not a folder"):
        demo.main(arguments)

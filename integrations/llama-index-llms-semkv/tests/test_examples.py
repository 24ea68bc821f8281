"""The LlamaIndex examples answer with reuse, and each is a small step from a plain LLM."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from llama_index.llms.semkv import close_engines

from workbench.server import Server
from workbench.settings import ROOT
from workbench.starts import run_program

FOLDER = ROOT / "examples"
EXAMPLES = sorted(FOLDER.glob("llama_index_*.py"))
MOST_LINES = 3


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_shows_its_diff(example: Path) -> None:
    text = example.read_text()
    above, _, code = text.partition("from __future__")
    added = [line.strip()[1:] for line in above.splitlines() if line.strip().startswith("+")]
    assert 0 < len(added) <= MOST_LINES
    for line in added:
        # The classes it brings are what the example itself uses.
        names = line.partition(" import ")[2] or "SemKV"
        assert all(name.strip() in code for name in names.split(","))


def check_chat_engine(said: str) -> None:
    assert "have ? deer" in " ".join(said.split())
    assert said.count(" reused (") == 2
    assert " 0 exact, 0 reused" not in said


def check_ingestion(said: str) -> None:
    before, unchanged, changed = said.split(" documents, ")[1:]
    assert "have ? otter" in before
    assert unchanged.startswith("0 nodes")
    assert "have ? swan" in changed
    for answer in (before, changed):
        assert "no stored chunk" not in answer
        assert " 0 exact, 0 reused" not in answer


def check_remote(said: str) -> None:
    assert "computed by the server" in said
    assert "have ? deer" in said
    assert " 0 exact, 0 reused" not in said


CHECKS: dict[str, Callable[[str], None]] = {
    "llama_index_chat_engine.py": check_chat_engine,
    "llama_index_ingestion.py": check_ingestion,
    "llama_index_remote.py": check_remote,
}


def test_all_examples_are_run() -> None:
    assert set(CHECKS) == {example.name for example in EXAMPLES}


@pytest.fixture
def run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """Runs an example in this process; what it prints."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def run(example: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [example, *arguments])
        runpy.run_path(str(FOLDER / example), run_name="__main__")
        return capsys.readouterr().out

    yield run
    close_engines()


@pytest.mark.engine
@pytest.mark.parametrize("example", ["llama_index_chat_engine.py", "llama_index_ingestion.py"])
def test_it_answers_with_reuse(run_here: Callable[..., str], example: str) -> None:
    CHECKS[example](run_here(example))


def test_it_answers_with_reuse_on_a_server(run_here: Callable[..., str], server: Server) -> None:
    at = ("--base-url", server.base_url, "--api-key", server.api_key)
    check_remote(run_here("llama_index_remote.py", *at))


@pytest.mark.soak
@pytest.mark.engine
@pytest.mark.parametrize("example", CHECKS)
def test_as_a_program_of_its_own(example: str) -> None:
    ended = run_program(sys.executable, FOLDER / example, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-4000:]
    CHECKS[example](ended.stdout)

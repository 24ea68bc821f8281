"""The examples run on the reader, and their docstrings show a change of at most three lines."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from langchain_semkv import close_engines

from workbench.settings import ROOT

EXAMPLES = ROOT / "examples"
NAMES = [path.stem for path in sorted(EXAMPLES.glob("langchain_*.py"))]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What each example prints. They name the same model, store and arguments: one engine for all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        shared = importlib.import_module("_langchain")
        patch.setattr(shared, "STORE", tmp_path_factory.mktemp("examples") / "store")
        yield {name: _run(name, patch) for name in NAMES}
        close_engines()


def _run(name: str, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(sys, "argv", [name])
    with redirect_stdout(StringIO()) as said:
        ended = importlib.import_module(name).main()
        if inspect.isawaitable(ended):
            asyncio.run(ended)
    return said.getvalue()


@pytest.mark.engine
@pytest.mark.parametrize("name", NAMES)
def test_it_answers_with_reuse(outputs: dict[str, str], name: str) -> None:
    said = outputs[name]
    if name == "langchain_async_batch":
        asked, right = (int(said.split()[at]) for at in (0, 5))
        assert right >= 0.7 * asked
        read, given = (int(said.splitlines()[1].split()[at]) for at in (0, 2))
        assert read > given / 2
    elif name == "langchain_fastapi":
        assert "otter" in said
        assert '"kv_cache": "hit"' in said
    else:
        assert "otter" in said
        assert "Dijon" in said
        assert " reused (" in said


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("langchain_*.py")), ids=lambda path: path.stem
)
def test_the_change_is_three_lines_at_most(path: Path) -> None:
    lines = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
    added = [line.strip()[1:] for line in lines if line.startswith("    +")]
    assert 1 <= len(added) <= 3
    assert any("semkv" in line or "SemKV" in line for line in added)

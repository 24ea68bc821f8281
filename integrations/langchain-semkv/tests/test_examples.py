"""The examples run on the reader, and their docstrings show a change of at most three lines."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from workbench.settings import ROOT
from workbench.starts import run_program

EXAMPLES = ROOT / "examples"
NAMES = [path.stem for path in sorted(EXAMPLES.glob("langchain_*.py"))]

# One process, and so one engine, for all of them: they name the same model, store and arguments.
RUN = """
import asyncio, importlib, inspect, pathlib, sys
if __name__ == "__main__":
    examples, store, *names = sys.argv[1:]
    sys.path.insert(0, examples)
    import _langchain
    _langchain.STORE = pathlib.Path(store)
    for name in names:
        sys.argv = [name]
        print("##", name, flush=True)
        ended = importlib.import_module(name).main()
        if inspect.isawaitable(ended):
            asyncio.run(ended)
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each example prints."""
    folder = tmp_path_factory.mktemp("examples")
    script = folder / "run.py"
    script.write_text(RUN)
    ended = run_program(sys.executable, script, EXAMPLES, folder / "store", *NAMES)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    parts = ended.stdout.split("## ")[1:]
    return {part.split("\n", 1)[0]: part.split("\n", 1)[1] for part in parts}


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

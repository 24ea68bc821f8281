"""The notebooks run on a real model, cell by cell, and what they show is right."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from workbench.settings import ROOT
from workbench.starts import run_program

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
MODEL = ROOT / "build" / "smollm2"

# A cell's last expression is printed, as a notebook shows it.
RUN = """
import ast, json, sys

names = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] != "code":
        continue
    body = ast.parse("".join(cell["source"])).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), sys.argv[1], "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), sys.argv[1], "eval"), names)
        drawn = getattr(value, "_repr_html_", lambda: None)()
        print("##", "html" if drawn else value, flush=True)
"""

SAID = {
    "choosing_a_preset": ["balanced", "fast"],
    "first_token": ["'plain': [", "'fast': ["],
}


@pytest.mark.soak
@pytest.mark.engine
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    if not (MODEL / "config.json").exists():
        pytest.skip("make model unpacks the model")
    script = tmp_path / "run.py"
    script.write_text(RUN)
    own = {"MODEL": str(MODEL), "STORE": str(tmp_path / "store"), "MPLBACKEND": "agg"}
    done = run_program(
        sys.executable, script, path, cwd=ROOT, timeout_s=900, env={**os.environ, **own}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for words in SAID[path.stem]:
        assert words in done.stdout, done.stdout


def test_the_notebooks_hold_no_outputs() -> None:
    assert {path.stem for path in NOTEBOOKS} == SAID.keys()
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text())["cells"]:
            assert not cell.get("outputs"), path

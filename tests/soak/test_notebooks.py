"""The notebooks run in Jupyter's own kernel on a real model, and what they show is right."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from workbench.settings import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
MODEL = ROOT / "build" / "smollm2"

SAID = {
    "choosing_a_preset": ["balanced", "fast"],
    "first_token": ["'plain': [", "'fast': [", "image/png"],
    "langchain_quickstart": ["What is this about?", "[('hit', "],
    "llama_index_quickstart": ["What is this about?", "[('hit', "],
}
"""What its cells print, show as HTML or draw, by notebook."""


@pytest.mark.soak
@pytest.mark.engine
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (MODEL / "config.json").exists():
        pytest.skip("make model unpacks the model")
    monkeypatch.setenv("MODEL", str(MODEL))
    monkeypatch.setenv("STORE", str(tmp_path / "store"))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": ROOT}}).execute()
    shown = _shown(notebook)
    for words in SAID[path.stem]:
        assert words in shown, shown


def test_the_notebooks_hold_no_outputs() -> None:
    assert {path.stem for path in NOTEBOOKS} == SAID.keys()
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        assert not any(cell.get("outputs") for cell in notebook.cells), path


def _shown(notebook: nbformat.NotebookNode) -> str:
    """What the cells put out: text, HTML, and of a picture its kind."""
    outputs = [one for cell in notebook.cells for one in cell.get("outputs", ())]
    streams = [one.text for one in outputs if "text" in one]
    values = [one.data for one in outputs if "data" in one]
    drawn = [
        f"{kind} {value if kind.startswith('text/') else ''}"
        for data in values
        for kind, value in data.items()
    ]
    return "\n".join(streams + drawn)

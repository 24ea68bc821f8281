"""The documentation builds as a site, without a warning."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from workbench.pages import blocks
from workbench.settings import ROOT

PAGES = sorted((ROOT / "docs").glob("*.md"))
OURS = ("semkv_rag", "langchain_semkv", "llama_index.llms.semkv")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    own = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


def imported() -> set[str]:
    """What the pages' Python blocks import of ours, with the module."""
    modules = [
        node
        for page in (ROOT / "README.md", *PAGES)
        for block in blocks(page)
        if block.language == "python"
        for node in ast.walk(ast.parse(block.source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(OURS)
    ]
    return {f"{node.module}.{alias.name}" for node in modules for alias in node.names}


@pytest.mark.slow
def test_every_public_name_has_its_place(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    anchors = set(re.findall(r'id="([\w.]+)"', page))
    public = {f"{name}.{one}" for name in OURS for one in import_module(name).__all__}
    names = {anchor.rpartition(".")[2] for anchor in anchors if anchor.startswith(OURS)}
    missing = {name for name in public | imported() if name.rpartition(".")[2] not in names}
    assert missing == set()


@pytest.mark.slow
def test_every_page_is_in_the_navigation(site: Path) -> None:
    start = (site / "index.html").read_text(encoding="utf-8")
    for page in PAGES:
        assert f'href="{page.stem}.html"' in start or page.stem == "index", page.name

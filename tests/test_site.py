"""The documentation builds as a site, without a warning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import semkv_rag
from workbench.settings import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    own = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


@pytest.mark.slow
def test_every_public_name_has_its_place(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    anchors = set(re.findall(r'id="(semkv_rag\.[\w.]+)"', page))
    names = {anchor.rpartition(".")[2] for anchor in anchors}
    assert set(semkv_rag.__all__) <= names


@pytest.mark.slow
def test_every_page_is_in_the_navigation(site: Path) -> None:
    start = (site / "index.html").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert f'href="{page.stem}.html"' in start or page.stem == "index", page.name

"""The pages of the internals name every file of their room, and no file that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from workbench.settings import ROOT

PACKAGE = ROOT / "semkv_rag"
DOCS = ROOT / "docs"
ROOMS = {
    "corpus": "corpus",
    "store": "store",
    "reuse": "reuse",
    "blend": "blend",
    "planning": "planning",
    "connector": "connector",
    "connector/worker": "worker",
    "engine": "engine",
    "server": "server",
    "llm": "llm",
    "on_ray": "ray",
    "prompt_cache": "prompt-cache",
}
"""Of each room, the page `internals-….md`."""
FILE = re.compile(r"`((?:[\w-]+/)*\w+\.py)`")


def modules(room: str) -> set[str]:
    """The files of a room, as its page names them."""
    folder = PACKAGE / room
    inner = [PACKAGE / other for other in ROOMS if other.startswith(f"{room}/")]
    inner.append(PACKAGE / "store" / "migrations")
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if path.name != "__init__.py" and not any(path.is_relative_to(one) for one in inner)
    }


def named(page: str) -> set[str]:
    """The files that a page's tables name."""
    lines = (DOCS / f"internals-{page}.md").read_text(encoding="utf-8").splitlines()
    return {name for line in lines if line.startswith("| `") for name in FILE.findall(line)}


@pytest.mark.parametrize(("room", "page"), ROOMS.items())
def test_a_room_s_page_names_its_files(room: str, page: str) -> None:
    assert named(page) == modules(room)


@pytest.mark.parametrize("page", sorted(DOCS.glob("internals*.md")), ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    names = FILE.findall(page.read_text(encoding="utf-8"))
    folders = [ROOT / name for name in ("semkv_rag", "benchmarks", "tests")]
    there = [path.as_posix() for folder in folders for path in folder.rglob("*.py")]
    assert [name for name in names if not any(path.endswith(f"/{name}") for path in there)] == []

"""docs/results.md and docs/quality-real.md have the figures that are in docs/results."""

from __future__ import annotations

import re

from workbench.results_page import DATA, PAGES, written


def test_the_tables_are_made_from_the_data() -> None:
    for name in PAGES:
        page = name.read_text(encoding="utf-8")
        assert page == written(page), "run: python -m workbench.results_page"


def test_all_data_is_shown() -> None:
    pages = "".join(name.read_text(encoding="utf-8") for name in PAGES)
    shown = {
        name for names in re.findall("<!-- generated: (.+) -->", pages) for name in names.split()
    }
    assert shown == {file.name for file in DATA.glob("*.json")}

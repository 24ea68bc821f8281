"""docs/results.md has the figures that are in docs/results."""

from __future__ import annotations

from workbench.results_page import DATA, PAGE, written


def test_the_tables_are_made_from_the_data() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page), "run: python -m workbench.results_page"


def test_all_data_is_shown() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for file in DATA.glob("*.json"):
        assert f"<!-- generated: {file.name} -->" in page

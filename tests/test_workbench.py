"""Tests and benchmarks share the workbench, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from workbench.settings import ROOT

FORBIDDEN = {
    "tests": {"benchmarks"},
    "integrations": {"benchmarks"},
    "benchmarks": {"tests", "conftest"},
    "workbench": {"tests", "benchmarks", "conftest"},
    "semkv_rag": {"tests", "benchmarks", "workbench", "conftest"},
}


def imports(path: Path) -> set[str]:
    """The packages at the root that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("folder", FORBIDDEN)
def test_who_imports_whom(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    wrong = {str(path.relative_to(ROOT)): imports(path) & FORBIDDEN[folder] for path in files}
    assert {path: names for path, names in wrong.items() if names} == {}

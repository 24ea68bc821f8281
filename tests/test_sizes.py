"""Files and classes that can be read at one sitting."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from workbench.settings import ROOT

LINES = 350
ATTRIBUTES = 20
RECORDS = {
    "ReuseReport": "what an answer says of itself",
    "Lexicon": "one language's words, by kind",
    "SemKVModel": "a user's options",
    "SemKVOptions": "a user's options",
}
"""Classes of which each field is documented by itself, and none changes."""
FOLDERS = ("semkv_rag", "integrations", "benchmarks")


def files() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "tests" not in path.relative_to(ROOT).parts:
                yield path


def attributes(kind: ast.ClassDef) -> set[str]:
    """What instances of a class hold: assigned to `self`, or declared as a field."""
    declared = {
        node.target.id
        for node in kind.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assigned = {
        node.attr
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return declared | assigned


def test_no_file_is_longer_than_one_can_read() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in files()
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > LINES
    }
    assert long == {}


def test_no_class_holds_more_than_one_can_remember() -> None:
    large = {
        f"{path.relative_to(ROOT)}:{node.name}": count
        for path in files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and node.name not in RECORDS
        and (count := len(attributes(node))) > ATTRIBUTES
    }
    assert large == {}

"""docs/models.md says what the tests run, and all reasons for which a model is refused."""

from __future__ import annotations

import ast
import re

import pytest

from workbench.pages import tables
from workbench.settings import ROOT
from workbench.tiny_models import ARCHITECTURES, LATENT, QWEN_VL, THREE_ROWS, UNSERVABLE, WINDOWED

PAGE = ROOT / "docs" / "models.md"
ROWS = {row[1].strip("`"): row for row in tables(PAGE, "Tested")[0]}


def named_in(file: str) -> set[str]:
    """The small models that a test file names."""
    text = (ROOT / "tests" / file).read_text(encoding="utf-8")
    named = set(re.findall(r'"(\w+)"', text)) & ARCHITECTURES.keys()
    return named | (QWEN_VL.keys() if "QWEN_VL" in text else set())


SERVED = named_in("connector/test_architectures.py")
KINDS = (*WINDOWED, *LATENT, *THREE_ROWS, *QWEN_VL)
"""Those of test_layer_kinds.py."""
COLUMNS = {
    3: {*SERVED, *KINDS},
    4: {*named_in("connector/test_against_references.py"), *KINDS},
    5: {*SERVED, *KINDS},
    6: named_in("connector/test_several_ranks.py") | QWEN_VL.keys(),  # in test_blended_images.py
    8: named_in("connector/test_8_bit_cache.py"),
}
"""The small models that run, by the column that says so."""
IMAGES = {
    "KV": {*named_in("engine/test_images.py"), *named_in("engine/test_image_grids.py")},
    "features": {
        *named_in("engine/test_fusion.py"),
        *named_in("engine/test_image_grids.py"),
    }
    - {"qwen3"},
    "blended": named_in("connector/test_blended_images.py"),
}


def test_all_small_models_are_there() -> None:
    assert ROWS.keys() == ARCHITECTURES.keys() - UNSERVABLE.keys() - {"mid"}


@pytest.mark.parametrize("column", COLUMNS)
def test_what_is_said_to_run_is_run(column: int) -> None:
    assert {arch for arch, row in ROWS.items() if row[column] == "yes"} == COLUMNS[column]


@pytest.mark.parametrize("kind", IMAGES)
def test_what_is_done_with_images(kind: str) -> None:
    assert {arch for arch, row in ROWS.items() if kind in row[7].split(", ")} == IMAGES[kind]


def test_every_reason_that_a_configuration_gives_is_told() -> None:
    source = ROOT / "semkv_rag" / "connector" / "obstacle.py"
    reasons = next(
        node.keys
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.Dict)
    )
    page = PAGE.read_text(encoding="utf-8")
    for reason in reasons:
        begin = reason.values[0] if isinstance(reason, ast.JoinedStr) else reason
        assert isinstance(begin, ast.Constant)
        assert f"`{begin.value}" in page

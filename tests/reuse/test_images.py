"""Images among the tokens that are matched: what has seen one serves behind that very image alone."""

from __future__ import annotations

import numpy as np
import pytest

from semkv_rag.config import ReuseOptions
from semkv_rag.reuse import ImageRows, ReusePlan, Span, images_in_blend

from .shelf import Shelf

PREFIX = list(range(100, 120))
TEXT = list(range(1000, 1040))
IMAGE = [-5 - row for row in range(16)]
OTHER = [-500 - row for row in range(16)]


def test_an_image_and_the_text_behind_it_are_exact(shelf: Shelf) -> None:
    shelf.put("a", PREFIX + IMAGE + TEXT)
    assert shelf.match(PREFIX + IMAGE + TEXT) == [("a", 0, 0, 76, True)]
    assert shelf.match(PREFIX + IMAGE + TEXT[:20] + [7]) == [("a", 0, 0, 56, True)]


def test_text_behind_another_image_is_not_reused(shelf: Shelf) -> None:
    shelf.put("a", PREFIX + IMAGE + TEXT)
    assert shelf.match(PREFIX + OTHER + TEXT) == [("a", 0, 0, 20, True)]
    assert shelf.match([7, *PREFIX, *OTHER, *TEXT]) == [("a", 0, 1, 20, False)]
    assert shelf.match(TEXT) == []
    shelf.put("b", TEXT, PREFIX + IMAGE)
    assert shelf.match(TEXT) == []
    assert shelf.match(PREFIX + IMAGE + TEXT)[-1][-1]


def test_text_that_saw_no_image_is_reused_behind_one(shelf: Shelf) -> None:
    shelf.put("a", PREFIX + IMAGE + TEXT)
    shelf.put("document", TEXT)
    assert shelf.match(PREFIX + OTHER + TEXT) == [
        ("a", 0, 0, 20, True),
        ("document", 0, 36, 40, False),
    ]


def test_no_crumbs_before_an_image(shelf: Shelf) -> None:
    shelf.put("a", PREFIX[:4] + IMAGE + TEXT)
    assert shelf.match([7, *PREFIX[:4], *IMAGE, *TEXT]) == []


EXACT = Span("a", 0, 0, 36, exact=True)
MOVED = Span("a", 0, 0, 36)
BEHIND = Span("b", 0, 36, 40)


@pytest.mark.parametrize(
    ("spans", "covered", "on_grid", "known"),
    [
        ([BEHIND], 76, False, {0: True}),
        ([BEHIND], 76, True, {0: True}),
        ([MOVED, BEHIND], 76, False, {0: True}),
        ([EXACT, BEHIND], 76, False, {}),
        ([EXACT, BEHIND], 76, True, {0: False}),
        ([EXACT], 20, True, {}),
        ([Span("a", 0, 0, 30, exact=True), BEHIND], 76, False, {0: True}),
    ],
    ids=["computed", "on a grid", "moved", "exact", "exact on a grid", "behind the end", "in part"],
)
def test_which_images_a_blend_has_to_know(
    spans: list[Span], covered: int, on_grid: bool, known: dict[int, bool]
) -> None:
    image = ImageRows("key", np.arange(20, 36), blended=True, on_grid=on_grid)
    plan = ReusePlan(tuple(spans), covered, ReuseOptions())
    assert images_in_blend(plan, [image]) == known

"""The charged ratio: worked out by hand, and turned round."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semkv_rag.blend import BlendShape, charged_ratio, ratio_for_charged
from semkv_rag.selectors import SELECTORS

SHAPE = BlendShape(layers=24, reused=900, exact=60, fresh=40, leading=10, question=20)


@pytest.mark.parametrize(
    ("selector", "rows"),
    [
        ("by_chance", 24 * (40 + 135)),
        ("chunk_head", 24 * (40 + 135)),
        ("none", 24 * 40),
        ("all", 24 * 940),
        ("kv_deviation", 2 * 940 + 24 * (40 + 135)),
        ("query_attention", 24 * (20 + 40) + 24 * (30 + 135)),
        ("deviation_x_attention", 24 * (20 + 40) + 2 * 930 + 24 * (30 + 135)),
    ],
)
def test_what_is_computed(selector: str, rows: int) -> None:
    assert charged_ratio(selector, 0.15, SHAPE) == pytest.approx(rows / (24 * 1000))


def test_what_nobody_looks_at_is_not_charged() -> None:
    for selector in ("query_attention", "kv_deviation", "by_chance"):
        assert charged_ratio(selector, 0.0, SHAPE) == pytest.approx(0.04)
    for selector in set(SELECTORS) - {"none"}:
        assert charged_ratio(selector, 1.0, SHAPE) == pytest.approx(0.94)


def test_a_check_at_the_last_layer_costs_all_layers() -> None:
    shape = replace(SHAPE, layers=4, check_layer=3)
    assert charged_ratio("kv_deviation", 0.1, shape) == pytest.approx(0.94 + 0.04 + 0.09)


@pytest.mark.parametrize("selector", sorted(set(SELECTORS) - {"none", "all"}))
@pytest.mark.parametrize("charged", [0.05, 0.1, 0.15, 0.2, 0.3, 0.5])
def test_the_ratio_for_a_charged_one_is_the_largest(selector: str, charged: float) -> None:
    ratio = ratio_for_charged(selector, charged, SHAPE)
    if ratio is None:
        assert charged_ratio(selector, 0.0, SHAPE) > charged
        return
    assert charged_ratio(selector, ratio, SHAPE) <= charged
    assert charged_ratio(selector, ratio + 1 / SHAPE.reused, SHAPE) > charged


def test_what_cannot_be_had_is_none() -> None:
    assert ratio_for_charged("by_chance", 0.03, SHAPE) is None
    assert charged_ratio("kv_deviation", 0.5, BlendShape(layers=4, reused=0)) == 0

"""A request's options: what a preset stands for, and what stands above it."""

from __future__ import annotations

from typing import Any

import pytest

from semkv_rag.blend import BlendShape, charged_ratio
from semkv_rag.config import PRESETS, ReuseOptions, options_over
from semkv_rag.errors import OptionError
from semkv_rag.reuse import Span, make_plan


def test_the_defaults_are_balanced() -> None:
    assert ReuseOptions.preset("balanced") == ReuseOptions()


def test_exact_changes_nothing() -> None:
    plan = make_plan([Span("a", 0, 5, 30)], 100, ReuseOptions.preset("exact"))
    assert plan is not None
    assert plan.recomputes_all and plan.first_inexact is None


@pytest.mark.parametrize(("reused", "alike"), [(4000, False), (800, False), (500, True)])
def test_they_stand_in_the_order_of_what_they_cost(reused: int, alike: bool) -> None:
    costs = [
        charged_ratio(
            preset.selector,
            ReuseOptions.preset(name).ratio_of(reused),
            BlendShape(layers=32, reused=reused, question=32, check_layer=preset.check_layer),
        )
        for name, preset in PRESETS.items()
    ]
    assert list(PRESETS) == ["fast", "balanced", "exact"]
    assert costs[0] <= costs[1] < costs[2] == 1
    assert (costs[0] == costs[1]) is alike, "the least tokens of a short prompt"


@pytest.mark.parametrize(
    ("reused", "recomputed"), [(4000, 320), (1200, 96), (600, 96), (400, 68), (10, 2), (0, 0)]
)
def test_of_a_short_prompt_fast_recomputes_its_least_tokens(reused: int, recomputed: int) -> None:
    fast = ReuseOptions.preset("fast")
    assert round(fast.ratio_of(reused) * reused) == recomputed
    assert fast.ratio_of(reused) <= ReuseOptions().ratio_of(reused)


def test_a_ratio_is_meant_as_it_is() -> None:
    fast, given = ReuseOptions.preset("fast"), {"ratio": 0.1}
    for made in (
        ReuseOptions(ratio=0.1),
        ReuseOptions.preset("fast", ratio=0.1),
        ReuseOptions.from_mapping(given, fast),
        ReuseOptions.from_mapping(options_over(given, {"preset": "fast"})),
        ReuseOptions.from_mapping(options_over(given, fast.to_mapping())),
    ):
        assert made.ratio_of(300) == 0.1
    both = ReuseOptions.preset("fast", ratio=0.1, least_tokens=60)
    assert [both.ratio_of(tokens) for tokens in (300, 400, 1000)] == [0.17, 0.15, 0.1]


@pytest.mark.parametrize(("selector", "ratio"), [("none", 0.0), ("all", 1.0)])
def test_some_selectors_stand_above_the_least_tokens(selector: str, ratio: float) -> None:
    assert ReuseOptions.preset("fast", selector=selector).ratio_of(300) == ratio


@pytest.mark.parametrize("least", [-1, 0.5, "96", True])
def test_least_tokens_are_a_number_of_tokens(least: Any) -> None:
    with pytest.raises(OptionError, match=r"least_tokens is .*: use a number of tokens, or 0"):
        ReuseOptions(least_tokens=least)


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_given_beside_a_preset_stands_above_it(name: str) -> None:
    base = ReuseOptions(ratio=0.7, selector="chunk_head", check_layer=3, namespace="tenant")
    made = ReuseOptions.from_mapping({"preset": name, "check_layer": 2}, base)
    preset = PRESETS[name]
    assert (made.ratio, made.selector, made.check_layer) == (preset.ratio, preset.selector, 2)
    assert made.namespace == "tenant"
    assert ReuseOptions.preset(name, check_layer=2, namespace="tenant") == made


@pytest.mark.parametrize("name", ["", "best", None, 3, ["fast"]])
def test_there_is_no_such_preset(name: Any) -> None:
    with pytest.raises(OptionError, match=r"preset is .*: use one of fast, balanced, exact"):
        ReuseOptions.from_mapping({"preset": name})


def test_options_are_plain_values_without_the_preset() -> None:
    made = ReuseOptions.preset("fast")
    assert ReuseOptions.from_mapping(made.to_mapping()) == made
    assert "preset" not in made.to_mapping()


def test_options_over_others() -> None:
    under = {"preset": None, "ratio": 0.4, "selector": "chunk_head", "namespace": "tenant"}
    assert options_over({}, under) == {
        "ratio": 0.4,
        "selector": "chunk_head",
        "namespace": "tenant",
    }
    assert options_over({"ratio": 0.2}, under)["ratio"] == 0.2
    assert options_over({"preset": None}, under)["ratio"] == 0.4
    assert options_over({"preset": "fast"}, under) == {"preset": "fast", "namespace": "tenant"}
    assert options_over({"ratio": 0.2}, {"preset": "fast"}) == {"preset": "fast", "ratio": 0.2}

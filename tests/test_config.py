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


def test_they_stand_in_the_order_of_what_they_cost() -> None:
    costs = [
        charged_ratio(
            preset.selector,
            preset.ratio,
            BlendShape(layers=32, reused=4000, question=32, check_layer=preset.check_layer),
        )
        for preset in PRESETS.values()
    ]
    assert list(PRESETS) == ["fast", "balanced", "exact"]
    assert costs[0] < costs[1] < costs[2] == 1


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

"""Selectors: what they score, and how scores become picked tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from semkv_rag.blend import SELECTOR_TYPES, Candidates, pick
from semkv_rag.config import QUERY_AWARE, SELECTORS

RANKS = torch.tensor([0, 1, 2, 0, 1, 2, 3])


def candidates(**tensors: torch.Tensor) -> Candidates:
    return Candidates(rank_in_span=RANKS, seed=7, **tensors)


def asked(attention: list[float]) -> torch.Tensor:
    """Of three layers, the first of which is not to count."""
    halves = torch.tensor(attention) / 2
    return torch.stack((halves.flip(0), halves / 2, halves * 3 / 2))


def test_every_name_that_options_take_has_a_selector() -> None:
    assert tuple(SELECTOR_TYPES) == SELECTORS
    assert (
        tuple(name for name, kind in SELECTOR_TYPES.items() if kind.needs_question) == QUERY_AWARE
    )


@pytest.mark.parametrize("page", ["cli.md", "engine.md"])
def test_the_documentation_tells_every_selector(page: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    assert [name for name in SELECTORS if f"`{name}`" not in text] == []


def test_pick_takes_the_highest_in_prompt_order() -> None:
    scores = torch.tensor([0.5, 3.0, 1.0, 2.0])
    assert pick(scores, 2).tolist() == [1, 3]
    assert pick(scores, 0).tolist() == []
    assert pick(scores, 4).tolist() == [0, 1, 2, 3]


def test_among_equals_the_earlier_token_is_picked() -> None:
    assert pick(torch.tensor([1.0, 2.0, 1.0, 1.0]), 3).tolist() == [0, 1, 2]


def test_kv_deviation_sums_keys_and_values_over_heads() -> None:
    fresh = torch.zeros(7, 2, 3)
    keys, values = fresh.clone(), fresh.clone()
    keys[4, 1, 2] = 3.0  # deviates by 9 in K
    values[2] = 1.0  # by 6 in V
    keys[5, 0, 0], values[5, 1, 1] = 1.0, 2.0  # by 5 in both
    both = SELECTOR_TYPES["kv_deviation"]().deviation(keys, values, fresh, fresh)
    assert both.tolist() == [0, 0, 6, 0, 9, 5, 0]
    only_keys = SELECTOR_TYPES["k_deviation_published"]().deviation(keys, values, fresh, fresh)
    assert only_keys.tolist() == [0, 0, 0, 0, 9, 1, 0]


def test_kv_deviation_of_bfloat16_is_not_rounded_to_bfloat16() -> None:
    stored = torch.zeros(2, 1, 64, dtype=torch.bfloat16)
    keys = torch.full((2, 1, 64), 0.1, dtype=torch.bfloat16)
    keys[1, 0, 0] = 0.1015625  # the next bfloat16
    scores = SELECTOR_TYPES["kv_deviation"]().deviation(keys, stored, stored, stored)
    assert scores[1] > scores[0]


def test_the_product_takes_what_differs_and_is_attended_to() -> None:
    deviation = torch.tensor([1.0, 9.0, 4.0, 0.0, 2.0, 2.0, 2.0])
    attention = asked([0.1, 0.0, 0.2, 0.9, 0.3, 0.1, 0.2])
    both = candidates(deviation=deviation, attention=attention)
    # With their neighbours: .1 .3 .2 of the first span, 1.2 1.3 .6 .3 of the second.
    assert pick(SELECTOR_TYPES["deviation_x_attention"]().scores(both), 2).tolist() == [1, 4]
    assert pick(SELECTOR_TYPES["query_attention"]().scores(both), 2).tolist() == [3, 4]


def test_the_weight_is_the_norm_of_the_deviation_and_four_times_its_mean() -> None:
    deviation = torch.tensor([4.0, 1.0, 4.0, 0.0, 49.0, 0.0, 0.0])  # norms 2 1 2 0 7 0 0, mean 12/7
    attention = asked([0.1, 0.0, 0.2, 0.9, 0.3, 0.1, 0.2])
    both = candidates(deviation=deviation, attention=attention)
    scores = SELECTOR_TYPES["deviation_weighted_attention"]().scores(both)
    weights = torch.tensor([2.0, 1.0, 2.0, 0.0, 7.0, 0.0, 0.0]) + 48 / 7
    alone = SELECTOR_TYPES["query_attention"]().scores(both)
    torch.testing.assert_close(scores, alone * weights)


def test_where_all_deviate_alike_the_weighted_order_is_that_of_attention() -> None:
    attention = asked([0.1, 0.0, 0.2, 0.9, 0.3, 0.1, 0.2])
    both = candidates(deviation=torch.full((7,), 3.0), attention=attention)
    for count in range(8):
        assert torch.equal(
            pick(SELECTOR_TYPES["deviation_weighted_attention"]().scores(both), count),
            pick(SELECTOR_TYPES["query_attention"]().scores(both), count),
        )


def test_the_root_of_the_sensitivity_weighs_each_layer() -> None:
    attention = torch.zeros(3, 7)
    attention[0] = 9.0  # does not count
    attention[1, 0], attention[2, 6] = 3.0, 2.0
    sensitivity = torch.ones(3, 7)
    sensitivity[2] = 4.0
    selector = SELECTOR_TYPES["sensitivity_attention"]()
    both = candidates(attention=attention, sensitivity=sensitivity)
    # Of the first span 3 x 1, of the second 2 x 2; four neighbours on either side share.
    torch.testing.assert_close(selector.scores(both) * 9, torch.tensor([3.0] * 3 + [4.0] * 4))
    alone = candidates(attention=attention)
    torch.testing.assert_close(selector.scores(alone) * 9, torch.tensor([3.0] * 3 + [2.0] * 4))


def test_chunk_head_takes_spans_in_turn() -> None:
    scores = SELECTOR_TYPES["chunk_head"]().scores(candidates())
    assert pick(scores, 4).tolist() == [0, 1, 3, 4]


def test_random_is_the_same_for_the_same_plan_only() -> None:
    selector = SELECTOR_TYPES["random"]()
    assert selector.scores(candidates()).tolist() == selector.scores(candidates()).tolist()
    other = Candidates(rank_in_span=RANKS, seed=8)
    assert selector.scores(candidates()).tolist() != selector.scores(other).tolist()


@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.15, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("layers", [0, 1, 2, 23])
def test_gradual_falls_and_is_the_ratio_on_average(ratio: float, layers: int) -> None:
    levels = SELECTOR_TYPES["kv_deviation_gradual"]().levels(ratio, 1000, layers)
    assert len(levels) == max(layers, 1)
    assert levels == sorted(levels, reverse=True)
    assert 0 <= levels[-1] <= levels[0] <= 1000
    if layers != 1:
        assert sum(levels) / len(levels) == pytest.approx(1000 * ratio, abs=1)
    if 0 < ratio < 1 and layers > 1:
        assert levels[0] > 1000 * ratio > levels[-1]


def test_other_selectors_have_one_level() -> None:
    assert SELECTOR_TYPES["kv_deviation"]().levels(0.15, 100, 23) == [15]

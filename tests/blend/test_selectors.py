"""Selectors: what they score, and how scores become picked tokens."""

from __future__ import annotations

import pytest
import torch

from semkv_rag.blend import SELECTOR_TYPES, Candidates, charged_ratio, pick
from semkv_rag.config import SELECTORS

RANKS = torch.tensor([0, 1, 2, 0, 1, 2, 3])


def candidates(**tensors: torch.Tensor) -> Candidates:
    return Candidates(rank_in_span=RANKS, seed=7, **tensors)


def test_every_name_that_options_take_has_a_selector() -> None:
    assert tuple(SELECTOR_TYPES) == SELECTORS


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
    scores = SELECTOR_TYPES["kv_deviation"]().scores(
        candidates(keys=keys, values=values, stored_keys=fresh, stored_values=fresh)
    )
    assert scores.tolist() == [0, 0, 6, 0, 9, 5, 0]


def test_kv_deviation_of_bfloat16_is_not_rounded_to_bfloat16() -> None:
    stored = torch.zeros(2, 1, 64, dtype=torch.bfloat16)
    keys = torch.full((2, 1, 64), 0.1, dtype=torch.bfloat16)
    keys[1, 0, 0] = 0.1015625  # the next bfloat16
    scores = SELECTOR_TYPES["kv_deviation"]().scores(
        Candidates(
            rank_in_span=torch.arange(2),
            seed=0,
            keys=keys,
            values=stored,
            stored_keys=stored,
            stored_values=stored,
        )
    )
    assert scores[1] > scores[0]


def test_chunk_head_takes_spans_in_turn() -> None:
    scores = SELECTOR_TYPES["chunk_head"]().scores(candidates())
    assert pick(scores, 4).tolist() == [0, 1, 3, 4]


def test_random_is_the_same_for_the_same_plan_only() -> None:
    selector = SELECTOR_TYPES["random"]()
    assert selector.scores(candidates()).tolist() == selector.scores(candidates()).tolist()
    other = Candidates(rank_in_span=RANKS, seed=8)
    assert selector.scores(candidates()).tolist() != selector.scores(other).tolist()


@pytest.mark.parametrize(
    ("name", "ratio", "count"),
    [("kv_deviation", 0.15, 15), ("none", 0.5, 0), ("all", 0.0, 100), ("random", 0.3, 30)],
)
def test_counts(name: str, ratio: float, count: int) -> None:
    assert SELECTOR_TYPES[name]().count(ratio, 100) == count


def test_charged_ratio() -> None:
    charged = charged_ratio(tokens=1000, picked=150, full_layers=2, layers=24)
    assert charged == pytest.approx((2 * 1000 + 22 * 150) / (24 * 1000))
    assert charged_ratio(tokens=1000, picked=0, full_layers=0, layers=24) == 0
    assert charged_ratio(tokens=0, picked=0, full_layers=2, layers=24) == 0
    assert charged_ratio(tokens=10, picked=10, full_layers=9, layers=4) == 1

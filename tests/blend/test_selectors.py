"""Selectors: what they score, and how scores become picked tokens."""

from __future__ import annotations

from pathlib import Path

import torch

from semkv_rag.blend import Candidates, pick, selector_type
from semkv_rag.selectors import SELECTORS

RANKS = torch.tensor([0, 1, 2, 0, 1, 2, 3])


def candidates(**tensors: torch.Tensor) -> Candidates:
    return Candidates(rank_in_span=RANKS, seed=7, **tensors)


def asked(attention: list[float]) -> torch.Tensor:
    """Of three layers, the first of which is not to count."""
    halves = torch.tensor(attention) / 2
    return torch.stack((halves.flip(0), halves / 2, halves * 3 / 2))


def test_the_documentation_tells_every_selector() -> None:
    """`docs/cli.md` is made from the program, which lists them itself."""
    text = (Path(__file__).parents[2] / "docs" / "internals-blend.md").read_text()
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
    both = selector_type("kv_deviation")().deviation(keys, values, fresh, fresh)
    assert both.tolist() == [0, 0, 6, 0, 9, 5, 0]


def test_kv_deviation_of_bfloat16_is_not_rounded_to_bfloat16() -> None:
    stored = torch.zeros(2, 1, 64, dtype=torch.bfloat16)
    keys = torch.full((2, 1, 64), 0.1, dtype=torch.bfloat16)
    keys[1, 0, 0] = 0.1015625  # the next bfloat16
    scores = selector_type("kv_deviation")().deviation(keys, stored, stored, stored)
    assert scores[1] > scores[0]


def test_the_root_of_the_sensitivity_weighs_each_layer() -> None:
    attention = torch.zeros(3, 7)
    attention[0] = 9.0  # does not count
    attention[1, 0], attention[2, 6] = 3.0, 2.0
    sensitivity = torch.ones(3, 7)
    sensitivity[2] = 4.0
    selector = selector_type("sensitivity_attention")()
    both = candidates(attention=attention, sensitivity=sensitivity)
    # Of the first span 3 x 1, of the second 2 x 2; neighbours on either side share.
    torch.testing.assert_close(selector.scores(both) * 13, torch.tensor([3.0] * 3 + [4.0] * 4))
    alone = candidates(attention=attention)
    torch.testing.assert_close(selector.scores(alone) * 13, torch.tensor([3.0] * 3 + [2.0] * 4))


def test_what_stands_behind_an_attended_token_is_picked_rather_than_what_stands_before() -> None:
    """A question attends to what it names, and wants to know what follows."""
    attention = torch.zeros(2, 30)
    attention[1, 10] = 1.0
    asked = Candidates(torch.arange(30), 0, attention=attention)
    scores = selector_type("sensitivity_attention")().scores(asked)
    assert pick(scores, 13).tolist() == list(range(6, 19))


def test_chunk_head_takes_spans_in_turn() -> None:
    scores = selector_type("chunk_head")().scores(candidates())
    assert pick(scores, 4).tolist() == [0, 1, 3, 4]

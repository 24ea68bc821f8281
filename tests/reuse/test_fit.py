"""How well a context fits, against a count token by token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv_rag.reuse import token_array
from semkv_rag.reuse.fit import fitting, rank

from .reference import fitting as counted

PREFIX = list(range(100, 120))
A = list(range(1000, 1040))


def fit(context: list[int], before: list[int]) -> int:
    return fitting(token_array(context), token_array([*before, 1, 2]), len(before))


@pytest.mark.parametrize(
    ("before", "tokens"),
    [
        ([*PREFIX, *A], 60),
        ([7, *A], 40),
        ([*PREFIX, *A, 3, 4], 60),  # something between
        ([*PREFIX, *A[:-2], 5], 58),  # the end merged with something
        ([*A, *[3] * 8], 40),
        ([*A, *[3] * 9], 0),
        (A[-8:], 8),
        (A[-7:], 0),
        ([*A[:-8], 3], 32),
        (PREFIX, 0),
        ([], 0),
    ],
)
def test_a_neighbour_that_stands_there_or_nearly_so(before: list[int], tokens: int) -> None:
    assert fit(PREFIX + A, before) == tokens


def test_few_tokens_count_when_they_are_the_whole_context() -> None:
    assert fit([9], [7, 9]) == 1
    assert fit([8, 9], [7, 9]) == 0


def test_ranks() -> None:
    prompt = token_array([*PREFIX, *A, 1])

    def of(context: list[int], at: int) -> tuple[bool, int, int]:
        return rank(token_array(context), prompt, at)

    assert of(PREFIX, 20) < of(PREFIX[5:], 20), "exact before all"
    assert of(PREFIX + A[:20], 60) < of(PREFIX, 60), "neither is there: the longer"
    assert of([], 60) > of(PREFIX, 60), "its own attention sink"
    assert of([], 0)[0] is False
    assert of([], -3)[0] is True, "its start is cut off"


@pytest.mark.slow
@settings(max_examples=500)
@given(
    pieces=st.lists(st.lists(st.integers(0, 2), max_size=24), min_size=3, max_size=3),
    order=st.lists(st.integers(0, 2), max_size=4),
    context=st.lists(st.integers(0, 2), max_size=3),
    cut=st.integers(0, 4),
)
def test_every_distance(
    pieces: list[list[int]], order: list[int], context: list[int], cut: int
) -> None:
    before = [token for number in order for token in pieces[number]]
    stored = [token for number in context for token in pieces[number]]
    stored = stored[: len(stored) - cut]
    assert fit(stored, before) == counted(stored, before, len(before))

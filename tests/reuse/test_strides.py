"""Long chunks have fewer windows: how long a common run must be to be found for sure."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv_rag.reuse import StoredTokens, token_array
from semkv_rag.reuse.windows import strides_of, window_counts

from .reference import check_sound, common_runs, most_tokens
from .shelf import Shelf
from .test_against_reference import crowded

EMPTY = np.zeros(0, dtype=np.int32)


@pytest.mark.parametrize(
    ("tokens", "sure"),
    [
        (12, 12),
        (112, 12),
        (113, 17),
        (212, 17),
        (213, 22),
        (312, 22),
        (412, 27),
        (413, 32),
        (9999, 32),
    ],
)
def test_sure_runs_by_the_length_of_a_chunk(shelf: Shelf, tokens: int, sure: int) -> None:
    assert shelf.index.sure_run(tokens) == sure


def test_no_chunk_of_up_to_512_tokens_has_more_than_21_windows() -> None:
    lengths = np.arange(513)
    assert window_counts(lengths, 8).max() == 21
    assert (window_counts(lengths, 8)[8:] >= 1).all()
    assert (np.diff(strides_of(lengths, 8)) >= 0).all()


@pytest.mark.parametrize("tokens", [60, 150, 512, 700])
def test_a_sure_run_is_found_wherever_it_starts(shelf: Shelf, tokens: int) -> None:
    chunk = list(range(1000, 1000 + tokens))
    shelf.put("a", chunk)
    sure = shelf.index.sure_run(tokens)
    for start in range(tokens - sure + 1):
        prompt = [1, 2, 3, *chunk[start : start + sure], 4, 5]
        assert shelf.match(prompt) == [("a", start, 3, sure, False)]


def test_any_run_from_the_first_token_on_is_found(shelf: Shelf) -> None:
    chunk = list(range(1000, 1700))
    shelf.put("a", chunk)
    for length in range(12, 60):
        assert shelf.match([*chunk[:length], 4, 5]) == [("a", 0, 0, length, True)]


def test_short_runs_beside_a_sure_one_are_found_with_it(shelf: Shelf) -> None:
    chunk = list(range(1000, 1512))
    shelf.put("a", chunk)
    edited = list(chunk)
    for place in range(0, 512, 16):
        edited[place] = 7
    edited[250:300] = chunk[250:300]
    spans = shelf.match(edited)
    assert len(spans) == 29
    assert {span[3] for span in spans} == {15, 63}


@st.composite
def long_stores_and_prompts(draw: st.DrawFn) -> tuple[dict[str, StoredTokens], list[int]]:
    """Chunks of up to 700 tokens, and prompts of pieces that are about as long as sure runs."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    tokens = draw(st.sampled_from([3, 50, 50_000]))
    lengths = draw(
        st.lists(st.sampled_from([20, 100, 130, 250, 350, 512, 700]), min_size=1, max_size=4)
    )
    chunks = [random.integers(0, tokens, length).tolist() for length in lengths]
    if draw(st.booleans()) and len(chunks) > 1:  # neighbours that overlap
        chunks[1] = chunks[0][-40:] + chunks[1]
    prompt: list[int] = []
    for _ in range(draw(st.integers(1, 8))):
        chunk = draw(st.sampled_from(chunks))
        size = draw(st.sampled_from([12, 20, 31, 32, 33, 60, 700]))
        start = draw(st.integers(0, max(0, len(chunk) - size)))
        prompt += chunk[start : start + size]
        prompt += draw(st.sampled_from([[], [-1], [-1, -2, -3]]))
    store = {
        f"c{number}": StoredTokens(token_array(chunk), EMPTY) for number, chunk in enumerate(chunks)
    }
    return store, prompt


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(drawn=long_stores_and_prompts())
def test_sure_runs_are_found_and_nothing_that_is_none(
    drawn: tuple[dict[str, StoredTokens], list[int]],
) -> None:
    check_sure_runs(*drawn)


@pytest.mark.soak
@settings(max_examples=150, deadline=None)
@given(drawn=long_stores_and_prompts())
def test_sure_runs_in_many_more_stores(
    drawn: tuple[dict[str, StoredTokens], list[int]],
) -> None:
    check_sure_runs(*drawn)


def check_sure_runs(store: dict[str, StoredTokens], prompt: list[int]) -> None:
    shelf = Shelf()
    for name, chunk in store.items():
        shelf.put(name, chunk.tokens.tolist())
    shortest = shelf.index.shortest_run
    spans = shelf.index.match(token_array(prompt))
    check_sound(prompt, store, spans, shortest)
    if crowded(store, 8):
        return
    runs = common_runs(prompt, store, shortest)
    sure = [r for r in runs if r.length >= shelf.index.sure_run(len(store[r.chunk_id].tokens))]
    exact = [run for run in sure if run.exact]
    taken = sum(span.length for span in spans)
    assert sum(span.length for span in spans if span.exact) >= most_tokens(
        exact, 0, len(prompt), shortest
    )
    assert taken <= most_tokens(runs, 0, len(prompt), shortest)
    if not any(run.exact for run in runs):
        assert taken >= most_tokens(sure, 0, len(prompt), shortest)

"""The matcher against a brute-force reference, on streams that are hard for it."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from semkv_rag.reuse import StoredTokens, matcher, token_array
from semkv_rag.reuse.look_up import CROWD

from .reference import (
    check_best_context,
    check_sound,
    common_runs,
    greedy_tokens,
    most_tokens,
)
from .shelf import Shelf

EMPTY = np.zeros(0, dtype=np.int32)
WINDOWS = st.sampled_from([2, 4, 8])


@pytest.fixture(autouse=True, scope="module")
def many_segments() -> None:
    """Merge rarely, so that even a few chunks stand in several segments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matcher, "_SMALL_WINDOWS", 0)
        patch.setattr(matcher, "_BLOCK_WINDOWS", 20)
        yield


def fill(store: dict[str, StoredTokens], window: int) -> Shelf:
    shelf = Shelf(window)
    for name, chunk in store.items():
        shelf.put(name, chunk.tokens.tolist(), chunk.context.tolist())
    return shelf


def crowded(store: dict[str, StoredTokens], window: int) -> bool:
    """Whether a window stands in so many places that some may be left out."""
    windows = Counter(
        chunk.tokens[start : start + window].tobytes()
        for chunk in store.values()
        for start in range(len(chunk.tokens) - window + 1)
    )
    return any(places > CROWD for places in windows.values())


@st.composite
def stores_and_prompts(draw: st.DrawFn) -> tuple[dict[str, StoredTokens], list[int]]:
    """Chunks over a small alphabet, and a prompt made of their pieces and of other tokens."""
    token = st.integers(0, draw(st.sampled_from([1, 2, 3, 9, 1000])))
    text = st.lists(token, max_size=30)
    # No longer than chunks whose stride is the shortest, of any of `WINDOWS`; for others: `test_strides`.
    chunks = draw(st.lists(st.lists(token, min_size=1, max_size=43), min_size=1, max_size=5))
    prefix = draw(text)
    contexts = [draw(st.sampled_from([[], prefix, prefix[-3:], chunks[0]])) for _ in chunks]
    prompt = list(prefix) if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 5))):
        chunk = draw(st.sampled_from(chunks))
        start = draw(st.integers(0, len(chunk)))
        whole = draw(st.booleans())
        prompt += chunk if whole else chunk[start : draw(st.integers(start, len(chunk)))]
        prompt += draw(st.sampled_from([[], [-1], draw(text)]))
    store = {
        f"c{number}": StoredTokens(token_array(tokens), token_array(context))
        for number, (tokens, context) in enumerate(zip(chunks, contexts, strict=True))
    }
    return store, prompt


def chunks(*texts: list[int]) -> dict[str, StoredTokens]:
    """Chunks without a context."""
    return {f"c{number}": StoredTokens(token_array(t), EMPTY) for number, t in enumerate(texts)}


@pytest.mark.slow
@settings(max_examples=400)
@given(drawn=stores_and_prompts(), window=WINDOWS)
# A longer chunk has no context either, and other tokens where the exact one begins.
@example(drawn=(chunks([0] * 3, [1, 0, 0, 1, *[0] * 6, 1]), [0, 0, 0, 1, -1]), window=2)
def test_matches_the_reference(
    drawn: tuple[dict[str, StoredTokens], list[int]], window: int
) -> None:
    store, prompt = drawn
    shelf = fill(store, window)
    shortest = shelf.index.shortest_run
    spans = shelf.index.match(token_array(prompt))
    check_sound(prompt, store, spans, shortest)
    runs = common_runs(prompt, store, shortest)
    if crowded(store, window):
        return
    check_best_context(prompt, store, spans)
    # Every exact token that a span can take is taken, and then the most of the others.
    exact = [run for run in runs if run.exact]
    kept = [span for span in spans if span.exact]
    assert sum(span.length for span in kept) == most_tokens(exact, 0, len(prompt), shortest)
    bounds = [0, *(edge for span in kept for edge in (span.dst, span.end)), len(prompt)]
    gaps = list(zip(bounds[::2], bounds[1::2], strict=True))
    best = sum(most_tokens(runs, start, end, shortest) for start, end in gaps)
    assert sum(span.length for span in spans if not span.exact) == best
    if not exact:
        assert best >= greedy_tokens(runs, shortest)


@st.composite
def variants_and_prompts(draw: st.DrawFn) -> tuple[dict[str, StoredTokens], list[int]]:
    """Chunks stored behind several contexts, and a prompt of prefix, chunks and what joins them."""
    tokens = itertools.count(draw(st.sampled_from([100, 10_000])))
    prefix = list(itertools.islice(tokens, draw(st.sampled_from([0, 1, 9, 30]))))
    sizes = draw(st.lists(st.sampled_from([4, 12, 20, 40]), min_size=2, max_size=5))
    texts = [[*itertools.islice(tokens, size), 7] for size in sizes]
    joint = draw(st.sampled_from([[], [8], [8, 9, 8], [8] * 9]))
    stored = []
    for text in texts:
        before = [*texts, [], texts[0][-3:], texts[0][:-2], [7, 8]]
        for neighbour in draw(st.lists(st.sampled_from(before), min_size=1, max_size=4)):
            stored.append(StoredTokens(token_array(text), token_array(prefix + neighbour)))
    prompt = list(prefix)
    for text in draw(st.lists(st.sampled_from(texts), max_size=6)):
        cut = draw(st.sampled_from([0, 0, 0, 1, 6]))
        prompt += text[: len(text) - cut] + joint
    store = {f"c{number}": chunk for number, chunk in enumerate(draw(st.permutations(stored)))}
    return store, prompt


@pytest.mark.slow
@settings(max_examples=300)
@given(drawn=variants_and_prompts(), window=WINDOWS)
def test_the_variant_whose_context_fits_best_is_taken(
    drawn: tuple[dict[str, StoredTokens], list[int]], window: int
) -> None:
    store, prompt = drawn
    shelf = fill(store, window)
    spans = shelf.index.match(token_array(prompt))
    check_sound(prompt, store, spans, shelf.index.shortest_run)
    if not crowded(store, window):
        check_best_context(prompt, store, spans)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    pattern=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    lengths=st.lists(st.integers(1, 43), min_size=1, max_size=6),
    broken=st.lists(st.integers(0, 199), max_size=4),
    window=WINDOWS,
)
def test_periodic_streams_lose_little_to_crowding(
    pattern: list[int], lengths: list[int], broken: list[int], window: int
) -> None:
    store = {
        f"c{number}": StoredTokens(token_array((pattern * 90)[number : number + length]), EMPTY)
        for number, length in enumerate(lengths)
    }
    prompt = (pattern * 200)[:200]
    for position in broken:
        prompt[position] = 9
    shelf = fill(store, window)
    shortest = shelf.index.shortest_run
    spans = shelf.index.match(token_array(prompt))
    check_sound(prompt, store, spans, shortest)
    runs = common_runs(prompt, store, shortest)
    # All windows may be crowded here, and the chunk that reaches furthest be left out: less than a
    # shortest run may be lost at either end of each stretch between other tokens.
    ends = 2 * (len(set(broken)) + 1)
    assert sum(span.length for span in spans) >= greedy_tokens(runs, shortest) - ends * shortest


@settings(max_examples=100)
@given(drawn=stores_and_prompts(), window=WINDOWS, data=st.data())
def test_removal_leaves_what_a_fresh_index_finds(
    drawn: tuple[dict[str, StoredTokens], list[int]], window: int, data: st.DataObject
) -> None:
    store, prompt = drawn
    shelf = fill(store, window)
    gone = data.draw(st.sets(st.sampled_from(sorted(store))))
    shelf.index.remove(gone)
    fresh = fill({name: chunk for name, chunk in store.items() if name not in gone}, window)
    assert shelf.match(prompt) == fresh.match(prompt)

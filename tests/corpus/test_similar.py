"""Which chunk is most like another, against the same by dense vectors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from semkv_rag.corpus.similar import TERMS, MostSimilar
from semkv_rag.reuse import TokenArray, token_array


def similarities(chunks: list[TokenArray]) -> NDArray[np.float64]:
    """Cosines of the TF-IDF vectors, [chunks, chunks]."""
    counts = np.stack([np.bincount(chunk, minlength=100) for chunk in chunks])
    rarity = np.log(1 + len(chunks) / np.maximum(1, (counts > 0).sum(0)))
    vectors = np.where(counts > 0, 1 + np.log(np.maximum(counts, 1)), 0) * rarity
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors @ vectors.T


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=TERMS), min_size=1, max_size=8))
def test_the_most_similar_one_is_found(texts: list[list[int]]) -> None:
    chunks = [token_array(text) for text in sorted(set(map(tuple, texts)))]
    found = MostSimilar(chunks[::-1])
    expected = similarities(chunks)
    np.fill_diagonal(expected, 0)
    for number, chunk in enumerate(chunks):
        other = found.to(chunk)
        best = expected[number].max()
        if other is None:
            assert best == 0
        else:
            (index,) = [i for i, one in enumerate(chunks) if np.array_equal(one, other)]
            assert np.isclose(expected[number, index], best)


def test_twins_are_one_and_equals_are_told_apart_by_their_tokens() -> None:
    first, second, third = (token_array(tokens) for tokens in ([1, 2], [1, 3], [1, 4]))
    for order in ([first, second, third], [third, second, first, third]):
        similar = MostSimilar(order)
        assert similar.to(third) is not None
        assert np.array_equal(similar.to(third), first)
        assert np.array_equal(similar.to(first), second)


def test_of_long_chunks_the_rare_tokens_count() -> None:
    common = list(range(100))
    chunks = [token_array([*common, *rare]) for rare in ([200, 201], [201, 202], [203])]
    assert np.array_equal(MostSimilar(chunks).to(chunks[0]), chunks[1])


def test_nothing_is_like_the_only_chunk() -> None:
    assert MostSimilar([token_array([1, 2])]).to(token_array([1, 2])) is None
    MostSimilar([])

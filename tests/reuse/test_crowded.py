"""Streams that give a window many places: found all the same, with few chunks looked at."""

from __future__ import annotations

import numpy as np
import pytest

from semkv_rag.reuse import ChunkIndex, StoredTokens, TokenArray, token_array
from semkv_rag.reuse.look_up import CROWD

from .shelf import Shelf

BOILERPLATE = list(range(100, 140))
EMPTY = np.zeros(0, dtype=np.int32)


def body(number: int, tokens: int = 30) -> list[int]:
    return [10_000 + number * tokens + place for place in range(tokens)]


class Templated:
    """5,000 chunks that all start with the same 40 tokens."""

    def __init__(self) -> None:
        self.asked: set[str] = set()
        self.index = ChunkIndex(self.tokens_of)
        self.index.add((str(number), self.tokens(number)) for number in range(5000))

    def tokens(self, number: int) -> TokenArray:
        return token_array(BOILERPLATE + body(number))

    def tokens_of(self, ids: list[str]) -> dict[str, StoredTokens]:
        self.asked |= set(ids)
        return {name: StoredTokens(self.tokens(int(name)), EMPTY) for name in ids}


@pytest.fixture(scope="module")
def templated() -> Templated:
    return Templated()


@pytest.mark.parametrize("number", [0, 2500, 4999])
def test_neighbouring_windows_find_the_chunk_behind_boilerplate(
    templated: Templated, number: int
) -> None:
    prompt = [1, 2, 3, *BOILERPLATE, *body(number), 4]
    (span,) = templated.index.match(token_array(prompt))
    assert (span.chunk_id, span.src, span.dst, span.length) == (str(number), 0, 3, 70)


def test_chunk_is_found_by_its_body_alone(templated: Templated) -> None:
    prompt = [1, 2, 3, *BOILERPLATE[-2:], *body(3000)]
    (span,) = templated.index.match(token_array(prompt))
    assert (span.chunk_id, span.src, span.length) == ("3000", 38, 32)


def test_boilerplate_alone_comes_from_the_oldest_chunk(templated: Templated) -> None:
    (span,) = templated.index.match(token_array([1, 2, 3, *BOILERPLATE, 4]))
    assert (span.chunk_id, span.src, span.dst, span.length) == ("0", 0, 3, 40)


def test_few_chunks_are_fetched_for_boilerplate() -> None:
    templated = Templated()
    prompt = ([*BOILERPLATE, 1, 2, 3]) * 20 + body(77)
    templated.index.match(token_array(prompt))
    assert len(templated.asked) <= 2 * CROWD


def test_boilerplate_is_found_when_its_oldest_chunks_are_gone() -> None:
    templated = Templated()
    templated.index.remove([str(number) for number in range(1200)])
    (span,) = templated.index.match(token_array([1, 2, 3, *BOILERPLATE, 4]))
    assert (span.chunk_id, span.length) == ("1200", 40)


@pytest.mark.parametrize("stored", [12, 40, 512])
@pytest.mark.parametrize("tokens", [12, 100, 3000])
def test_one_token_over_and_over(shelf: Shelf, stored: int, tokens: int) -> None:
    shelf.put("same", [7] * stored)
    spans = shelf.index.match(token_array([7] * tokens))
    left_over = tokens % 12 if stored == 12 else 0  # all spans whole: the rest is too short
    assert sum(span.length for span in spans) == tokens - left_over
    assert spans[0].exact
    assert len(spans) <= -(-tokens // stored) + 1


@pytest.mark.parametrize("period", [2, 3, 5, 7, 13])
def test_periodic_tokens(shelf: Shelf, period: int) -> None:
    shelf.put("periodic", [index % period for index in range(300)])
    prompt = [99] * 20 + [index % period for index in range(1, 1001)]
    spans = shelf.index.match(token_array(prompt))
    assert sum(span.length for span in spans) == 1000


def test_many_twins(shelf: Shelf) -> None:
    tokens = list(range(200))
    for number in range(500):
        shelf.put(f"twin-{number}", tokens, [number])
    (span,) = shelf.index.match(token_array([-5, *tokens]))
    assert (span.dst, span.length) == (1, 200)
    assert len(set(shelf.asked)) <= 2 * CROWD


def test_same_answer_every_time_and_however_chunks_came() -> None:
    random = np.random.default_rng(5)
    chunks = {f"c{i}": random.integers(0, 2, 60, dtype=np.int32) for i in range(60)}
    prompts = [random.integers(0, 2, 400, dtype=np.int32) for _ in range(10)]

    def tokens_of(ids: list[str]) -> dict[str, StoredTokens]:
        return {name: StoredTokens(chunks[name], EMPTY) for name in ids}

    at_once = ChunkIndex(tokens_of)
    at_once.add(chunks.items())
    singly = ChunkIndex(tokens_of)
    for item in chunks.items():
        singly.add([item])
    for prompt in prompts:
        spans = at_once.match(prompt)
        assert spans == at_once.match(prompt)
        assert spans == singly.match(prompt)

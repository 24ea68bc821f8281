"""What cannot be a prompt or an outcome is an OptionError; a text that cannot be encoded is answered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from semkv_rag.errors import OptionError
from semkv_rag.prompt_cache import Cascade, PromptCacheOptions, SentenceEncoder
from semkv_rag.report import Explored
from semkv_rag.store import KVStore
from tests.prompt_cache.prompts import put_kv, tokens
from tests.store import made
from workbench.word_bags import WORDS

LONE = "which river \ud83d"


@pytest.fixture
def cascade(store: KVStore) -> Iterator[Cascade]:
    options = PromptCacheOptions(capture_longer_than=0)
    with Cascade(store, made.MODEL, options, {"semantic": WORDS}) as opened:
        yield opened


def test_a_prompt_with_a_lone_surrogate_is_looked_up_and_not_stored(
    cascade: Cascade, store: KVStore
) -> None:
    ids = [1, 2, 3]
    found = cascade.lookup(LONE, ids)
    assert found.served is None and found.statuses["exact_text"] == "miss"
    assert not cascade.wants(found)
    assert cascade.wants(cascade.lookup("which river", ids))
    assert not cascade.wants(cascade.lookup("which river", ids, source_version="\ud83d"))
    put_kv(store, "which river")
    for text, version in ((LONE, ""), ("which river", "\ud83d")):
        with pytest.raises(OptionError, match="U\\+D83D at character"):
            cascade.observe(text, tokens("which river"), source_version=version)
    assert not cascade.knows(LONE, ids)


@pytest.mark.slow
def test_an_encoder_that_cannot_encode_it_misses(store: KVStore) -> None:
    with Cascade(
        store, made.MODEL, PromptCacheOptions(), {"semantic": SentenceEncoder()}
    ) as cascade:
        found = cascade.lookup(LONE, [1, 2, 3])
    assert found.statuses["semantic_text"] == "miss"
    assert found.reasons["semantic_text"]


@pytest.mark.parametrize(
    "given",
    [
        {"text": None}, {"text": 3}, {"source_version": 3}, {"tokens": ["a"]}, {"tokens": [2**40]},
        {"tokens": None}, {"namespace": "\ud83d"}, {"namespace": 3},
    ],
)  # fmt: skip
def test_what_is_no_prompt(cascade: Cascade, given: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"text": "which river", "tokens": [1], **given}
    for ask in (cascade.lookup, cascade.explain, cascade.observe, cascade.knows):
        with pytest.raises(OptionError):
            ask(**asked)


@pytest.mark.parametrize(
    "given",
    [
        {"donor": "\ud83d"}, {"donor": 3}, {"donor": None}, {"donor": ["a"]}, {"namespace": None},
        {"layer": {}}, {"encoder": "\udc00"}, {"similarity": "0.9"}, {"similarity": float("nan")},
        {"similarity": 2.0}, {"similarity": None}, {"similarity": float("inf")},
    ],
)  # fmt: skip
def test_what_is_no_outcome(cascade: Cascade, given: dict[str, Any]) -> None:
    explored = Explored("default", "ab" * 32, "semantic", WORDS.name, 0.9)
    assert not cascade.record(explored, correct=True), "there is no such donor"
    with pytest.raises(OptionError):
        cascade.record(replace(explored, **given), correct=True)


def test_an_outcome_is_right_or_wrong(cascade: Cascade) -> None:
    explored = Explored("default", "ab" * 32, "semantic", WORDS.name, 0.9)
    with pytest.raises(OptionError, match="correct is 1"):
        cascade.record(explored, correct=1)  # type: ignore[arg-type]

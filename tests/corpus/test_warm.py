"""Prompts become donors once: what is stored, skipped, taken over and reported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from semkv_rag.corpus import CaptureItem, PrecomputeProgress
from semkv_rag.corpus.split import tokenize
from semkv_rag.corpus.warm import WarmPrompt, WarmResult, warm
from semkv_rag.prompt_cache import Cascade, PromptCacheOptions
from semkv_rag.reuse import token_array
from semkv_rag.store import KVStore, Limit, Pin, chunk_id
from tests.corpus.made_up_engine import FINGERPRINT, MadeUpEngine
from workbench.word_bags import WORDS

TEXTS = ("w1 w2 w3", "w4 w5", "w6 w7 w8 w9")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[MadeUpEngine]:
    with KVStore(tmp_path / "store") as store:
        yield MadeUpEngine(store)


@pytest.fixture
def cascade(engine: MadeUpEngine) -> Iterator[Cascade]:
    with made(engine) as cascade:
        yield cascade


def made(engine: MadeUpEngine, **options: object) -> Cascade:
    chosen = PromptCacheOptions.from_mapping(options)
    return Cascade(engine.store, FINGERPRINT, chosen, {"semantic": WORDS})


def prompts(
    engine: MadeUpEngine, *texts: str, namespace: str = "default", source_version: str = ""
) -> list[WarmPrompt]:
    return [
        WarmPrompt(
            f"line {number}",
            text,
            tokenize(engine.tokenizer, text, special=True),
            namespace,
            source_version,
        )
        for number, text in enumerate(texts, 1)
    ]


def run(engine: MadeUpEngine, cascade: Cascade, given: list[WarmPrompt]) -> WarmResult:
    return warm(engine, cascade, given, max_tokens=10)


def hits(engine: MadeUpEngine, cascade: Cascade, given: list[WarmPrompt]) -> list[bool]:
    return [
        cascade.lookup(
            one.text, one.tokens, one.namespace, source_version=one.source_version
        ).identical
        for one in given
    ]


def test_each_prompt_is_stored_once(engine: MadeUpEngine, cascade: Cascade) -> None:
    given = prompts(engine, *TEXTS, TEXTS[0])
    assert hits(engine, cascade, given) == [False] * 4
    told: list[PrecomputeProgress] = []
    result = warm(engine, cascade, given, max_tokens=10, on_progress=told.append)
    assert (result.prompts, result.stored, result.present, result.computed) == (4, 3, 1, 3)
    assert result.tokens == 4 + 3 + 5
    assert result.bytes > 0
    assert result.failures == []
    assert hits(engine, cascade, given) == [True] * 4
    assert {item.kind for item in engine.captured} == {"prompt"}
    assert [one.phase for one in told] == ["reading"] * 4 + ["computing"] * 3
    assert (told[-1].share, told[-1].documents_total, told[-1].chunks) == (1.0, 3, 3)

    again = run(engine, cascade, given)
    assert asdict(again) == asdict(WarmResult(prompts=4, present=4))
    assert len(engine.captured) == 3


def test_tenants_and_versions_are_apart(engine: MadeUpEngine, cascade: Cascade) -> None:
    own = prompts(engine, TEXTS[0], namespace="a", source_version="1")
    run(engine, cascade, own)
    assert hits(engine, cascade, own) == [True]
    others = prompts(engine, TEXTS[0], namespace="b", source_version="1")
    newer = prompts(engine, TEXTS[0], namespace="a", source_version="2")
    assert hits(engine, cascade, others + newer) == [False, False]
    result = run(engine, cascade, others + newer)
    assert (result.stored, result.computed) == (2, 1), "its KV is there under another version"
    assert hits(engine, cascade, others + newer) == [True, True]


def test_what_a_killed_run_wrote_is_taken_over(engine: MadeUpEngine, cascade: Cascade) -> None:
    (given,) = prompts(engine, TEXTS[0])
    id_ = chunk_id(FINGERPRINT, "default", token_array([]), given.tokens)
    item = CaptureItem(id_, "default", "prompt", given.tokens, token_array([]))
    assert [one.error for one in engine.capture([item])] == [None]
    assert engine.store.get(FINGERPRINT, "default", [id_]) == {}
    result = run(engine, cascade, [given])
    assert (result.stored, result.computed) == (1, 0)
    assert hits(engine, cascade, [given]) == [True]


def test_another_encoder_s_vector_is_added_without_computing(
    engine: MadeUpEngine, cascade: Cascade
) -> None:
    given = prompts(engine, TEXTS[0])
    run(engine, cascade, given)
    layers = {"semantic": WORDS, "prompt": WORDS}
    with Cascade(engine.store, FINGERPRINT, PromptCacheOptions(), layers) as other:
        result = run(engine, other, given)
        assert (result.stored, result.present, result.computed) == (1, 0, 0)
        assert run(engine, other, given).present == 1


def test_failures_are_named_and_the_rest_goes_on(engine: MadeUpEngine, cascade: Cascade) -> None:
    long = " ".join(f"w{number}" for number in range(9))
    given = prompts(engine, TEXTS[0], long, TEXTS[1])
    given.append(WarmPrompt("line 4", "", token_array([]), "default"))
    engine.refuse = lambda item: "the disk is full" if len(item.tokens) == 3 else None
    result = run(engine, cascade, given)
    assert [(one.source, one.reason) for one in result.failures] == [
        ("line 2", "10 tokens, and the model takes 10"),
        ("line 4", "no tokens"),
        ("line 3", "the disk is full"),
    ]
    assert (result.stored, result.computed) == (1, 1)
    assert hits(engine, cascade, given) == [True, False, False, False]


def test_a_stopped_run_keeps_what_was_done(engine: MadeUpEngine, cascade: Cascade) -> None:
    given = prompts(engine, *TEXTS)

    def stop() -> None:
        if len(engine.captured) == 2:
            raise KeyboardInterrupt

    engine.before_write = stop
    with pytest.raises(KeyboardInterrupt):
        run(engine, cascade, given)
    assert sum(hits(engine, cascade, given)) == 2
    engine.before_write = lambda: None
    result = run(engine, cascade, given)
    assert (result.present, result.computed) == (2, 1)


def test_the_budget_holds(engine: MadeUpEngine) -> None:
    with made(engine, capture_bytes=0) as cascade:
        given = prompts(engine, TEXTS[0])
        run(engine, cascade, given)
        assert hits(engine, cascade, given) == [False]


def test_what_the_limits_leave_no_room_for_is_told(engine: MadeUpEngine, cascade: Cascade) -> None:
    given = prompts(engine, *TEXTS)
    assert run(engine, cascade, given[:1]).computed == 1
    engine.store.lifecycle.pin(Pin(namespace="default"))
    there = sum(entry.bytes for entry in engine.store.stats())
    engine.store.lifecycle.set_limit(Limit(None, max_bytes=there))
    result = run(engine, cascade, given)
    assert (result.present, result.computed) == (1, 0)
    assert {failure.source for failure in result.failures} == {"line 2", "line 3"}
    assert all("semkv unpin" in failure.reason for failure in result.failures)
    assert engine.store.verify().notices == ()

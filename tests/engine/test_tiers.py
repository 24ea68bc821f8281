"""Whole prompts around real requests: looked up before, captured in passing, the same answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Engine
from semkv_rag.engine.prompt_lookup import PromptLookup
from semkv_rag.errors import EngineError, OptionError
from semkv_rag.prompt_cache import PromptCacheOptions
from workbench.answers import SAMPLING, assert_same, blended, counted, plain
from workbench.chunks import random_tokens, store_chunks
from workbench.engines import Engines
from workbench.tiered import tiered

TEXT = "Question : who leads Tre klim ? Answer :"


@pytest.fixture
def tiering(engine: Engine) -> Iterator[PromptLookup]:
    """The tiers around the session's engine."""
    with tiered(engine, PromptCacheOptions(threshold=0.5)) as tiering:
        yield tiering


def stored(engine: Engine, namespace: str) -> int:
    assert engine.store is not None
    return sum(record.kind == "prompt" for record in engine.store.chunks(namespace=namespace))


def problems(engine: Engine, namespace: str) -> list[str]:
    """What `verify` says of a namespace: other tests of the session leave damage in theirs."""
    assert engine.store is not None
    store, fingerprint = engine.store, engine.fingerprint
    own = store.path(fingerprint, namespace, "00").parent.parent.relative_to(store.root)
    return [p.text for p in store.verify().problems if p.path.startswith(f"{own}/")]


def semantic(engine: Engine, outcome: str) -> float:
    """How often the semantic tier had an outcome."""
    return counted(engine, "semkv_prompt_cache_requests_total", f"semantic_text {outcome}")


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_an_identical_prompt(engine: Engine, tiering: PromptLookup, namespace: str) -> None:
    prompt = random_tokens(9001, 150)
    misses, skips = semantic(engine, "miss"), semantic(engine, "skip")
    first = blended(engine, prompt, namespace=namespace)
    assert first.report.tiers == {"exact_text": "miss", "semantic_text": "miss"}
    assert (first.report.kv_cache, first.report.served_by) == ("miss", None)
    tiering.settle()
    assert stored(engine, namespace) == 1
    engine.reset_prefix_cache()
    again = blended(engine, prompt, namespace=namespace)
    assert again.report.tiers == {"exact_text": "hit", "semantic_text": "skip"}
    assert (semantic(engine, "miss"), semantic(engine, "skip")) == (misses + 1, skips + 1)
    assert (again.report.served_by, again.report.similarity) == ("exact_text", 1.0)
    assert again.report.chunk_ids == (again.report.donor,)
    assert again.report.exact_tokens == 149
    assert (again.report.reused_tokens, again.report.recomputed_tokens) == (0, 0)
    reference = plain(engine, prompt)
    assert_same(first, reference)
    assert_same(again, reference)


def test_an_identical_prompt_in_a_new_process(
    engine: Engine, engines: Engines, tiering: PromptLookup, namespace: str, reader: Path
) -> None:
    assert engine.store is not None
    prompt = random_tokens(9002, 150)
    blended(engine, prompt, namespace=namespace)
    tiering.settle()
    with engines.own(reader, store=engine.store.root, prompt_cache=PromptCacheOptions()) as other:
        again = blended(other, prompt, namespace=namespace)
    assert again.report.served_by == "exact_text"
    assert (again.report.exact_tokens, again.report.reused_tokens) == (149, 0)
    assert_same(again, plain(engine, prompt))


def test_other_case_and_white_space(engine: Engine, tiering: PromptLookup, namespace: str) -> None:
    text = " ".join([TEXT] * 4)
    other = text.replace("Question", "QUESTION").replace("leads", "  Leads")
    tokens, others = (engine.tokenizer(one).input_ids for one in (text, other))
    assert tokens != others
    for reuse in ({"ratio": 1.0}, {"ratio": 0.3}):
        options = ReuseOptions(namespace=namespace, **reuse)
        engine.generate(text, sampling=SAMPLING, reuse=options)
        tiering.settle()
        engine.reset_prefix_cache()
        answer = engine.generate(other, sampling=SAMPLING, reuse=options)
        assert answer.report.served_by == "exact_text"
        assert answer.prompt_tokens == len(others), "its own tokens were sent"
        if reuse["ratio"] == 1.0:
            assert_same(answer, plain(engine, others))


def test_a_similar_prompt_reuses_what_is_the_same(
    engine: Engine, tiering: PromptLookup, namespace: str
) -> None:
    context = random_tokens(9003, 200)
    one, other = context + random_tokens(9004, 20), context + random_tokens(9005, 20)
    blended(engine, one, namespace=namespace)
    tiering.settle()
    engine.reset_prefix_cache()
    hits = semantic(engine, "hit")
    answer = blended(engine, other, namespace=namespace)
    assert answer.report.served_by == "semantic_text"
    assert semantic(engine, "hit") == hits + 1
    assert answer.report.exact_tokens >= 200
    assert_same(answer, plain(engine, other))
    tiering.settle()
    assert stored(engine, namespace) == 1, "it was no miss"


def test_what_reuses_chunks_is_not_captured(
    engine: Engine, tiering: PromptLookup, namespace: str
) -> None:
    chunk = store_chunks(engine, [random_tokens(9006, 60)], namespace=namespace)[0]
    prompt = random_tokens(9007, 30) + chunk.tokens + random_tokens(9008, 10)
    answer = blended(engine, prompt, namespace=namespace)
    assert (answer.report.kv_cache, answer.report.served_by) == ("hit", None)
    tiering.settle()
    assert stored(engine, namespace) == 0


def test_a_prompt_behind_a_stored_prompt_prefix_is_stored_whole(
    engine: Engine, namespace: str
) -> None:
    prefix = random_tokens(9020, 40)
    first, second = (prefix + random_tokens(seed, 100) for seed in (9021, 9022))
    with tiered(engine, PromptCacheOptions(threshold=0.99)) as tiering:
        blended(engine, first, namespace=namespace)
        tiering.settle()
        answer = blended(engine, second, namespace=namespace)
        assert (answer.report.served_by, answer.report.exact_tokens) == (None, 40)
        tiering.settle()
        assert stored(engine, namespace) == 2
        assert problems(engine, namespace) == []
        engine.reset_prefix_cache()
        again = blended(engine, second, namespace=namespace)
        assert (again.report.served_by, again.report.exact_tokens) == ("exact_text", 139)
        assert_same(again, plain(engine, second))


def test_what_was_in_the_prefix_cache_is_stored(
    engine: Engine, tiering: PromptLookup, namespace: str
) -> None:
    prompt = random_tokens(9009, 150)
    blended(engine, prompt, enabled=False, namespace=namespace)
    answer = blended(engine, prompt, namespace=namespace)
    assert answer.report.cached_tokens > 0
    tiering.settle()
    assert stored(engine, namespace) == 1
    engine.reset_prefix_cache()
    again = blended(engine, prompt, namespace=namespace)
    assert again.report.exact_tokens == 149
    assert_same(again, plain(engine, prompt))


def test_reuse_switched_off_asks_no_tier(
    engine: Engine, tiering: PromptLookup, namespace: str
) -> None:
    answer = plain(engine, random_tokens(9010, 40))
    assert answer.report.tiers == {}
    tiering.settle()
    assert stored(engine, namespace) == 0


def test_an_abandoned_request_is_forgotten(
    engine: Engine, tiering: PromptLookup, namespace: str
) -> None:
    assert engine._capturer is not None
    options = ReuseOptions(namespace=namespace)
    sampling = {**SAMPLING, "max_tokens": 500}
    stream = engine.stream(random_tokens(9011, 100), sampling=sampling, reuse=options)
    next(iter(stream))
    stream.close()  # type: ignore[attr-defined]
    until(lambda: not engine._capturer._tickets._waiting)  # type: ignore[union-attr]
    assert stored(engine, namespace) == 0
    blended(engine, random_tokens(9012, 100), namespace=namespace)
    tiering.settle()
    assert stored(engine, namespace) == 1


def test_many_at_once(engine: Engine, tiering: PromptLookup, namespace: str) -> None:
    prompts = [random_tokens(9100 + number, 60) for number in range(12)]
    options = ReuseOptions(namespace=namespace)
    first = engine.generate_many(prompts, sampling=SAMPLING, reuse=options)
    tiering.settle()
    assert stored(engine, namespace) == 12
    engine.reset_prefix_cache()
    again = engine.generate_many(prompts, sampling=SAMPLING, reuse=options)
    assert [answer.report.exact_tokens for answer in again] == [59] * 12
    for one, other in zip(first, again, strict=True):
        assert_same(one, other)


def test_a_prompt_observed_ahead(engine: Engine, tiering: PromptLookup, namespace: str) -> None:
    prompt = random_tokens(9013, 100)
    engine.observe(prompt, namespace=namespace)
    engine.observe(prompt, namespace=namespace)
    answer = blended(engine, prompt, namespace=namespace)
    assert (answer.report.served_by, answer.report.exact_tokens) == ("exact_text", 99)
    assert_same(answer, plain(engine, prompt))


def test_a_donor_answers_once_its_outcomes_allow_it(engine: Engine, namespace: str) -> None:
    donor = f"Please tell me : {TEXT}"
    reuse = ReuseOptions(namespace=namespace)
    options = PromptCacheOptions(reuse="substitute", threshold=0.5, delta=0.05, capture=False)
    with tiered(engine, options):
        engine.observe(donor, namespace=namespace)
        first = engine.generate(TEXT, sampling=SAMPLING, reuse=reuse)
        explored = first.report.explored
        assert explored is not None and explored.namespace == namespace
        assert (first.report.served_by, first.prompt_tokens) == (None, len(TEXT.split()))
        assert_same(first, plain(engine, engine.tokenizer(TEXT).input_ids))
        for _ in range(400):
            assert engine.record(first.report, correct=True)
        answers = [engine.generate(TEXT, sampling=SAMPLING, reuse=reuse) for _ in range(20)]
        served = [answer for answer in answers if answer.report.served_by == "semantic_text"]
        assert served
        assert not engine.record(served[0].report, correct=True), "nothing was explored"
        assert served[0].report.donor == explored.donor
        assert_same(served[0], plain(engine, engine.tokenizer(donor).input_ids))


def test_without_tiers(engine: Engine, reader: Path) -> None:
    with pytest.raises(EngineError, match="prompt_cache=PromptCacheOptions"):
        engine.observe(TEXT)
    with pytest.raises(OptionError, match="store="):
        Engine(str(reader), prompt_cache=PromptCacheOptions())

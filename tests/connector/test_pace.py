"""With `ratio="auto"` a prompt whose stored KV loads more slowly than prefill goes is computed."""

from __future__ import annotations

from typing import Any

import pytest

from semkv_rag.config import AUTO, ReuseOptions
from semkv_rag.connector.scheduler import pace as pace_module
from semkv_rag.connector.scheduler.pace import LEAST_SEEN, LEAST_TOKENS, TRIED_EVERY, Pace
from semkv_rag.reuse import ReusePlan, Span
from workbench.answers import assert_same, blended, counted, plain
from workbench.chunks import random_tokens, store_chunks
from workbench.engines import Engines
from workbench.inside import inside


def plan_of(tokens: int, options: ReuseOptions | None = None) -> ReusePlan:
    span = Span("a", 0, 5, tokens)
    return ReusePlan((span,), 5 + tokens, options or ReuseOptions(ratio=AUTO))


class Clock:
    """Stands in for `time.perf_counter`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(pace_module.time, "perf_counter", lambda: self.now)

    def step(self, pace: Pace, tokens: int, took_s: float) -> None:
        pace.step_began(tokens)
        self.now += took_s
        pace.step_ended()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def seen(clock: Clock, *, load_ms: float, prefill_ms: float) -> Pace:
    """What a token takes either way, seen often enough."""
    pace = Pace()
    for _ in range(LEAST_SEEN):
        clock.step(pace, 100, prefill_ms / 10)
        pace.loaded(200, load_ms * 200)
    return pace


def test_what_takes_longer_to_load_than_to_compute_is_computed(clock: Clock) -> None:
    pace = seen(clock, load_ms=3.0, prefill_ms=2.0)
    reason = pace.why_not(plan_of(1000))
    assert reason == ("plain prefill is sooner: about 2010 ms, and 3000 ms to load the stored KV")
    assert seen(clock, load_ms=1.9, prefill_ms=2.0).why_not(plan_of(1000)) is None


def test_a_ratio_of_ones_own_is_kept(clock: Clock) -> None:
    pace = seen(clock, load_ms=30.0, prefill_ms=2.0)
    assert pace.why_not(plan_of(1000, ReuseOptions(ratio=0.17))) is None


def test_nothing_is_decided_before_enough_was_seen(clock: Clock) -> None:
    pace = Pace()
    for _ in range(LEAST_SEEN - 1):
        clock.step(pace, 100, 0.1)
        pace.loaded(200, 20_000.0)
    pace.loaded(200, 20_000.0)
    assert pace.why_not(plan_of(1000)) is None, "one step is missing"
    clock.step(pace, LEAST_TOKENS - 1, 0.1)
    clock.step(pace, 0, 0.1)
    assert pace.why_not(plan_of(1000)) is None, "a decode tells nothing of prefill"
    clock.step(pace, LEAST_TOKENS, 0.1)
    assert pace.why_not(plan_of(1000)) is not None


def test_it_is_tried_again_now_and_then(clock: Clock) -> None:
    pace = seen(clock, load_ms=30.0, prefill_ms=2.0)
    refused = [pace.why_not(plan_of(1000)) is not None for _ in range(3 * TRIED_EVERY)]
    assert refused.count(False) == 3
    for _ in range(2 * LEAST_SEEN):
        pace.loaded(200, 100.0)  # faster now
    assert pace.why_not(plan_of(1000)) is None


@pytest.mark.engine
def test_an_engine_over_slow_storage(engines: Engines, reader: Any) -> None:
    def slow(worker: Any) -> None:
        import time

        from semkv_rag.connector.worker.blend.stored_kv import StoredKV

        bring = StoredKV._bring

        def slowly(self: Any, sources: Any) -> None:
            time.sleep(2)
            bring(self, sources)

        StoredKV._bring = slowly  # type: ignore[method-assign]

    with engines.own(reader) as engine:
        chunks = store_chunks(
            engine, [random_tokens(seed, 90) for seed in range(LEAST_SEEN + 2)], namespace="default"
        )
        inside(engine, slow)
        for number in range(LEAST_SEEN):
            plain(engine, random_tokens(100 + number, 90))
            prompt = random_tokens(200 + number, 5) + chunks[number].tokens + [7]
            assert blended(engine, prompt, ratio=AUTO).report.kv_cache == "hit"
        prompt = random_tokens(300, 5) + chunks[-1].tokens + [7]
        answer = blended(engine, prompt, ratio=AUTO)
        assert answer.report.kv_cache == "miss"
        assert answer.report.reason is not None
        assert answer.report.reason.startswith("plain prefill is sooner: about ")
        assert (answer.report.reused_tokens, answer.report.chunk_ids) == (0, ())
        assert counted(engine, "semkv_plain_requests_total", "slower") == 1
        assert_same(answer, plain(engine, prompt))
        prompt = random_tokens(301, 5) + chunks[-2].tokens + [7]
        assert blended(engine, prompt, ratio=0.3).report.kv_cache == "hit"

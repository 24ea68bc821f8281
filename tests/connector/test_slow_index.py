"""An index that answers late: the request waits for it, within bounds, and nobody else does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from semkv_rag.config import ReuseOptions
from semkv_rag.connector.scheduler.planner import AT_ONCE_S
from semkv_rag.engine import Engine
from semkv_rag.store.index.database import READ_S
from semkv_rag.store.index.rest import REST_S
from workbench.answers import SAMPLING, assert_same, blended, plain
from workbench.chunks import random_tokens, store_chunks
from workbench.engines import Engines
from workbench.inside import chunks_in_memory
from workbench.pairs import pairs, spill
from workbench.postgres import PostgresServer

pytestmark = pytest.mark.engine

PLAIN = ReuseOptions(enabled=False)


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgresServer]:
    """Of its own: the others' stands still for nobody."""
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="module")
def engine(engines: Engines, reader: Path, postgresql: PostgresServer) -> Iterator[Engine]:
    with postgresql.schema() as url, engines.own(reader, index_url=url) as engine:
        yield engine


def test_two_tenants_whose_index_is_on_postgresql(engine: Engine) -> None:
    seen = spill(engine, ("a", "b"), list(pairs(seed=8, count=20)))
    assert seen.found == []
    assert seen.own > 0


def test_others_are_answered_while_a_look_up_waits(
    engine: Engine, postgresql: PostgresServer
) -> None:
    chunks = store_chunks(
        engine, [random_tokens(seed, 60) for seed in (801, 802)], namespace="default"
    )
    prompt = random_tokens(803, 5) + chunks[1].tokens + chunks[0].tokens + random_tokens(804, 9)
    expected = plain(engine, prompt)
    with ThreadPoolExecutor(1) as thread:
        for _ in range(5):
            engine.reset_prefix_cache()
            with postgresql.frozen():
                began = time.monotonic()
                waiting = thread.submit(blended, engine, prompt, ratio=1.0)
                for seed in range(5):
                    answer = engine.generate(
                        random_tokens(810 + seed, 40), sampling={"max_tokens": 1}, reuse=PLAIN
                    )
                    assert answer.report.reason == "reuse was switched off for this request"
                was_done, others_s = waiting.done(), time.monotonic() - began
            answer = waiting.result(60)
            if others_s < READ_S and not was_done:
                break
            # The machine stood still for so long that the look-up was given up, or one before it, and
            # this one was refused. Once more, when the index is asked again.
            time.sleep(REST_S)
    assert not was_done and others_s < READ_S, (others_s, answer.report)
    assert answer.report.kv_cache == "hit", answer.report
    assert answer.report.recomputed_tokens == answer.report.reused_tokens == 120
    assert_same(answer, expected)
    # Its blocks have the plan's hashes, though the plan came late: they are found again, and by it only.
    assert blended(engine, prompt, ratio=1.0).report.cached_tokens > 0
    engine.reset_prefix_cache()
    blended(engine, prompt, selector="none")
    assert plain(engine, prompt).logprobs == expected.logprobs


async def test_a_late_answer_has_its_chunks_read_while_others_run(
    engines: Engines, reader: Path, postgresql: PostgresServer
) -> None:
    """vLLM asks for no request while as many run as it takes: this one is planned all the same."""
    with (
        postgresql.schema() as url,
        engines.own(reader, index_url=url, ram_bytes=1 << 24, max_num_seqs=1) as full,
    ):
        for attempt in range(5):
            (chunk,) = store_chunks(full, [random_tokens(860 + attempt, 60)], namespace="default")
            prompt = random_tokens(870, 5) + chunk.tokens + random_tokens(871, 9)
            other = full.astream(random_tokens(872, 20), sampling={"max_tokens": 1900}, reuse=PLAIN)
            await anext(other)
            with postgresql.frozen():
                began = time.monotonic()
                asked = asyncio.create_task(full.agenerate(prompt, sampling=SAMPLING))
                for _ in range(10):  # of them the scheduler has begun most behind the request
                    await anext(other)
                waited_s = time.monotonic() - began
            if waited_s < READ_S:
                break
            await other.aclose()
            await asked
            await asyncio.sleep(REST_S)
        assert waited_s < READ_S
        while ("default", chunk.id) not in await asyncio.to_thread(chunks_in_memory, full):
            await anext(other)  # ends with an error when the other request does
        assert not asked.done()
        await other.aclose()
        answer = await asked
        assert answer.report.kv_cache == "hit", answer.report
        assert answer.report.file_bytes == 0 < answer.report.memory_bytes
        assert answer.report.match_ms > AT_ONCE_S * 1000


def test_a_look_up_that_takes_too_long_is_given_up(
    engine: Engine, postgresql: PostgresServer
) -> None:
    (chunk,) = store_chunks(engine, [random_tokens(851, 60)], namespace="default")
    prompt = random_tokens(852, 5) + chunk.tokens + random_tokens(853, 9)
    with postgresql.frozen():
        answer = blended(engine, prompt)
    assert answer.report.kv_cache == "miss"
    assert answer.report.reason is not None
    assert "index cannot be read" in answer.report.reason
    assert answer.token_ids == plain(engine, prompt).token_ids

"""Engines on several machines that share an object store, which may fail: the bound on waiting holds."""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, get_args

import pytest

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Completion, Engine
from semkv_rag.report import ReuseReport
from tests.store.shared import Shared, environment, shared_store
from workbench import s3
from workbench.answers import SAMPLING, assert_same, blended, plain
from workbench.chunks import Stored, Tokens, random_tokens, store_chunks
from workbench.engines import Engines
from workbench.inside import inside
from workbench.s3 import Fault, FaultProxy

pytestmark = pytest.mark.engine

logger = logging.getLogger(__name__)

BOUND_MS: Final = 200.0
NOISE_MS: Final = 500.0
"""What a busy machine may add: a thread that is to wake up waits for a core."""
FAULTS = [fault for fault in get_args(Fault) if fault != "none"]
REST_S: Final = 1.0
"""How long an object store that did not answer is left alone here; ten times as long elsewhere."""
REQUESTS: Final = (30, pytest.param(200, marks=pytest.mark.soak))

_prompts = itertools.count(50_000)


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultProxy]:
    with FaultProxy(s3.shared().port) as proxy, pytest.MonkeyPatch.context() as patch:
        for name, value in environment(proxy.endpoint).items():
            patch.setenv(name, value)
        yield proxy


@pytest.fixture(scope="module")
def shared(proxy: FaultProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with shared_store(tmp_path_factory.mktemp("shared")) as shared:
        yield shared


@pytest.fixture(scope="module")
def writer(engines: Engines, reader: Path, shared: Shared) -> Iterator[Engine]:
    with engines.own(reader, store=shared.place("writer"), index_url=shared.index_url) as engine:
        yield engine


@pytest.fixture(scope="module")
def replica(engines: Engines, reader: Path, shared: Shared) -> Iterator[Engine]:
    """One that has patience: a busy machine fails no test of answers."""
    place = shared.place("replica", fetch_timeout_ms=20_000)
    with engines.own(reader, store=place, index_url=shared.index_url) as engine:
        yield engine


@pytest.fixture(scope="module")
def hurried(engines: Engines, reader: Path, shared: Shared) -> Iterator[Engine]:
    """One with the default bound."""
    with engines.own(reader, store=shared.place("hurried"), index_url=shared.index_url) as engine:
        measure_loads(engine)
        rest_shortly(engine)
        yield engine


def chunk_prompt(chunks: list[Stored]) -> Tokens:
    """A prompt of chunks that nobody asked yet: behind other tokens, which vLLM has not in its cache."""
    seed = next(_prompts)
    parts = [random_tokens(seed, 9), *(chunk.tokens for chunk in chunks), random_tokens(-seed, 7)]
    return [token for part in parts for token in part]


def ask(engine: Engine, chunk: Stored, namespace: str) -> tuple[Tokens, Completion]:
    """Ask with a chunk; again where the index did not answer: a busy machine fails no test."""
    until = time.monotonic() + 60 * REST_S
    while True:
        prompt = chunk_prompt([chunk])
        answer = blended(engine, prompt, namespace=namespace)
        by_index = "the store's index" in (answer.report.reason or "")
        if not by_index or time.monotonic() > until:
            return prompt, answer
        time.sleep(REST_S)


def measure_loads(engine: Engine) -> None:
    """Have the worker note how long each request waits for its stored KV, by its own clock."""

    def watch(worker: Any) -> None:
        import time

        from semkv_rag.connector.worker.blend.stored_kv import StoredKV

        bring, StoredKV.loads_ms = StoredKV._bring, []  # type: ignore[attr-defined]

        def timed(self: Any, sources: Any) -> None:
            bring(self, sources)
            self.loads_ms.append((time.perf_counter() - self._began) * 1000)

        StoredKV._bring = timed  # type: ignore[method-assign]

    inside(engine, watch)


def rest_shortly(engine: Engine) -> None:
    """So that the tests of the faults do not wait a minute for it."""

    def set_rest(worker: Any) -> None:
        from semkv_rag.store.objects import waiting

        waiting.REST_S = REST_S  # type: ignore[misc]

    inside(engine, set_rest)


def loads_ms(engine: Engine) -> list[float]:
    """What was noted since the last call."""

    def take(worker: Any) -> list[float]:
        from semkv_rag.connector.worker.blend.stored_kv import StoredKV

        loads: list[float] = StoredKV.loads_ms  # type: ignore[attr-defined]
        taken = list(loads)
        loads.clear()
        return taken

    return inside(engine, take)


def test_what_one_engine_stores_another_finds_within_a_second(
    engines: Engines, reader: Path, writer: Engine, replica: Engine, namespace: str
) -> None:
    """And the answers are those over a plain folder."""
    folder = engines.get(reader)
    assert folder.fingerprint == writer.fingerprint == replica.fingerprint
    tokens = [random_tokens(seed, 90) for seed in (11, 12, 13)]
    there = store_chunks(folder, tokens, namespace=namespace)
    chunks = store_chunks(writer, tokens, namespace=namespace)
    began = time.monotonic()
    assert replica.store is not None
    while not replica.store.get(replica.fingerprint, namespace, [chunks[-1].id]):
        time.sleep(0.01)
    assert time.monotonic() - began < 1.0
    assert [one.id for one in chunks] == [one.id for one in there]
    for ratio in (0.15, 0.0, 1.0):
        prompt = chunk_prompt([chunks[1], chunks[0], chunks[2]])
        answers = [
            blended(engine, prompt, namespace=namespace, ratio=ratio)
            for engine in (folder, writer, replica)
        ]
        reasons = [answer.report.reason for answer in answers]
        assert [answer.report.kv_cache for answer in answers] == ["hit"] * 3, reasons
        assert [answer.report.reused_tokens for answer in answers] == [270] * 3
        for answer in answers[1:]:
            assert_same(answer, answers[0])
            assert answer.report.chunk_ids == answers[0].report.chunk_ids


@pytest.mark.slow
@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_delays_no_request_beyond_the_bound(
    writer: Engine,
    hurried: Engine,
    proxy: FaultProxy,
    namespace: str,
    fault: Fault,
    requests: int,
) -> None:
    chunks = store_chunks(
        writer, [random_tokens(seed, 90) for seed in range(700, 710)], namespace=namespace
    )
    proxy.fault = fault
    loads_ms(hurried)
    try:
        waited: list[float] = []
        reasons: list[str | None] = []
        hits = 0
        for index in range(requests):
            prompt, answer = ask(hurried, chunks[index % len(chunks)], namespace)
            assert len(answer.token_ids) == 4
            waited += loads_ms(hurried)
            hits += answer.report.kv_cache == "hit"
            reasons.append(answer.report.reason)
            if index == 0:
                assert_same(answer, plain(hurried, prompt))
    finally:
        proxy.fault = "none"
    said = {reason for reason in reasons if reason}
    logger.info(
        "%s: %d requests, %d hits, waited for stored KV: median %.1f ms, longest %.1f ms; %s",
        *(fault, requests, hits, statistics.median(waited), max(waited), sorted(said)[:3]),
    )
    assert len(waited) == requests
    assert max(waited) <= BOUND_MS + NOISE_MS
    assert reasons[0] is not None
    assert all("the object store" in reason for reason in said)
    assert not [reason for reason in said if "127.0.0.1" in reason or "semkv-" in reason]
    if fault == "hanging":
        assert reasons[0] == "the object store did not answer within 200 ms"
        assert statistics.median(waited) < 50  # the others do not wait
    # Server away is not damage: the chunks are as good as ever.
    until = time.monotonic() + 60 * REST_S  # a busy machine may need several tries
    while time.monotonic() < until:
        answer = blended(hurried, chunk_prompt(chunks[:3]), namespace=namespace)
        if answer.report.kv_cache == "hit":
            break
        time.sleep(REST_S)
    assert answer.report.kv_cache == "hit", answer.report
    assert answer.report.reused_tokens == 270


@pytest.mark.slow
def test_requests_side_by_side_wait_no_longer(
    writer: Engine, hurried: Engine, proxy: FaultProxy, namespace: str
) -> None:
    """They do not wait one behind the other."""
    chunks = store_chunks(
        writer, [random_tokens(seed, 90) for seed in range(750, 774)], namespace=namespace
    )
    time.sleep(REST_S)
    loads_ms(hurried)
    prompts = [chunk_prompt([chunk]) for chunk in chunks]
    reuse = ReuseOptions(namespace=namespace)
    proxy.fault = "slow"
    try:
        answers = hurried.generate_many(prompts, sampling=SAMPLING, reuse=reuse)
    finally:
        proxy.fault = "none"
    waited = loads_ms(hurried)
    logger.info("side by side: longest %.1f ms of %d", max(waited), len(waited))
    assert len(answers) == len(waited) == len(chunks)
    assert max(waited) <= BOUND_MS + NOISE_MS


def test_what_is_cached_is_reused_while_the_object_store_is_away(
    writer: Engine, replica: Engine, proxy: FaultProxy, namespace: str
) -> None:
    chunks = store_chunks(writer, [random_tokens(31, 90)], namespace=namespace)
    assert blended(replica, chunk_prompt(chunks), namespace=namespace).report.kv_cache == "hit"
    proxy.fault = "away"
    try:
        answer = blended(replica, chunk_prompt(chunks), namespace=namespace)
    finally:
        proxy.fault = "none"
    assert answer.report.kv_cache == "hit"


def test_the_report_and_the_metrics_tell_what_was_fetched(
    writer: Engine, replica: Engine, namespace: str
) -> None:
    chunks = store_chunks(
        writer, [random_tokens(seed, 90) for seed in (51, 52)], namespace=namespace
    )

    def report_of(engine: Engine, numbers: Sequence[int]) -> ReuseReport:
        prompt = chunk_prompt([chunks[number] for number in numbers])
        return blended(engine, prompt, namespace=namespace).report

    def counted(tier: str) -> float:
        tiers: dict[str, float] = replica.stats().get("semkv_loaded_bytes_total", {})
        return tiers.get(tier, 0)

    own = report_of(writer, [0, 1])
    assert (own.memory_bytes, own.object_bytes) == (0, 0)
    before = counted("object")
    one = report_of(replica, [0])
    assert (one.memory_bytes, one.file_bytes) == (0, 0)
    assert one.object_bytes == own.file_bytes / 2 > 0
    both = report_of(replica, [0, 1])
    assert both.file_bytes == both.object_bytes == one.object_bytes
    assert counted("object") - before == 2 * one.object_bytes


def test_a_damaged_copy_is_repaired_behind_the_request(
    writer: Engine, replica: Engine, namespace: str
) -> None:
    chunks = store_chunks(
        writer, [random_tokens(seed, 90) for seed in (41, 42)], namespace=namespace
    )
    assert blended(replica, chunk_prompt(chunks), namespace=namespace).report.kv_cache == "hit"
    assert replica.store is not None
    path = replica.store.path(replica.fingerprint, namespace, chunks[0].id)
    sound = path.read_bytes()
    path.write_bytes(sound[:-50] + bytes(50))
    answer = blended(replica, chunk_prompt(chunks), namespace=namespace)
    assert answer.report.kv_cache == "hit", answer.report
    assert path.read_bytes() == sound


def test_a_capture_fails_in_words_and_nothing_is_promised(
    writer: Engine, proxy: FaultProxy, namespace: str
) -> None:
    from semkv_rag.corpus.capture import CaptureItem
    from semkv_rag.reuse import token_array
    from semkv_rag.store import chunk_id

    own, before = token_array(random_tokens(51, 90)), token_array([])
    id_ = chunk_id(writer.fingerprint, namespace, before, own)
    item = CaptureItem(id_, namespace, "document", own, before, None)
    proxy.fault = "away"
    try:
        (result,) = writer.capture([item])
    finally:
        proxy.fault = "none"
    assert result.error is not None and "the object store failed" in result.error
    assert writer.store is not None
    assert writer.store.get(writer.fingerprint, namespace, [id_]) == {}
    (result,) = writer.capture([item])
    assert result.error is None

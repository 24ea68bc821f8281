"""Several captures at once on one engine: each gets its own results, shared chunks included."""

from __future__ import annotations

import threading

from semkv_rag.corpus import CaptureItem, CaptureResult, precompute_texts
from semkv_rag.engine import Engine
from semkv_rag.reuse import token_array
from semkv_rag.store import ChunkKey, chunk_id
from workbench.answers import assert_same, blended, plain
from workbench.chunks import random_tokens

THREADS = 4


def items_of(engine: Engine, seeds: range, namespace: str) -> list[CaptureItem]:
    none = token_array([])
    chunks = [token_array(random_tokens(seed, 70)) for seed in seeds]
    ids = [chunk_id(engine.fingerprint, namespace, none, chunk) for chunk in chunks]
    return [
        CaptureItem(id_, namespace, "document", chunk, none)
        for id_, chunk in zip(ids, chunks, strict=True)
    ]


def test_each_capture_gets_its_own_results(engine: Engine, namespace: str) -> None:
    # Neighbouring threads have half of their chunks in common.
    wanted = [
        items_of(engine, range(7000 + 8 * n, 7016 + 8 * n), namespace) for n in range(THREADS)
    ]
    got: list[list[CaptureResult]] = [[] for _ in wanted]

    def capture(number: int) -> None:
        got[number] = list(engine.capture(wanted[number], in_flight=6))

    threads = [threading.Thread(target=capture, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for items, results in zip(wanted, got, strict=True):
        assert {result.item.id for result in results} == {item.id for item in items}
        assert [result.error for result in results] == [None] * len(items)
    assert engine.store is not None
    ids = {item.id for items in wanted for item in items}
    keys = [ChunkKey(id_, engine.fingerprint, namespace) for id_ in ids]
    assert engine.store.add(keys) == ids
    for item in (wanted[0][-1], wanted[1][0]):
        prompt = [*item.tokens.tolist(), *random_tokens(7900, 5)]
        reused = blended(engine, prompt, namespace=namespace)
        assert reused.report.exact_tokens == 70
        assert_same(reused, plain(engine, prompt))


def test_precompute_runs_side_by_side(engine: Engine, namespace: str) -> None:
    """The same documents in two runs at once, as two tenants' clients of one server may send them."""
    documents = [
        (f"d{n}", [f"The house {n} stands in row {n % 7} and has {n} doors ."]) for n in range(30)
    ]
    failures = []

    def run() -> None:
        failures.extend(precompute_texts(engine, documents, namespace=namespace).failures)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
    assert precompute_texts(engine, documents, namespace=namespace).unchanged == 30


def test_a_capture_that_was_left_early_disturbs_no_other(engine: Engine, namespace: str) -> None:
    first = iter(engine.capture(items_of(engine, range(7100, 7140), namespace)))
    next(first)
    first.close()  # type: ignore[attr-defined]
    again = list(engine.capture(items_of(engine, range(7100, 7140), namespace)))
    assert [result.error for result in again] == [None] * 40

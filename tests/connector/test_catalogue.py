"""The scheduler's look at the store: up to date, each namespace for itself, and nobody waits in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semkv_rag.connector.scheduler import catalogue as its
from semkv_rag.connector.scheduler.catalogue import Catalogue
from semkv_rag.errors import StoreError
from semkv_rag.reuse import TokenArray
from semkv_rag.store import ChunkFile, KVStore
from tests.store import made

SOON_S = 30
"""Until a look-up that is not held up is taken for stuck."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with KVStore(tmp_path / "store") as store:
        yield store


@pytest.fixture
def catalogue(store: KVStore) -> Iterator[Catalogue]:
    catalogue = Catalogue(store)
    yield catalogue
    catalogue.close()


def tokens(store: KVStore, id_: str, namespace: str = "default") -> TokenArray:
    with ChunkFile(store.path(made.MODEL, namespace, id_), model=None) as file:
        return file.header.tokens


def found(catalogue: Catalogue, prompt: TokenArray, namespace: str = "default") -> list[str]:
    return [span.chunk_id for span in catalogue.find(made.MODEL, namespace, prompt).result(SOON_S)]


def test_the_next_prompt_finds_what_was_just_stored(store: KVStore, catalogue: Catalogue) -> None:
    for seed in range(4):
        id_ = made.put(store, seed)
        prompt = tokens(store, id_)
        assert found(catalogue, prompt) == [id_]
        assert found(catalogue, prompt, "other") == []
        if seed % 2:
            store.remove(made.MODEL, "default", [id_])
            assert found(catalogue, prompt) == []


def test_what_was_loaded_before_the_first_request(store: KVStore) -> None:
    ids = [made.put(store, seed, namespace=f"n{seed}") for seed in range(3)]
    catalogue = Catalogue(store)
    catalogue.load(made.MODEL)
    for seed, id_ in enumerate(ids):
        assert found(catalogue, tokens(store, id_, f"n{seed}"), f"n{seed}") == [id_]
    catalogue.close()


def test_a_chunk_that_is_bad_is_matched_no_more(store: KVStore, catalogue: Catalogue) -> None:
    id_ = made.put(store, 1)
    prompt = tokens(store, id_)
    assert found(catalogue, prompt) == [id_]
    catalogue.forget(made.MODEL, "default", [id_])
    catalogue.forget(made.MODEL, "other", [id_])
    assert found(catalogue, prompt) == []


class Held:
    """A store whose change feed does not answer for one namespace until it may."""

    def __init__(self, store: KVStore, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer = threading.Event()
        self.asked = 0
        read = store.changes

        def changes(model: str, since: int, wanted: str | None = None) -> Any:
            if wanted == namespace:
                self.asked += 1
                assert self.answer.wait(SOON_S)
            return read(model, since, wanted)

        monkeypatch.setattr(store, "changes", changes)


def test_a_namespace_that_is_slow_holds_up_no_other(
    store: KVStore, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, other = made.put(store, 1, namespace="slow"), made.put(store, 2, namespace="other")
    prompt, others = tokens(store, slow, "slow"), tokens(store, other, "other")
    held = Held(store, "slow", monkeypatch)
    asked = [catalogue.find(made.MODEL, "slow", prompt) for _ in range(50)]
    for _ in range(5):
        assert found(catalogue, others, "other") == [other]
    assert not any(one.done() for one in asked)
    assert held.asked == 1, "one look-up at a time, in one thread"
    held.answer.set()
    for one in asked:
        assert [span.chunk_id for span in one.result(SOON_S)] == [slow]


def test_nobody_waits_behind_a_look_up_that_takes_long(
    store: KVStore, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_ = made.put(store, 1)
    prompt = tokens(store, id_)
    held = Held(store, "default", monkeypatch)
    first = catalogue.find(made.MODEL, "default", prompt)
    monkeypatch.setattr(its, "SLOW_S", 0)
    with pytest.raises(StoreError, match="earlier request"):
        found(catalogue, prompt)
    held.answer.set()
    assert [span.chunk_id for span in first.result(SOON_S)] == [id_]
    monkeypatch.undo()
    assert found(catalogue, prompt) == [id_]


def test_a_look_up_that_is_not_wanted_any_more_is_not_made(
    store: KVStore, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokens(store, made.put(store, 1))
    held = Held(store, "default", monkeypatch)
    first, given_up, last = (catalogue.find(made.MODEL, "default", prompt) for _ in range(3))
    assert given_up.cancel()
    held.answer.set()
    assert first.result(SOON_S) == last.result(SOON_S) != []
    assert held.asked == 2


def test_a_look_up_that_fails_says_why_and_the_next_may_succeed(
    store: KVStore, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_ = made.put(store, 1)
    prompt = tokens(store, id_)
    with monkeypatch.context() as patch:

        def gone(*_: Any) -> Any:
            raise StoreError("it is gone")

        patch.setattr(store, "changes", gone)
        with pytest.raises(StoreError, match="gone"):
            found(catalogue, prompt)
    assert found(catalogue, prompt) == [id_]


def test_namespaces_that_hold_nothing_are_not_kept(catalogue: Catalogue, store: KVStore) -> None:
    prompt = tokens(store, made.put(store, 1))
    for number in range(100):
        assert found(catalogue, prompt, f"nobody {number}") == []
    catalogue._threads.shutdown(wait=True)
    assert len(catalogue._queues) == 0

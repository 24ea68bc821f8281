"""The scheduler's look at the store: up to date, and never waiting long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semkv_rag.engine.catalogue import Catalogue
from semkv_rag.errors import StoreError
from semkv_rag.reuse import TokenArray
from semkv_rag.store import ChunkFile, KVStore
from tests.store import made

WAIT_S = 0.2


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with KVStore(tmp_path / "store") as store:
        yield store


@pytest.fixture
def catalogue(store: KVStore) -> Iterator[Catalogue]:
    catalogue = Catalogue(store, made.MODEL, wait_s=WAIT_S)
    yield catalogue
    catalogue.close()


def tokens(store: KVStore, id_: str, namespace: str = "default") -> TokenArray:
    with ChunkFile(store.path(made.MODEL, namespace, id_), model=None) as file:
        return file.header.tokens


def found(catalogue: Catalogue, prompt: TokenArray, namespace: str = "default") -> list[str]:
    return [span.chunk_id for span in catalogue.match(namespace, prompt)]


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
    catalogue = Catalogue(store, made.MODEL, wait_s=WAIT_S)
    catalogue.load()
    for seed, id_ in enumerate(ids):
        assert found(catalogue, tokens(store, id_, f"n{seed}"), f"n{seed}") == [id_]
    catalogue.close()


def test_a_chunk_that_is_bad_is_matched_no_more(store: KVStore, catalogue: Catalogue) -> None:
    id_ = made.put(store, 1)
    prompt = tokens(store, id_)
    assert found(catalogue, prompt) == [id_]
    catalogue.forget("default", [id_])
    catalogue.forget("other", [id_])
    assert found(catalogue, prompt) == []


def test_an_index_that_does_not_answer_holds_up_nobody_for_long(
    store: KVStore, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, other = made.put(store, 1, namespace="slow"), made.put(store, 2, namespace="other")
    prompt, others = tokens(store, slow, "slow"), tokens(store, other, "other")
    answer = threading.Event()
    read = store.changes

    def frozen(model: str, since: int, namespace: str | None = None) -> Any:
        if namespace == "slow":
            answer.wait(30)
        return read(model, since, namespace)

    monkeypatch.setattr(store, "changes", frozen)
    began = time.monotonic()
    with pytest.raises(StoreError, match="did not answer"):
        found(catalogue, prompt, "slow")
    for _ in range(50):  # and once only
        with pytest.raises(StoreError, match="earlier request"):
            found(catalogue, prompt, "slow")
        assert found(catalogue, others, "other") == [other]
    assert time.monotonic() - began < 10 * WAIT_S
    answer.set()
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            assert found(catalogue, prompt, "slow") == [slow]
            return
        except StoreError:
            time.sleep(0.01)
    raise AssertionError("it does not come back")


def test_namespaces_that_hold_nothing_are_not_kept(catalogue: Catalogue, store: KVStore) -> None:
    prompt = tokens(store, made.put(store, 1))
    for number in range(100):
        assert found(catalogue, prompt, f"nobody {number}") == []
    assert len(catalogue._shelves) == 0

"""Documents and their chunks."""

from __future__ import annotations

import pytest

from semkv_rag.store import KVStore
from tests.store import made


def ids_in(store: KVStore, namespace: str = "default") -> set[str]:
    return {record.id for record in store.chunks(namespace=namespace)}


def test_put_and_found(store: KVStore) -> None:
    ids = [made.put(store, seed) for seed in (3, 1, 2, 1)]
    assert store.source(made.MODEL, "default", "a.md") is None
    assert store.put_source(made.MODEL, "default", "a.md", "digest", ids) == 0
    source = store.source(made.MODEL, "default", "a.md")
    assert source is not None
    assert (source.name, source.digest, source.chunk_ids) == ("a.md", "digest", tuple(ids))
    assert store.sources() == [source]
    assert store.sources(namespace="other") == []
    assert store.source(made.MODEL, "other", "a.md") is None
    assert store.source("another model", "default", "a.md") is None


@pytest.mark.slow
def test_a_changed_document_gives_up_just_its_own_chunks(store: KVStore) -> None:
    ids = [made.put(store, seed) for seed in range(5)]
    store.put_source(made.MODEL, "default", "a", "1", ids[:3])
    store.put_source(made.MODEL, "default", "b", "1", ids[2:4])
    assert store.put_source(made.MODEL, "default", "a", "2", ids[:1]) == 1
    assert ids_in(store) == {ids[0], ids[2], ids[3], ids[4]}
    assert not store.path(made.MODEL, "default", ids[1]).exists()
    assert store.path(made.MODEL, "default", ids[2]).exists()


def test_a_removed_document_takes_its_chunks_along(store: KVStore) -> None:
    ids = [made.put(store, seed) for seed in range(3)]
    store.put_source(made.MODEL, "default", "a", "1", ids[:2])
    store.put_source(made.MODEL, "default", "b", "1", ids[1:])
    assert store.remove_source(made.MODEL, "default", "a") == 1
    assert ids_in(store) == set(ids[1:])
    assert [source.name for source in store.sources()] == ["b"]
    assert store.remove_source(made.MODEL, "default", "a") == 0
    assert store.remove_source(made.MODEL, "default", "b") == 2
    assert ids_in(store) == set()


def test_the_same_name_in_another_namespace_is_another_document(store: KVStore) -> None:
    mine, theirs = (made.put(store, 1, namespace=name) for name in ("mine", "theirs"))
    store.put_source(made.MODEL, "mine", "a", "1", [mine])
    store.put_source(made.MODEL, "theirs", "a", "1", [theirs])
    store.remove_source(made.MODEL, "mine", "a")
    assert ids_in(store, "theirs") == {theirs}
    assert [source.namespace for source in store.sources()] == ["theirs"]


def test_a_document_without_chunks_is_known(store: KVStore) -> None:
    store.put_source(made.MODEL, "default", "empty.md", "1", [])
    source = store.source(made.MODEL, "default", "empty.md")
    assert source is not None
    assert source.chunk_ids == ()

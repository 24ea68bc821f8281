"""Eviction by bytes, least recently used first."""

from __future__ import annotations

from semkv_rag.store import KVStore
from tests.store import made


def size(store: KVStore, namespace: str | None = None) -> int:
    return sum(record.bytes for record in store.chunks(namespace=namespace))


def test_the_longest_unused_go_until_it_fits(store: KVStore) -> None:
    ids = [made.put(store, seed, created_at=float(seed)) for seed in range(6)]
    store.touch([ids[0], ids[2]])
    one = size(store) // 6
    assert store.evict(size(store)) == []
    assert store.evict(4 * one) == [ids[1], ids[3]]
    assert size(store) <= 4 * one
    assert store.evict(2 * one) == [ids[4], ids[5]]
    assert {record.id for record in store.chunks()} == {ids[0], ids[2]}


def test_files_go_with_their_rows(store: KVStore) -> None:
    headers = [made.header(seed) for seed in range(300)]  # more than one transaction takes
    ids = store.add([made.write(store, header) for header in headers])
    assert sorted(store.evict(0)) == sorted(ids)
    assert list(store.root.rglob("*.safetensors*")) == []
    assert store.verify().notices == ()


def test_a_namespace_pays_for_itself(store: KVStore) -> None:
    mine = [made.put(store, seed, namespace="mine", created_at=50.0) for seed in range(3)]
    theirs = [made.put(store, seed, namespace="theirs", created_at=1.0) for seed in range(3)]
    assert sorted(store.evict(0, namespace="mine")) == sorted(mine)
    assert {record.id for record in store.chunks()} == set(theirs)


def test_an_evicted_chunk_can_come_back(store: KVStore) -> None:
    id_ = made.put(store, 1)
    store.put_source(made.MODEL, "default", "doc", "1", [id_])
    store.evict(0)
    source = store.source(made.MODEL, "default", "doc")
    assert source is not None
    assert source.chunk_ids == (id_,), "its document is seen to be incomplete"
    assert made.put(store, 1) == id_
    assert store.verify().ok

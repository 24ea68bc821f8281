"""The feed by which an engine follows what others add and remove."""

from __future__ import annotations

from pathlib import Path

import pytest

from semkv_rag.store import Change, KVStore
from semkv_rag.store.cache_key import cache_key
from semkv_rag.store.index import feed
from tests.store import made


def test_from_the_start_it_tells_all_live_chunks(store: KVStore) -> None:
    ids = [made.put(store, seed) for seed in range(4)]
    store.remove(made.MODEL, "default", ids[:1])
    told = store.changes(made.MODEL, 0)
    assert told.reset
    assert {entry.chunk_id for entry in told.entries} == set(ids[1:])
    assert all(entry.added and entry.namespace == "default" for entry in told.entries)


def test_then_what_came_and_went_in_order(store: KVStore) -> None:
    old = made.put(store, 1)
    last = store.changes(made.MODEL, 0).last
    assert store.changes(made.MODEL, last).entries == []
    new = made.put(store, 2, namespace="other")
    store.remove(made.MODEL, "default", [old])
    again = made.put(store, 1)
    told = store.changes(made.MODEL, last)
    assert not told.reset
    assert told.entries == [
        Change("other", new, True),
        Change("default", old, False),
        Change("default", again, True),
    ]
    assert store.changes(made.MODEL, told.last).entries == []
    assert store.changes("another model", last).entries == []


def test_eviction_and_sources_are_told(store: KVStore) -> None:
    ids = [made.put(store, seed) for seed in range(3)]
    last = store.changes(made.MODEL, 0).last
    store.put_source(made.MODEL, "default", "doc", "1", ids[:2])
    store.put_source(made.MODEL, "default", "doc", "2", ids[1:2])
    store.evict(0)
    gone = [entry.chunk_id for entry in store.changes(made.MODEL, last).entries]
    assert gone[0] == ids[0]
    assert set(gone[1:]) == set(ids[1:])


def test_the_last_change_is_another_after_each(store: KVStore) -> None:
    def last() -> int:
        return store.last_change(made.MODEL, "default")

    seen = [last()]
    chunk = made.put(store, 1)
    seen.append(last())
    assert last() == seen[-1]
    store.remove(made.MODEL, "default", [chunk])
    seen.append(last())
    made.put(store, 1)
    seen.append(last())
    assert len(set(seen)) == len(seen)


def test_others_changes_are_not_a_namespace_s_own(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "_KEPT", 2)
    made.put(store, 1)
    last = store.last_change(made.MODEL, "default")
    key = cache_key(store, made.MODEL, "default")
    for seed in range(2, 12):  # far more than are kept
        made.put(store, seed, namespace="other")
    assert store.last_change(made.MODEL, "default") == last
    assert cache_key(store, made.MODEL, "default") == key
    assert store.changes(made.MODEL, last).reset
    made.put(store, 12)
    assert cache_key(store, made.MODEL, "default") != key


def test_another_store_object_sees_them(
    store: KVStore, tmp_path: Path, index_url: str | None
) -> None:
    with KVStore(tmp_path / "store", index_url=index_url) as other:
        last = other.changes(made.MODEL, 0).last
        id_ = made.put(store, 1)
        assert other.changes(made.MODEL, last).entries == [Change("default", id_, True)]


def test_who_is_too_far_behind_starts_anew(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "_KEPT", 5)
    ids = [made.put(store, 0)]
    early = store.changes(made.MODEL, 0).last
    ids += [made.put(store, seed) for seed in range(1, 8)]
    late = store.changes(made.MODEL, early)
    assert not late.reset
    ids += [made.put(store, seed) for seed in range(8, 14)]
    told = store.changes(made.MODEL, early)
    assert told.reset
    assert {entry.chunk_id for entry in told.entries} == set(ids)
    assert len(store.changes(made.MODEL, late.last).entries) == 6
    assert store.changes(made.MODEL, told.last + 1).reset, "a point that is not of this feed"

"""Limits that every process keeps that adds: bytes and time, of the store and of namespaces."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, text

from semkv_rag.errors import OptionError, StoreError, StoreLimitError
from semkv_rag.store import ChunkKey, KVStore, Limit, Pin, migrations
from semkv_rag.store.upkeep import limited
from tests.store import made

processes = multiprocessing.get_context("fork")


def size(store: KVStore, namespace: str | None = None) -> int:
    return sum(entry.bytes for entry in store.stats(namespace))


def ids(store: KVStore, namespace: str | None = None) -> set[str]:
    return {record.id for record in store.chunks(namespace=namespace)}


@pytest.fixture
def one(store: KVStore) -> int:
    """What a chunk of the tests takes, in bytes."""
    id_ = made.put(store, 10_000)
    found = size(store)
    store.remove(made.MODEL, "default", [id_])
    return found


def test_they_stand_in_the_index(store: KVStore, index_url: str | None) -> None:
    assert store.lifecycle.limits() == []
    store.lifecycle.set_limit(Limit(None, max_bytes=10**12, ttl_s=86_400.0))
    store.lifecycle.set_limit(Limit("mine", max_bytes=5))
    with KVStore(store.root, index_url=index_url) as other:
        assert other.lifecycle.limits() == [Limit(None, 10**12, 86_400.0), Limit("mine", 5)]
        assert other.lifecycle.limit("mine") == Limit("mine", 5)
        assert other.lifecycle.limit("theirs") == Limit("theirs")
        other.lifecycle.set_limit(Limit("mine"))
    assert store.lifecycle.limits() == [Limit(None, 10**12, 86_400.0)]


def test_a_store_of_the_revision_before_limits_is_brought_up_to_date(
    store: KVStore, index_url: str | None
) -> None:
    folder = Path(migrations.__file__).parent
    lifecycle = ScriptDirectory(str(folder)).get_revision("0006")
    assert lifecycle.doc == "Limits and pins."
    id_ = made.put(store, 1)
    engine = create_engine(store.index_url)
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE limits"))
        connection.execute(text("DROP TABLE pins"))
        connection.execute(text("DROP TABLE removals"))  # of the newest one
        before = {"revision": lifecycle.down_revision}
        connection.execute(text("UPDATE alembic_version SET version_num = :revision"), before)
    engine.dispose()
    with pytest.raises(StoreError, match="open it for writing once"):
        KVStore(store.root, index_url=index_url, read_only=True)
    with KVStore(store.root, index_url=index_url) as again:
        assert ids(again) == {id_}
        assert again.lifecycle.limits() == []
        again.lifecycle.pin(Pin(namespace="default"))
        assert again.evict(0) == []


def test_what_went_by_itself_is_counted(store: KVStore, one: int) -> None:
    first, second = made.put(store, 1), made.put(store, 2)
    store.remove(made.MODEL, "default", [second])
    assert store.lifecycle.evicted == 0, "somebody removed it"
    store.lifecycle.set_limit(Limit(None, max_bytes=one))
    made.put(store, 3)
    assert first not in ids(store)
    assert store.lifecycle.evicted == 1
    assert len(store.evict(0)) == 1
    assert store.lifecycle.evicted == 2
    store.lifecycle.set_limit(Limit(None, max_bytes=1))
    with pytest.raises(StoreLimitError):
        made.put(store, 4)
    assert store.lifecycle.evicted == 2


@pytest.mark.parametrize(
    "wrong",
    [Limit(None, -1), Limit(None, True), Limit("", 5), Limit("a", ttl_s=0.0), Limit("a", 2**63)],
)
def test_what_is_no_limit_is_refused(store: KVStore, wrong: Limit) -> None:
    with pytest.raises(OptionError):
        store.lifecycle.set_limit(wrong)
    assert store.lifecycle.limits() == []


@pytest.mark.parametrize("times", [1, limited.UNLOCKED])
def test_others_that_come_first_take_the_room(
    store: KVStore, one: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the choice of who goes and before the transaction; once, and as often as that is tried."""
    store.lifecycle.set_limit(Limit(None, max_bytes=3 * one))
    before = [made.put(store, seed, created_at=float(seed)) for seed in range(2)]
    others: list[str] = []
    look, busy = limited._Room, False

    def then_others_add(*args: Any) -> limited._Room:
        nonlocal busy
        room = look(*args)
        if not busy and len(others) < times:
            busy = True
            seed = 10 + len(others)
            others.append(made.put(other, seed, created_at=float(seed)))
            busy = False
        return room

    with KVStore(store.root, index_url=store.index_url) as other:
        monkeypatch.setattr(limited, "_Room", then_others_add)
        new = made.put(store, 100, created_at=100.0)
    assert len(others) == times
    assert ids(store) == {*(before + others)[-2:], new}


def test_who_adds_makes_room(store: KVStore, one: int) -> None:
    store.lifecycle.set_limit(Limit(None, max_bytes=3 * one))
    added = [made.put(store, seed, created_at=float(seed)) for seed in range(3)]
    store.touch([added[0]])
    added.append(made.put(store, 3, created_at=3.0))
    assert ids(store) == {added[0], added[2], added[3]}, "the longest unused went"
    assert not store.path(made.MODEL, "default", added[1]).exists()
    assert made.put(store, 3, created_at=3.0) == added[3]
    assert len(ids(store)) == 3, "what is there already takes no room"


def test_a_namespace_pays_for_itself_and_all_for_the_store(store: KVStore, one: int) -> None:
    theirs = [made.put(store, seed, namespace="theirs", created_at=1.0) for seed in range(2)]
    store.lifecycle.set_limit(Limit("mine", max_bytes=2 * one))
    for seed in range(4):
        made.put(store, seed, namespace="mine", created_at=10.0 + seed)
    assert len(ids(store, "mine")) == 2
    assert ids(store, "theirs") == set(theirs)
    store.lifecycle.set_limit(Limit(None, max_bytes=3 * one))
    made.put(store, 5, namespace="mine", created_at=20.0)
    assert len(ids(store, "mine")) == 2
    assert len(ids(store, "theirs")) == 1, "the store's limit holds for all of them together"


def test_what_is_added_together_stays_or_is_refused(store: KVStore, one: int) -> None:
    old = made.put(store, 100, created_at=10**10)  # used last
    store.lifecycle.set_limit(Limit(None, max_bytes=3 * one + one // 2))
    headers = [made.header(seed) for seed in range(3)]
    added = store.add([made.write(store, header) for header in headers])
    assert ids(store) == added
    assert old not in added

    keys = [made.write(store, made.header(seed)) for seed in range(10, 15)]
    with pytest.raises(StoreLimitError, match=r"the store, which may take .* semkv limit --max-by"):
        store.add(keys)
    assert len(ids(store)) == 3
    assert ids(store) <= {key.id for key in keys}, "those that there was room for"
    files = {store.path(made.MODEL, "default", id_) for id_ in ids(store)}
    assert set(store.root.rglob("*.safetensors")) == files, "what was refused takes no space"

    there = ids(store)
    large = made.write(store, made.header(20, tokens=300))
    with pytest.raises(StoreLimitError):
        store.add([large])
    assert ids(store) == there, "nothing goes in vain"


@pytest.mark.slow
def test_in_a_large_call_the_first_do_not_go_for_the_last(store: KVStore, one: int) -> None:
    store.lifecycle.set_limit(Limit(None, max_bytes=280 * one))
    keys = [made.write(store, made.header(seed)) for seed in range(300)]
    with pytest.raises(StoreLimitError):
        store.add(keys)
    assert len(ids(store)) == 280
    assert store.verify().notices == ()
    keys = [made.write(store, made.header(seed)) for seed in range(1000, 1200)]
    assert len(store.add(keys)) == 200, "more than one transaction takes away"
    assert len(ids(store)) == 280
    assert {key.id for key in keys} <= ids(store)


def test_what_is_pinned_leaves_no_room(store: KVStore, one: int) -> None:
    mine = [made.put(store, seed) for seed in range(2)]
    store.lifecycle.pin(Pin(namespace="default"))
    store.lifecycle.set_limit(Limit(None, max_bytes=3 * one))
    other = made.put(store, 3, namespace="other")
    key = made.write(store, made.header(4))
    large = made.write(store, made.header(5, tokens=300))
    with pytest.raises(StoreLimitError, match="semkv unpin"):
        store.add([large])
    assert ids(store) == {*mine, other}
    assert store.add([key]) == {key.id}
    assert ids(store) == {*mine, key.id}, "what is not pinned went"
    with pytest.raises(StoreLimitError, match="what is pinned makes no room"):
        made.put(store, 6, namespace="other")
    assert ids(store) == {*mine, key.id}


def test_images_features_count_and_go(store: KVStore, one: int) -> None:
    state = torch.ones(64, 64)
    taken = store.states.put(made.MODEL, "default", "a" * 64, state)
    store.lifecycle.set_limit(Limit("default", max_bytes=taken + one + 100))
    made.put(store, 1, created_at=10**10)
    store.states.put(made.MODEL, "default", "b" * 64, state)
    assert [record.key for record in store.states.records()] == ["b" * 64]
    assert len(ids(store)) == 1
    store.lifecycle.pin(Pin(model=made.MODEL))
    with pytest.raises(StoreLimitError, match="namespace default"):
        store.states.put(made.MODEL, "default", "c" * 64, state)
    assert store.states.load(made.MODEL, "default", "c" * 64) is None
    assert len(list(store.states.records())) == 1


def test_a_lowered_limit_is_kept_by_the_next_and_by_collecting(store: KVStore, one: int) -> None:
    for seed in range(6):
        made.put(store, seed)
    store.lifecycle.set_limit(Limit(None, max_bytes=4 * one))
    assert len(ids(store)) == 6
    would = store.lifecycle.collect(dry_run=True)
    assert (would.over.chunks, would.over.bytes) == (2, 2 * one)
    assert len(ids(store)) == 6
    assert store.lifecycle.collect() == would
    assert len(ids(store)) == 4
    wanted = Limit("default", max_bytes=one)
    assert store.lifecycle.would_collect(wanted).over.chunks == 3
    store.lifecycle.set_limit(wanted)
    made.put(store, 7)
    assert len(ids(store)) == 1


# ---- time --------------------------------------------------------------------------------------


def test_what_was_unused_for_too_long_is_collected(store: KVStore) -> None:
    now = time.time()
    late = [made.put(store, seed, created_at=now - 100.0) for seed in range(70)]
    fresh = made.put(store, 100, created_at=now - 10.0)
    used = made.put(store, 101, created_at=now - 100.0)
    store.touch([used])
    held = made.put(store, 102, created_at=now - 100.0)
    store.put_source(made.MODEL, "default", "held", "1", [held])
    store.lifecycle.pin(Pin(namespace="default", source="held"))
    longer = made.put(store, 1, namespace="longer", created_at=now - 100.0)
    shorter = made.put(store, 1, namespace="shorter", created_at=now - 10.0)
    store.states.put(made.MODEL, "shorter", "a" * 64, torch.ones(2, 2))

    assert store.lifecycle.collect(dry_run=True).expired.chunks == 0
    assert store.lifecycle.would_collect(Limit(None, ttl_s=50.0)).expired.chunks == 71
    store.lifecycle.set_limit(Limit(None, ttl_s=50.0))
    store.lifecycle.set_limit(Limit("longer", ttl_s=500.0))
    assert store.lifecycle.would_collect(Limit("longer")).expired.chunks == 71
    store.lifecycle.set_limit(Limit("shorter", ttl_s=5.0))
    would = store.lifecycle.collect(dry_run=True)
    assert would.expired.chunks == 71
    assert store.lifecycle.collect() == would
    assert ids(store) == {fresh, used, held, longer}
    assert {*late, shorter}.isdisjoint(ids(store))
    assert len(list(store.states.records())) == 1, "it was made just now"
    report = store.verify()
    assert report.ok
    assert report.notices == ()


def test_who_adds_collects_now_and_then(
    store: KVStore, index_url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    store.lifecycle.set_limit(Limit(None, ttl_s=50.0))
    first = made.put(store, 1, created_at=now - 100.0)
    made.put(store, 2, created_at=now)
    assert first in ids(store), "not at every add"
    monkeypatch.setattr(limited, "SWEEP_S", 0.0)
    made.put(store, 3, created_at=now)
    assert first not in ids(store)
    again = made.put(store, 4, created_at=now - 100.0)
    assert again in ids(store), "what is added does not go at once"
    monkeypatch.undo()
    with KVStore(store.root, index_url=index_url) as other:
        made.put(other, 5, created_at=now)
    assert again not in ids(store)


# ---- several at once ---------------------------------------------------------------------------


def add_many(root: Path, index_url: str | None, seed: int, cap: int, told: Connection) -> None:
    """Add chunks one, two or three at a time, and look each time whether the limit holds."""
    chance = random.Random(seed)
    most = 0
    try:
        with KVStore(root, index_url=index_url) as store:
            for number in range(15):
                namespace = chance.choice(["a", "b"])
                headers = [
                    made.header(1000 * seed + 3 * number + part, namespace=namespace)
                    for part in range(chance.randint(1, 3))
                ]
                added = store.add([made.write(store, header) for header in headers])
                assert len(added) == len(headers)
                most = max(most, size(store), 2 * size(store, "a"))
                with suppress(StoreError):  # it waits for a second only
                    store.touch(list(added)[:1])
        told.send((most <= cap, most))
    except BaseException as error:
        told.send((False, repr(error)))
        raise


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_limits_hold_with_several_that_add(store: KVStore, index_url: str | None, one: int) -> None:
    cap = 20 * one
    store.lifecycle.set_limit(Limit(None, max_bytes=cap))
    store.lifecycle.set_limit(Limit("a", max_bytes=cap // 2))
    running = []
    for seed in range(1, 4):
        ours, theirs = processes.Pipe(duplex=False)
        process = processes.Process(
            target=add_many, args=(store.root, index_url, seed, cap, theirs), daemon=True
        )
        process.start()
        running.append((process, ours))
    outcomes = [pipe.recv() for _, pipe in running]
    for process, _ in running:
        process.join()
    assert all(held for held, _ in outcomes), outcomes
    assert size(store) > cap - 4 * one, "the store is full"
    report = store.verify()
    assert report.problems == ()
    assert report.notices == ()
    assert report.chunks == len(list(store.root.rglob("*.safetensors")))


def add_for_ever(root: Path, index_url: str | None, seed: int, told: Connection) -> None:
    with KVStore(root, index_url=index_url) as store:
        for number in range(100_000):
            keys = [
                made.write(store, made.header(10_000 * seed + 2 * number + part))
                for part in range(2)
            ]
            store.add(keys)
            told.send([key.id for key in keys])
            if number % 5 == 0:
                store.lifecycle.collect()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_who_is_killed_breaks_no_promise(store: KVStore, index_url: str | None, one: int) -> None:
    cap = 8 * one
    store.lifecycle.set_limit(Limit(None, max_bytes=cap))
    store.lifecycle.set_limit(Limit("default", ttl_s=3600.0))
    chance = random.Random(3)
    for round_ in range(1, 9):
        ours, theirs = processes.Pipe(duplex=False)
        process = processes.Process(
            target=add_for_ever, args=(store.root, index_url, round_, theirs), daemon=True
        )
        process.start()
        theirs.close()
        for _ in range(chance.randrange(1, 8)):
            ours.recv()
        time.sleep(chance.uniform(0, 0.03))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        ours.close()
        assert size(store) <= cap
        assert store.verify().problems == (), "no row without its file"
    store.verify(repair=True)  # what the killed ones left comes back
    made.put(store, 999_999)
    assert size(store) <= cap
    assert ChunkKey(made.header(999_999).id, made.MODEL, "default").id in ids(store)

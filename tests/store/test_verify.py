"""Checking the promises, and mending what is broken."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
from sqlalchemy import create_engine, update

from semkv_rag.store import KVStore
from semkv_rag.store.files import header
from semkv_rag.store.index import schema
from tests.store import made


def damage(store: KVStore, id_: str) -> None:
    path = store.path(made.MODEL, "default", id_)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_sound_store(store: KVStore) -> None:
    ids = [made.put(store, seed) for seed in range(3)]
    steps: list[tuple[int, int]] = []
    report = store.verify(progress=lambda done, total: steps.append((done, total)))
    assert report.ok
    assert report.notices == ()
    assert report.chunks == 3
    assert report.bytes == sum(store.path(made.MODEL, "default", i).stat().st_size for i in ids)
    assert steps == [(1, 3), (2, 3), (3, 3)]


def test_broken_promises_are_named_and_taken_back(store: KVStore) -> None:
    ids = [made.put(store, seed) for seed in range(4)]
    store.path(made.MODEL, "default", ids[0]).unlink()
    damage(store, ids[1])
    os.truncate(store.path(made.MODEL, "default", ids[2]), 500)
    for _ in range(2):  # looking changes nothing
        report = store.verify()
        assert not report.ok
        found = {problem.path.split("/")[-1][:64]: problem for problem in report.problems}
        assert found.keys() == set(ids[:3])
        assert found[ids[0]].kind == "missing"
        assert found[ids[1]].kind == found[ids[2]].kind == "damaged"
        assert "0001.v" in found[ids[1]].text
        assert "torn" in found[ids[2]].text
    last = store.changes(made.MODEL, 0).last
    assert not store.verify(repair=True).ok
    assert {record.id for record in store.chunks()} == {ids[3]}
    assert {entry.chunk_id for entry in store.changes(made.MODEL, last).entries} == set(ids[:3])
    assert store.verify().ok
    assert store.verify().notices == ()
    assert len(list(store.root.rglob("*.safetensors"))) == 1


def test_files_the_index_does_not_know_are_taken_in(store: KVStore) -> None:
    whole = made.write(store, made.header(1))
    for rank in range(2):
        ranks = made.write(store, made.header(2, rank=rank, world_size=2))
    half = made.write(store, made.header(3, world_size=2))
    report = store.verify()
    assert report.ok
    assert {notice.kind for notice in report.notices} == {"orphan"}
    assert list(store.chunks()) == []
    store.verify(repair=True)
    assert {record.id for record in store.chunks()} == {whole.id, ranks.id}
    assert half.id in store.verify().notices[0].path


def test_what_is_of_no_use_is_removed(store: KVStore) -> None:
    made.put(store, 1)
    broken = made.write(store, made.header(2))
    damage(store, broken.id)
    elsewhere = store.path(made.MODEL, "other", "a" * 64)
    elsewhere.parent.mkdir(parents=True)
    sound = made.write(store, made.header(3))
    store.path(made.MODEL, "default", sound.id).rename(elsewhere)
    report = store.verify(repair=True)
    assert report.ok
    assert [notice.kind for notice in report.notices] == ["debris"] * 2
    assert len(list(store.root.rglob("*.safetensors"))) == 1


def test_files_of_a_newer_version_are_left_alone(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(header, "PLAIN_FORMAT", replace(header.FORMAT, version=4))
        key = made.write(store, made.header(1))
    report = store.verify(repair=True)
    assert "newer" in report.notices[0].text
    assert store.path(key.model, key.namespace, key.id).exists()
    assert list(store.chunks()) == []


def test_temporary_files_go_once_they_are_old(store: KVStore) -> None:
    id_ = made.put(store, 1)
    folder = store.path(made.MODEL, "default", id_).parent
    old, new = (folder / f".{id_}.r0.safetensors.{age}.tmp" for age in ("old", "new"))
    for file in (old, new):
        file.write_bytes(b"half")
    long_ago = time.time() - 7200
    os.utime(old, (long_ago, long_ago))
    report = store.verify()
    assert report.ok
    assert [notice.path.endswith("old.tmp") for notice in report.notices] == [True]
    assert new.exists()
    assert not old.exists()


def test_swapped_files_are_noticed(store: KVStore) -> None:
    ids = [made.put(store, seed) for seed in range(2)]
    paths = [store.path(made.MODEL, "default", id_) for id_ in ids]
    paths[0].replace(paths[1])
    report = store.verify()
    assert {problem.kind for problem in report.problems} == {"missing", "damaged"}


def test_swapped_ranks_are_noticed(store: KVStore) -> None:
    for rank in range(2):
        key = made.write(store, made.header(1, rank=rank, world_size=2))
    store.add([key])
    first, second = (store.path(made.MODEL, "default", key.id, rank) for rank in range(2))
    between = first.with_name("x")
    first.rename(between)
    second.rename(first)
    between.rename(second)
    assert "rank 1 of 2" in store.verify().problems[0].text


@pytest.mark.parametrize("repair", ["verify", "rebuild"])
def test_an_index_that_holds_other_tokens_than_the_file(store: KVStore, repair: str) -> None:
    """Tokens of the index are matched against prompts: a wrong one would bring another text's KV."""
    id_ = made.put(store, 1)
    engine = create_engine(store.index_url)
    with engine.begin() as connection:
        connection.execute(update(schema.chunk_tokens).values(tokens=b"\0" * 64))
    engine.dispose()
    report = store.verify()
    assert "other tokens" in report.problems[0].text
    _ = store.verify(repair=True) if repair == "verify" else store.rebuild_index()
    assert store.verify().ok
    stored = store.tokens(made.MODEL, "default", [id_])[id_]
    assert stored.tokens.tolist() == made.header(1).tokens.tolist()

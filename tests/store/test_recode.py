"""Recoding a store in place, by one that is killed and by the next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semkv_rag.errors import OptionError, StoreError
from semkv_rag.store import ChunkFile, KVStore, write_chunk
from semkv_rag.store.upkeep import recode as recoding
from tests.store import made


def codecs(store: KVStore) -> dict[str, str]:
    """By id, as the index and the files say."""
    said = {}
    for record in store.chunks():
        with ChunkFile(store.path(record.model, record.namespace, record.id), model=None) as file:
            assert file.header.codec == record.codec
            assert file.size_bytes == record.bytes
        said[record.id] = record.codec
    return said


def test_all_chunks_are_recoded(store: KVStore) -> None:
    ids = [made.put(store, seed) for seed in range(4)]
    told: list[tuple[int, int]] = []
    report = store.recode("int8", progress=lambda done, total: told.append((done, total)))
    assert (report.recoded, report.unchanged, report.failures) == (4, 0, ())
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert codecs(store) == dict.fromkeys(ids, "int8")
    assert report.bytes_after == sum(record.bytes for record in store.chunks())
    assert store.verify().ok and store.verify().notices == ()
    again = store.recode("int8")
    assert (again.recoded, again.unchanged) == (0, 4)


def test_followers_are_told_that_it_is_another_chunk(store: KVStore) -> None:
    id_ = made.put(store, 1)
    assert store.tokens(made.MODEL, "default", [id_])[id_].lossless
    since = store.changes(made.MODEL, 0).last
    store.recode("fp8")
    entries = store.changes(made.MODEL, since).entries
    assert [(entry.chunk_id, entry.added) for entry in entries] == [(id_, False), (id_, True)]
    stored = store.tokens(made.MODEL, "default", [id_])[id_]
    assert (stored.codec, stored.lossless) == ("fp8", False)


def test_only_a_namespace_and_a_model(store: KVStore) -> None:
    mine, other = made.put(store, 1), made.put(store, 2, namespace="other")
    assert store.recode("int8", namespace="other").recoded == 1
    assert codecs(store) == {mine: "plain", other: "int8"}
    assert store.recode("int8", model="f" * 64).recoded == 0
    assert store.recode("int4", namespace="default", model=made.MODEL).recoded == 1
    assert codecs(store) == {mine: "int4", other: "int8"}


def test_a_dry_run_changes_nothing(store: KVStore) -> None:
    id_ = made.put(store, 1)
    report = store.recode("int8", dry_run=True)
    assert (report.recoded, report.bytes_after) == (1, report.bytes_before)
    assert codecs(store) == {id_: "plain"}


def test_what_is_lost_is_not_brought_back(store: KVStore) -> None:
    first = made.put(store, 1)
    store.recode("int8")
    second = made.put(store, 2)
    for target in ("plain", "fp8"):
        with pytest.raises(
            StoreError, match="1 as int8, and what that left out is not in the store"
        ):
            store.recode(target)
        with pytest.raises(StoreError, match="precompute them again"):
            store.recode(target, dry_run=True)
    assert codecs(store) == {first: "int8", second: "plain"}
    with pytest.raises(OptionError, match="use one of"):
        store.recode("zip")


@pytest.mark.parametrize("behind", [False, True], ids=["before the file", "before the row"])
def test_a_killed_run_goes_on(
    store: KVStore, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    ids = [made.put(store, seed) for seed in range(5)]
    written = 0

    def dying(*args: object) -> int:
        nonlocal written
        written += 1
        if written == 3:
            if behind:
                write_chunk(*args)  # type: ignore[arg-type]
            raise KeyboardInterrupt
        return write_chunk(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as killed:
        killed.setattr(recoding, "write_chunk", dying)
        with pytest.raises(KeyboardInterrupt):
            store.recode("int8")
    assert sorted(record.codec for record in store.chunks()) == ["int8"] * 2 + ["plain"] * 3
    files = set()

    def counting(path: object, *args: object) -> int:
        files.add(path)
        return write_chunk(path, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as counted:
        counted.setattr(recoding, "write_chunk", counting)
        report = store.recode("int8")
    assert (report.recoded, report.unchanged) == (3, 2)
    assert len(files) == (2 if behind else 3)
    assert codecs(store) == dict.fromkeys(ids, "int8")


def test_a_chunk_that_was_evicted_meanwhile_stays_away(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_ = made.put(store, 1)

    def evicting(*args: object) -> int:
        store.remove(made.MODEL, "default", [id_])
        return write_chunk(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(recoding, "write_chunk", evicting)
    store.recode("int8")
    assert list(store.chunks()) == []
    assert not store.path(made.MODEL, "default", id_).exists()


def test_a_damaged_chunk_is_named_and_the_others_are_recoded(store: KVStore) -> None:
    good, bad, gone = (made.put(store, seed) for seed in range(3))
    path = store.path(made.MODEL, "default", bad)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    store.path(made.MODEL, "default", gone).unlink()
    report = store.recode("int8")
    assert report.recoded == 1
    assert {id_ for id_, _ in report.failures} == {bad, gone}
    assert {r.id: r.codec for r in store.chunks()} == {good: "int8", bad: "plain", gone: "plain"}
    assert path.read_bytes() == bytes(content)


def test_a_chunk_of_several_ranks(store: KVStore) -> None:
    for rank in (0, 1):
        key = made.write(store, made.header(1, rank=rank, world_size=2))
    store.add([key])
    # As by a run that was killed between the two.
    half = made.header(1, rank=0, world_size=2)
    path = store.path(made.MODEL, "default", half.id, 0)
    write_chunk(path, replace(half, codec="int8"), made.layers(half))
    assert store.recode("int8").recoded == 1
    assert codecs_of_ranks(store, half.id) == ["int8", "int8"]
    assert store.verify().ok


def codecs_of_ranks(store: KVStore, id_: str) -> list[str]:
    found = []
    for rank in (0, 1):
        with ChunkFile(store.path(made.MODEL, "default", id_, rank), model=None) as file:
            found.append(file.header.codec)
    return found


def test_verify_puts_a_row_right_that_names_another_codec(store: KVStore) -> None:
    header = made.header(1)
    id_ = made.put(store, 1)
    path = store.path(made.MODEL, "default", id_)
    write_chunk(path, replace(header, codec="int8"), made.layers(header))
    assert [notice.kind for notice in store.verify().notices] == ["stale"]
    store.verify(repair=True)
    assert codecs(store) == {id_: "int8"}
    store.rebuild_index()
    assert codecs(store) == {id_: "int8"}

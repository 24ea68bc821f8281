"""The index is lost, and made again from the headers of the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from semkv_rag.errors import StoreError
from semkv_rag.store import KVStore
from tests.store import made


@pytest.fixture
def filled(tmp_path: Path) -> KVStore:
    store = KVStore(tmp_path)
    headers = [made.header(seed, namespace=f"n{seed % 2}", context=seed) for seed in range(6)]
    store.add([made.write(store, header) for header in headers])
    return store


@pytest.mark.parametrize("suffixes", [[""], ["", "-wal", "-shm"]])
def test_deleted_while_the_store_is_open(filled: KVStore, suffixes: list[str]) -> None:
    records = list(filled.chunks())
    tokens = filled.tokens(made.MODEL, "n1", [record.id for record in records])
    last = filled.changes(made.MODEL, 0).last
    for suffix in suffixes:
        (filled.root / f"index.sqlite{suffix}").unlink(missing_ok=True)
    for ask in (
        lambda: filled.get(made.MODEL, "n0", ["a"]),
        lambda: filled.changes(made.MODEL, last),
        lambda: filled.touch(["a"]),
        lambda: made.put(filled, 7),
        lambda: filled.verify(),
    ):
        with pytest.raises(StoreError, match="gone"):
            ask()
    assert not (filled.root / "index.sqlite").exists(), "nobody makes an empty one by asking"
    made.write(filled, made.header(8))
    filled.rebuild_index()
    assert {record.id for record in filled.chunks()} == {
        *(record.id for record in records),
        made.header(8).id,
        made.header(7).id,  # its file was written when the index was gone
    }
    assert set(filled.chunks()) >= set(records)
    again = filled.tokens(made.MODEL, "n1", [record.id for record in records])
    assert {id_: (t.tokens.tolist(), t.context.tolist()) for id_, t in again.items()} == {
        id_: (t.tokens.tolist(), t.context.tolist()) for id_, t in tokens.items()
    }
    told = filled.changes(made.MODEL, last)
    assert told.reset
    assert len(told.entries) == 8
    assert filled.verify().ok
    filled.close()


def test_another_process_made_it_again(filled: KVStore, tmp_path: Path) -> None:
    """An open store notices that the index is another file, and goes on with that."""
    last = filled.changes(made.MODEL, 0).last
    before = list(filled.chunks())
    (tmp_path / "index.sqlite").unlink()
    with KVStore(tmp_path) as other:
        assert list(other.chunks()) == []
        assert filled.changes(made.MODEL, last).entries == []
        other.rebuild_index()
        assert list(filled.chunks()) == before
        made.put(filled, 9)
        assert list(filled.chunks()) == list(other.chunks())
        assert other.verify().ok
        assert filled.verify().ok
    filled.close()
    with KVStore(tmp_path) as again:
        assert len(list(again.chunks())) == 7


def test_an_index_that_is_there_is_made_to_agree(filled: KVStore) -> None:
    records = list(filled.chunks())
    filled.put_source(made.MODEL, "n0", "doc", "1", [records[0].id])
    filled.touch([records[3].id])
    kept = list(filled.chunks())[1:]
    filled.path(records[0].model, records[0].namespace, records[0].id).unlink()
    new = made.write(filled, made.header(7))
    report = filled.rebuild_index()
    assert [problem.kind for problem in report.problems] == ["missing"]
    assert set(filled.chunks()) - set(kept) == {
        *filled.get(made.MODEL, "default", [new.id]).values()
    }
    assert set(kept) <= set(filled.chunks()), "what was right is left as it was"
    assert [source.name for source in filled.sources()] == ["doc"]
    filled.close()


def test_files_that_are_not_sound_are_not_taken_in(filled: KVStore) -> None:
    records = list(filled.chunks())
    path = filled.path(records[0].model, records[0].namespace, records[0].id)
    path.write_bytes(path.read_bytes()[:200])
    (filled.root / "index.sqlite").unlink()
    report = filled.rebuild_index()
    assert [notice.kind for notice in report.notices].count("debris") == 1
    assert list(filled.chunks()) == records[1:]
    filled.close()


def test_overwritten_with_something_else_while_open(filled: KVStore) -> None:
    (filled.root / "index.sqlite-wal").unlink(missing_ok=True)
    (filled.root / "index.sqlite").unlink()
    (filled.root / "index.sqlite").write_bytes(b"something else " * 1000)
    with pytest.raises(StoreError):
        filled.get(made.MODEL, "n0", ["a"])
    with pytest.raises(StoreError):
        filled.rebuild_index()
    (filled.root / "index.sqlite").unlink()
    filled.rebuild_index()
    assert len(list(filled.chunks())) == 6
    filled.close()

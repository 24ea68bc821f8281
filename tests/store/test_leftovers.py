"""Files that are of no chunk that could be promised, and files that somebody writes this moment."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, ValuesView
from pathlib import Path
from threading import Event, Thread

import pytest
import torch

from semkv_rag.store import KVStore
from semkv_rag.store.files.chunk_file import FORMAT
from semkv_rag.store.files.tensor_writer import write_tensors
from tests.store import made

HOURS = 3600.0


def set_age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds, time.time() - seconds))


def write_ranks(store: KVStore, ranks: list[int], world_size: int) -> list[Path]:
    headers = [made.header(1, rank=rank, world_size=world_size) for rank in ranks]
    for header in headers:
        made.write(store, header)
    return [store.path(made.MODEL, "default", header.id, header.rank) for header in headers]


@pytest.mark.parametrize("ranks", [[0], [1], [1, 2], [0, 2]], ids=str)
def test_files_of_some_ranks(store: KVStore, ranks: list[int]) -> None:
    paths = write_ranks(store, ranks, 3)
    report = store.verify(repair=True)
    assert report.ok
    assert [notice.kind for notice in report.notices] == ["orphan"] * len(ranks)
    assert all(path.exists() for path in paths), "the others' may be on their way"
    for path in paths:
        set_age(path, 2 * HOURS)
    assert [notice.kind for notice in store.verify().notices] == ["debris"] * len(ranks)
    store.verify(repair=True)
    assert store.verify().notices == ()
    assert list(store.root.rglob("*.safetensors")) == []


def test_files_of_ranks_that_a_promised_chunk_has_no_more(store: KVStore) -> None:
    paths = write_ranks(store, [0, 1, 2, 3], 4)
    id_ = paths[0].name.split(".")[0]
    made.write(store, made.header(1))
    assert store.add([made.ChunkKey(id_, made.MODEL, "default")]) == {id_}
    for path in paths:
        set_age(path, 2 * HOURS)
    assert [notice.kind for notice in store.verify().notices] == ["debris"] * 3
    store.verify(repair=True)
    assert [path.exists() for path in paths] == [True, False, False, False]
    assert store.verify().notices == ()
    assert [record.id for record in store.chunks()] == [id_]


def test_the_other_ranks_of_a_chunk_that_was_dropped_go_with_it(store: KVStore) -> None:
    paths = write_ranks(store, [0, 1, 2], 3)
    store.add([made.ChunkKey(paths[0].name.split(".")[0], made.MODEL, "default")])
    paths[1].unlink()
    assert not store.verify(repair=True).ok
    assert list(store.root.rglob("*.safetensors")) == []
    assert store.verify().notices == ()


def test_ranks_of_different_captures_are_no_chunk(store: KVStore) -> None:
    write_ranks(store, [0], 2)
    (other,) = write_ranks(store, [1], 3)
    store.verify(repair=True)
    assert list(store.chunks()) == []
    assert other.exists()


def test_a_whole_chunk_beside_a_rank_of_an_earlier_capture(store: KVStore) -> None:
    (other,) = write_ranks(store, [2], 3)
    id_ = made.write(store, made.header(1)).id
    report = store.verify(repair=True)
    assert [notice.kind for notice in report.notices] == ["orphan", "orphan"]
    assert [(record.id, record.ranks) for record in store.chunks()] == [(id_, 1)]
    assert other.exists()


def test_a_promised_chunks_file_in_another_place(store: KVStore) -> None:
    id_ = made.put(store, 1)
    astray = store.path(made.MODEL, "another namespace", id_)
    astray.parent.mkdir(parents=True)
    astray.write_bytes(store.path(made.MODEL, "default", id_).read_bytes())
    assert "not where it belongs" in store.verify(repair=True).notices[0].text
    assert not astray.exists()
    assert store.get(made.MODEL, "default", [id_])


class SlowTensors(dict[str, torch.Tensor]):
    """Its last tensor comes when it is told to."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.begun = Event()
        self.go_on = Event()

    def values(self) -> ValuesView[torch.Tensor]:
        return SlowValues(self)


class SlowValues(ValuesView[torch.Tensor]):
    _mapping: SlowTensors

    def __iter__(self) -> Iterator[torch.Tensor]:
        for value in dict.values(self._mapping):
            self._mapping.begun.set()
            assert self._mapping.go_on.wait(60)
            yield value


@pytest.mark.parametrize("age", [2 * HOURS, -2 * HOURS, 20 * 365 * 24 * HOURS], ids=str)
def test_a_writer_that_is_alive_keeps_its_file_whatever_the_clocks_say(
    store: KVStore, age: float
) -> None:
    path = store.path(made.MODEL, "default", "ab" * 32)
    tensors = SlowTensors({"tokens": torch.zeros(4, dtype=torch.int32)})
    writer = Thread(target=write_tensors, args=(path, FORMAT, {}, tensors))
    writer.start()
    try:
        assert tensors.begun.wait(60)
        (temporary,) = path.parent.glob(".*.tmp")
        set_age(temporary, age)
        assert store.verify(repair=True).notices == ()
        assert temporary.exists()
    finally:
        tensors.go_on.set()
        writer.join()
    assert path.exists()
    left = path.with_name(f".{path.name}.1.tmp")
    left.write_bytes(b"half")
    set_age(left, age)
    assert any("killed" in notice.text for notice in store.verify().notices), "nobody's"
    assert not left.exists()


def test_a_writer_whose_file_is_taken_before_it_is_locked_makes_another(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_files: list[str] = []
    real = os.open

    def taken(name: str, flags: int, *args: int, dir_fd: int | None = None) -> int:
        handle = real(name, flags, *args, dir_fd=dir_fd)
        if str(name).endswith(".tmp"):
            made_files.append(name)
            if len(made_files) == 1:
                os.unlink(name, dir_fd=dir_fd)
        return handle

    monkeypatch.setattr(os, "open", taken)
    made.put(store, 1)
    assert len(made_files) == 2
    assert store.verify().ok

"""Objects are deleted while no writer waits, and no chunk is promised whose object goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from semkv_rag.errors import ObjectStoreError
from semkv_rag.store import ChunkHeader, KVStore
from semkv_rag.store import gone as gone_module
from semkv_rag.store.index import removals
from semkv_rag.store.index.database import Database
from semkv_rag.store.objects.objects import Objects
from semkv_rag.store.upkeep import contents
from tests.store import made
from tests.store.shared import Shared

pytestmark = pytest.mark.slow  # an object store and a database serve these


def write(store: KVStore, seed: int) -> ChunkHeader:
    header = made.header(seed)
    store.write_chunk(header, made.layers(header, seed))
    return header


def remove(store: KVStore, header: ChunkHeader) -> None:
    store.remove(header.model, header.namespace, [header.id])


def is_there(store: KVStore, header: ChunkHeader) -> bool:
    path = store.path(header.model, header.namespace, header.id)
    return store._contents.files.sizes([path]) != [None]


def deleting(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Have deletions wait: set when one has come, and to be set for it to go on."""
    came, go_on = threading.Event(), threading.Event()
    delete = Objects.delete

    def slow(self: Objects, keys: Sequence[str]) -> None:
        came.set()
        assert go_on.wait(30)
        delete(self, keys)

    monkeypatch.setattr(Objects, "delete", slow)
    return came, go_on


def begun(came: threading.Event, store: KVStore, header: ChunkHeader) -> threading.Thread:
    """The removal of a chunk, once its deletion waits."""
    removing = threading.Thread(target=remove, args=(store, header))
    removing.start()
    assert came.wait(30)
    return removing


def test_nobody_asks_the_object_store_while_others_wait_for_the_index(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[str] = []
    asked: list[str] = []
    writing = Database.writing

    @contextmanager
    def watched(self: Database, **options: Any) -> Iterator[Any]:
        with writing(self, **options) as connection:
            locked.append("locked")
            try:
                yield connection
            finally:
                locked.pop()

    monkeypatch.setattr(Database, "writing", watched)

    def noted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Objects, *arguments: Any) -> Any:
            asked.append("while locked" if locked else "beside the lock")
            return real(self, *arguments)

        return call

    for name in ("size", "delete", "put"):
        monkeypatch.setattr(Objects, name, noted(getattr(Objects, name)))
    with shared.open() as store:
        headers = [write(store, seed) for seed in range(3)]
        assert store.add(headers) == {header.id for header in headers}
        remove(store, headers[0])
        assert store.evict(0) == [headers[1].id, headers[2].id]
        assert not any(is_there(store, header) for header in headers)
    assert set(asked) == {"beside the lock"}


def test_others_write_while_objects_are_deleted(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared.open("one") as one, shared.open("two") as two:
        first, second = write(one, 1), write(two, 2)
        one.add([first])
        came, go_on = deleting(monkeypatch)
        removing = begun(came, one, first)
        assert two.add([second]) == {second.id}
        go_on.set()
        removing.join()
        assert [chunk.id for chunk in two.chunks()] == [second.id]


def test_a_chunk_whose_object_is_being_deleted_is_not_promised(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared.open("one") as one, shared.open("two") as two:
        header = write(one, 1)
        one.add([header])
        came, go_on = deleting(monkeypatch)
        removing = begun(came, one, header)
        write(two, 1)  # its object is there, and goes
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            go_on.set()
            removing.join()

        monkeypatch.setattr(contents.time, "sleep", pause)
        assert two.add([header]) == set()
        assert len(pauses) == 1
        assert list(two.chunks()) == []
        write(two, 1)
        assert two.add([header]) == {header.id}
        assert is_there(two, header)


def test_a_removal_between_the_look_and_the_promise_is_seen(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared.open("one") as one, shared.open("two") as two:
        header = write(one, 1)
        one.add([header])
        find = contents.Contents.find
        looked: list[str] = []

        def then_removed(self: contents.Contents, keys: Any) -> Any:
            found = find(self, keys)
            if not looked:
                looked.extend(key.id for key in keys)
                remove(one, header)
            return found

        monkeypatch.setattr(contents.Contents, "find", then_removed)
        monkeypatch.setattr(contents, "PAUSES_S", (0.01,))
        assert two.add([header]) == set()
        assert looked == [header.id]
        assert list(two.chunks()) == []


def test_what_somebody_was_killed_over_is_deleted_by_the_next(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared.open("one") as one, shared.open("two") as two:
        header, other = write(one, 1), write(two, 2)
        one.add([header])

        def killed(self: Objects, keys: Sequence[str]) -> None:
            raise ObjectStoreError("as if the process had ended here")

        with monkeypatch.context() as patch:
            patch.setattr(Objects, "delete", killed)
            remove(one, header)
        assert is_there(two, header)
        two.lifecycle.collect()
        assert is_there(two, header), "somebody may be about to"
        monkeypatch.setattr(gone_module, "STUCK_S", 0.0)
        time.sleep(0.01)
        assert two.add([other]) == {other.id}
        assert not is_there(two, header)
        assert write(two, 1)
        assert two.add([header]) == {header.id}


def test_what_others_finished_and_promised_meanwhile_stays(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two find the same object that a third was to delete; one is slow to begin."""
    monkeypatch.setattr(gone_module, "STUCK_S", 0.0)
    with shared.open("one") as one, shared.open("two") as two:
        header = write(one, 1)
        key = str(one.path(header.model, header.namespace, header.id).relative_to(one.root))
        with one._database.writing() as connection:
            removals.begin(connection, [key], time.time() - 1)
        writing = Database.writing

        @contextmanager
        def late(self: Database, **options: Any) -> Iterator[Any]:
            patch.undo()
            gone_module.finish(two._database, two._contents.files)
            write(two, 1)
            assert two.add([header]) == {header.id}
            with writing(self, **options) as connection:
                yield connection

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Database, "writing", late)
            gone_module.finish(one._database, one._contents.files)
        assert is_there(two, header)
        assert [chunk.id for chunk in two.chunks()] == [header.id]


def test_what_was_deleted_is_forgotten_but_for_the_last(shared: Shared) -> None:
    with shared.open() as store, store._database.writing() as connection:
        now = time.time()
        for number, age_s in enumerate((2 * removals.KEPT_S, 2 * removals.KEPT_S, 0.0), start=1):
            removals.begin(connection, [f"chunks/{number}"], now - age_s)
            removals.end(connection, [f"chunks/{number}"], now - age_s)
        assert removals.last(connection) == 3
        keys = [f"chunks/{number}" for number in range(1, 4)]
        assert removals.since(connection, keys, 0) == {"chunks/3"}
        assert removals.since(connection, keys, 3) == set()

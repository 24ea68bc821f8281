"""Transactions that read nothing while others wait, and fail where they must not be committed."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event, false, true

from semkv_rag.store import KVStore, Limit
from semkv_rag.store.index import chunks, guard, removals, sources
from semkv_rag.store.index.send import UNREAD
from semkv_rag.store.upkeep import contents
from semkv_rag.store.upkeep.contents import Contents
from tests.store import made
from tests.store.shared import Shared

NAME = ("default", "a document", "digest")


def test_a_condition_that_holds_fails_the_transaction(store: KVStore) -> None:
    with store._database.writing() as connection:
        chunks.put_model(connection, "kept", {})
        guard.refuse(connection, false())

    def refused() -> None:
        with store._database.writing(late=True) as connection:
            chunks.put_model(connection, "not kept", {})
            guard.refuse(connection, true())

    with pytest.raises(guard.Refused, match="others came first"):
        refused()
    assert [model.fingerprint for model in store.models()] == ["kept"]


def test_a_document_that_another_put_meanwhile_is_replaced(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = made.put(store, 1), made.put(store, 2)
    look = sources.there

    def then_another_puts_it(*args: Any) -> int:
        there = look(*args)
        patch.undo()
        store.put_source(made.MODEL, *NAME, [theirs])
        return there

    with monkeypatch.context() as patch:
        patch.setattr(sources, "there", then_another_puts_it)
        assert store.put_source(made.MODEL, *NAME, [ours]) == 1
    (document,) = store.sources()
    assert document.chunk_ids == (ours,)
    assert [chunk.id for chunk in store.chunks()] == [ours]


def test_what_is_promised_again_is_not_deleted(store: KVStore) -> None:
    promised, other = made.put(store, 1), "0" * 64
    with store._database.writing() as connection:
        removals.begin(connection, ["ended"], 1.0)
        removals.end(connection, ["ended"], 1.0)
        ids = {"promised": promised, "new": other, "ended": other}
        removals.begin_unpromised(connection, ids, 12.5)
    with store._database.reading() as connection:
        assert removals.begun(connection, ids, 12.5) == {"new", "ended"}
        assert removals.begun(connection, ids, 13.0) == set()
        assert removals.stuck(connection, 20.0) == ["ended", "new"]


@pytest.mark.slow
def test_nothing_is_read_while_others_wait(shared: Shared) -> None:
    """Over an object store: files in a folder are looked at under the lock."""
    read: list[str] = []

    def see(_: Any, cursor: Any, statement: str, __: Any, context: Any, ___: bool) -> None:
        unread = context.execution_options.get(UNREAD)
        if cursor.connection.unsent is not None and not unread:
            read.append(statement)

    with shared.open() as store:
        keys = [made.header(seed, namespace="tenant") for seed in range(3)]
        for key in keys:
            store.write_chunk(key, made.layers(key))
        store.add(keys[:2])
        used = sum(chunk.bytes for chunk in store.chunks())
        store.lifecycle.set_limit(Limit("tenant", max_bytes=used))
        event.listen(store._database._engines[1], "before_cursor_execute", see)
        store.add_model(made.MODEL, {"model": "made up"})
        store.put_source(made.MODEL, "tenant", "a document", "digest", [keys[1].id])
        assert store.add(keys[2:]) == {keys[2].id}
        store.touch([keys[2].id])
        assert len(list(store.chunks())) == 2, "one made room, and its object was deleted"
    assert read == []


@pytest.mark.slow
def test_a_chunk_that_another_promised_meanwhile_is_promised(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Contents._seen

    def then_another_promises_it(self: Contents, keys: Any) -> Any:
        before = seen(self, keys)
        patch.undo()
        with shared.open("two") as two:
            assert two.add(keys) == {keys[0].id}
        return before

    monkeypatch.setattr(contents, "PAUSES_S", (0.01,))
    with shared.open("one") as one:
        key = made.header(1)
        one.write_chunk(key, made.layers(key))
        with monkeypatch.context() as patch:
            patch.setattr(Contents, "_seen", then_another_promises_it)
            assert one.add([key]) == {key.id}
        assert [chunk.id for chunk in one.chunks()] == [key.id]

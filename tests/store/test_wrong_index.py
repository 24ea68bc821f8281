"""An index that says something else than its files, or has lost a part: found, and mended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sqlalchemy import Connection, create_engine, delete, event, insert, update

from semkv_rag.errors import StoreError
from semkv_rag.store import KVStore
from semkv_rag.store.index import schema
from tests.store import made

pytestmark = pytest.mark.slow  # many small ones: seconds, all in all
KEY = "ab" * 32


def alter(store: KVStore, *statements: Any) -> None:
    """Write to the index as somebody does who does not use the store."""
    engine = create_engine(store.index_url)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA foreign_keys=OFF"))
    with engine.begin() as connection:
        for statement in statements:
            _execute(connection, statement)
    engine.dispose()


def _execute(connection: Connection, statement: Any) -> None:
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SET session_replication_role = replica")
    connection.execute(statement)


def put_two_ranks(store: KVStore, seed: int) -> str:
    for rank in range(2):
        key = made.write(store, made.header(seed, rank=rank, world_size=2))
    assert store.add([key]) == {key.id}
    return key.id


def assert_clean(store: KVStore) -> None:
    again = store.verify()
    assert (again.problems, again.notices) == ((), ())


def rows(store: KVStore) -> list[Any]:
    return list(store.chunks())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (delete(schema.chunk_tokens), "does not hold its tokens"),
        (delete(schema.contexts), "does not hold its tokens"),
        (update(schema.chunks).values(token_count=1), "other tokens"),
        (update(schema.chunks).values(context_count=99), "other tokens"),
        (update(schema.chunks).values(namespace="other"), "missing"),
        (update(schema.chunks).values(ranks=1), "rank 0 of 2"),
        (update(schema.chunks).values(ranks=3), "rank 0 of 2"),
        (update(schema.chunks).values(ranks=0), "no files"),
        (update(schema.chunks).values(ranks=-1), "no files"),
        (update(schema.chunks).values(ranks=2**31 - 1), "no files"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value.compile().params or value),
)
def test_a_row_that_is_wrong(store: KVStore, change: Any, text: str) -> None:
    put_two_ranks(store, 1)
    before = rows(store)
    alter(store, change)
    for _ in range(2):  # looking changes nothing
        (problem,) = store.verify().problems
        assert text in problem.text
    store.verify(repair=True)
    assert rows(store) == before
    assert len(store.tokens(made.MODEL, "default", [before[0].id])) == 1
    assert_clean(store)


@pytest.mark.parametrize(
    "values",
    [{"model": "../../etc"}, {"namespace": ""}, {"namespace": "a\nb"}, {"id": "../../x"}],
    ids=str,
)
def test_a_row_that_leads_nowhere(store: KVStore, values: dict[str, str]) -> None:
    ids = {put_two_ranks(store, seed) for seed in (1, 2)}
    one = schema.chunks.c.id == min(ids)
    alter(store, update(schema.chunks).where(one).values(**values))
    assert len(store.verify().problems) == 1
    store.verify(repair=True)
    assert {record.id for record in rows(store)} == ids
    alter(store, update(schema.chunks).where(one).values(**values))
    assert len(store.evict(0)) == 2


@pytest.mark.parametrize("values", [{"bytes": 1}, {"kind": "head"}], ids=str)
def test_a_size_or_a_kind_that_is_wrong_is_put_right(
    store: KVStore, values: dict[str, Any]
) -> None:
    put_two_ranks(store, 1)
    before = rows(store)
    alter(store, update(schema.chunks).values(**values))
    report = store.verify()
    assert report.ok, "its KV is what was promised"
    assert [notice.kind for notice in report.notices] == ["stale"]
    last = store.last_change(made.MODEL, "default")
    store.verify(repair=True)
    assert rows(store) == before
    assert store.last_change(made.MODEL, "default") == last, "nothing came or went"
    assert_clean(store)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"bytes": 1}, "stale"),
        ({"row_count": 1}, "stale"),
        ({"width": 1}, "stale"),
        ({"dtype": "float16"}, "stale"),
        ({"key": "cd" * 32}, "damaged"),
        ({"namespace": "other"}, "missing"),
        ({"namespace": ""}, "damaged"),
        ({"model": "../x"}, "damaged"),
    ],
    ids=str,
)
def test_a_states_row_that_is_wrong(store: KVStore, values: dict[str, Any], kind: str) -> None:
    store.states.put(made.MODEL, "default", KEY, torch.rand(4, 8))
    before = list(store.states.records())
    alter(store, update(schema.states).values(**values))
    report = store.verify()
    assert next(one.kind for one in (*report.problems, *report.notices)) == kind
    store.verify(repair=True)
    assert list(store.states.records()) == before
    assert_clean(store)


@pytest.mark.parametrize(
    "change",
    [
        delete(schema.feed),
        insert(schema.feed).values(id=2, first=1, last=1),
        update(schema.feed).values(last=schema.feed.c.first + 1),
        update(schema.feed).values(first=schema.feed.c.last + 9),
    ],
    ids=["lost", "two", "behind", "upside down"],
)
@pytest.mark.parametrize("how", ["verify", "rebuild"])
def test_a_change_feed_that_is_wrong(store: KVStore, change: Any, how: str) -> None:
    ids = {made.put(store, seed) for seed in range(3)}
    point = store.changes(made.MODEL, 0).last
    alter(store, change)
    (problem,) = store.verify().problems
    assert "change feed" in problem.text
    _ = store.verify(repair=True) if how == "verify" else store.rebuild_index()
    assert_clean(store)
    told = store.changes(made.MODEL, point)
    assert told.reset
    assert {entry.chunk_id for entry in told.entries} == ids
    new = made.put(store, 9)
    assert [entry.chunk_id for entry in store.changes(made.MODEL, told.last).entries] == [new]


def test_a_lost_change_feed_is_named(store: KVStore) -> None:
    made.put(store, 1)
    alter(store, delete(schema.feed))
    uses: list[Callable[[], object]] = [
        lambda: store.changes(made.MODEL, 0),
        lambda: store.evict(0),
    ]
    for use in uses:
        with pytest.raises(StoreError, match="verify --repair"):
            use()

"""The change feed: which chunks came and went, in the order of the commits.

Written with every change of the chunks, inside the same transaction. Read by every engine at every
request, so asking when nothing changed is one row by its key.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Delete,
    Insert,
    ScalarSelect,
    Update,
    bindparam,
    case,
    delete,
    false,
    func,
    insert,
    select,
    update,
)

from semkv_rag.errors import StoreError
from semkv_rag.store.index.guard import is_null_in
from semkv_rag.store.index.schema import changes, chunks, embeddings, feed
from semkv_rag.store.index.send import send
from semkv_rag.store.records import Change, Changes, ChunkKey

_KEPT = 100_000
"""Changes that are kept for followers; who is further behind gets all live chunks."""

LOST: Final = "the index has lost its change feed: semkv verify --repair mends it"

_POINT: Final = select(feed.c.first, feed.c.last)
_GREATEST: Final = select(func.max(changes.c.seq)).scalar_subquery()
_ADVANCE: Final = update(feed).where(feed.c.last < _GREATEST).values(last=_GREATEST)


@dataclass(frozen=True, slots=True)
class News:
    """Chunks that came or went.

    Attributes:
        where: a condition with the parameter `chunk_id`: told are only those that it holds for.
        values: its further parameters, for each chunk.
    """

    keys: Sequence[ChunkKey]
    added: bool
    where: ColumnElement[bool]
    values: Sequence[Mapping[str, object]] = ()


def append(connection: Connection, *news: News) -> None:
    """Tell that chunks came or went. The connection holds the writers' lock."""
    for one in news:
        rows = [
            {
                "model": key.model,
                "namespace": key.namespace,
                "chunk_id": key.id,
                "added": one.added,
                **(one.values[position] if one.values else {}),
            }
            for position, key in enumerate(one.keys)
        ]
        if rows:
            send(connection, _insert_where(one.where), rows)
    _end(connection)


def append_new(connection: Connection, keys: Sequence[ChunkKey]) -> None:
    """Tell that chunks came, all of them. The connection holds the writers' lock."""
    rows = [
        {"nth": nth, "model": key.model, "namespace": key.namespace, "chunk_id": key.id}
        for nth, key in enumerate(keys, start=1)
    ]
    told = insert(changes).values(seq=_taken() + bindparam("nth", type_=BigInteger), added=True)
    send(connection, told.inline(), rows)
    _end(connection)


def append_gone(connection: Connection, ids: Sequence[str]) -> None:
    """Tell that those of some chunks go that are there. The connection holds the writers' lock."""
    number = _taken() + func.row_number().over(order_by=chunks.c.id)
    gone = select(number, chunks.c.model, chunks.c.namespace, chunks.c.id, false())
    names = ["seq", "model", "namespace", "chunk_id", "added"]
    send(connection, insert(changes).from_select(names, gone.where(chunks.c.id.in_(ids))))
    _end(connection)


def _end(connection: Connection) -> None:
    """What follows all changes of a transaction."""
    send(connection, _ADVANCE)
    for statement in _forgetting(_KEPT):
        send(connection, statement)


def _taken() -> ScalarSelect[int]:
    """The last number that something has."""
    taken = case((feed.c.last < _GREATEST, _GREATEST), else_=feed.c.last)
    return select(taken).scalar_subquery()


@lru_cache
def _insert_where(condition: ColumnElement[bool]) -> Insert:
    """Inserts a change with the next number, if the condition holds."""
    number = _taken() + 1
    names = ["model", "namespace", "chunk_id", "added"]
    values = [bindparam(name, type_=changes.c[name].type) for name in names]
    return insert(changes).from_select(["seq", *names], select(number, *values).where(condition))


@lru_cache
def _forgetting(kept: int) -> tuple[Delete, Update]:
    """Forget the oldest changes where there are far more than are kept."""
    long = feed.c.last - feed.c.first > 2 * kept
    first = select(feed.c.last - kept).where(long).scalar_subquery()
    # But for the last of each namespace, which `last_of` tells.
    latest = select(func.max(changes.c.seq)).group_by(changes.c.model, changes.c.namespace)
    return (
        delete(changes).where(changes.c.seq <= first, changes.c.seq.not_in(latest)),
        update(feed).where(long).values(first=feed.c.last - kept),
    )


def is_lost(error: BaseException) -> bool:
    """Whether a statement failed because the feed had no number for a change."""
    return is_null_in(error, "changes", "seq")


def advance(connection: Connection) -> int:
    """Take the next number for a change that is told elsewhere. The connection holds the lock."""
    send(connection, update(feed).values(last=feed.c.last + 1))
    return last(connection)


def read(connection: Connection, model: str, since: int, namespace: str | None = None) -> Changes:
    """What changed for a model after `since`, or all its live chunks when that cannot be told.

    Args:
        namespace: only what changed there; None is any.
    """
    first, last = _point(connection)
    if since == last:
        return Changes(last, [])
    if not first <= since <= last:
        live = select(chunks.c.namespace, chunks.c.id).where(chunks.c.model == model)
        if namespace is not None:
            live = live.where(chunks.c.namespace == namespace)
        rows = connection.execute(live)
        return Changes(last, [Change(row[0], row[1], True) for row in rows], reset=True)
    news = (
        select(changes.c.namespace, changes.c.chunk_id, changes.c.added)
        .where(changes.c.seq > since, changes.c.seq <= last, changes.c.model == model)
        .order_by(changes.c.seq)
    )
    if namespace is not None:
        news = news.where(changes.c.namespace == namespace)
    return Changes(last, [Change(*row) for row in connection.execute(news)])


def namespaces(connection: Connection, model: str) -> list[str]:
    """Those that have a chunk of a model; one step in an index for each, however many chunks."""
    found: list[str] = []
    after = chunks.c.model == model
    while (
        name := connection.scalar(select(func.min(chunks.c.namespace)).where(after))
    ) is not None:
        found.append(name)
        after = (chunks.c.model == model) & (chunks.c.namespace > name)
    return found


def removed(connection: Connection, model: str, since: int) -> tuple[int, list[Change] | None]:
    """The number of the last change, and a model's chunks that went after `since`.

    None instead of the list when that cannot be told. A chunk that went may be back.
    """
    first, last = _point(connection)
    if since == last:
        return last, []
    if not first <= since <= last:
        return last, None
    gone = (
        select(changes.c.namespace, changes.c.chunk_id, changes.c.added)
        .where(changes.c.seq > since, changes.c.seq <= last)
        .where(changes.c.model == model, changes.c.added.is_(False))
        .order_by(changes.c.seq)
    )
    return last, [Change(*row) for row in connection.execute(gone)]


def last(connection: Connection) -> int:
    """The number of the last change."""
    return int(_point(connection)[1])


def last_of(connection: Connection, model: str, namespace: str) -> int:
    """The number of a namespace's last change, 0 when it has had none."""
    own = select(func.max(changes.c.seq)).where(
        changes.c.model == model, changes.c.namespace == namespace
    )
    return int(connection.scalar(own) or 0)


def fault(connection: Connection) -> str | None:
    """What is wrong with the feed's numbers, in words; None when nothing is."""
    rows = connection.execute(_POINT).all()
    if len(rows) != 1:
        return f"the change feed has {len(rows)} rows of numbers instead of one"
    first, last = rows[0]
    if not first <= last or _greatest(connection) > last:
        return "the change feed's numbers are behind what it holds"
    return None


def restore(connection: Connection) -> None:
    """Begin the numbers anew, above all former ones: every follower starts from all live chunks."""
    start = max(time.time_ns() // 1000, _greatest(connection) + 1)
    connection.execute(delete(feed))
    connection.execute(insert(feed), {"id": 1, "first": start, "last": start})


def _greatest(connection: Connection) -> int:
    """The greatest number that something has."""
    taken = (select(func.max(column)) for column in (changes.c.seq, embeddings.c.seq))
    return max(connection.scalar(number) or 0 for number in taken)


def _point(connection: Connection) -> tuple[int, int]:
    """The numbers that the feed covers."""
    rows = connection.execute(_POINT).all()
    if len(rows) != 1:
        raise StoreError(LOST)
    return rows[0].first, rows[0].last

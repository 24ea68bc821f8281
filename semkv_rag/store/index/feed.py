"""The change feed: which chunks came and went, in the order of the commits.

Written with every change of the chunks, inside the same transaction. Read by every engine at every
request, so asking when nothing changed is one row by its key.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection, delete, func, insert, select, update

from semkv_rag.store.index.schema import changes, chunks, feed
from semkv_rag.store.records import Change, Changes, ChunkKey

_KEPT = 100_000
"""Changes that are kept for followers; who is further behind gets all live chunks."""

_POINT = select(feed.c.first, feed.c.last)


def append(connection: Connection, keys: Iterable[ChunkKey], *, added: bool) -> None:
    """Tell that chunks came or went. The connection holds the writers' lock."""
    first, last = connection.execute(_POINT).one()
    rows = [
        {
            "seq": last + number,
            "model": key.model,
            "namespace": key.namespace,
            "chunk_id": key.id,
            "added": added,
        }
        for number, key in enumerate(keys, start=1)
    ]
    if not rows:
        return
    last += len(rows)
    connection.execute(insert(changes), rows)
    if last - first > 2 * _KEPT:
        first = last - _KEPT
        # But for the last of each namespace, which `last_of` tells.
        latest = select(func.max(changes.c.seq)).group_by(changes.c.model, changes.c.namespace)
        connection.execute(
            delete(changes).where(changes.c.seq <= first, changes.c.seq.not_in(latest))
        )
    connection.execute(update(feed).values(first=first, last=last))


def advance(connection: Connection) -> int:
    """Take the next number for a change that is told elsewhere. The connection holds the lock."""
    number = last(connection) + 1
    connection.execute(update(feed).values(last=number))
    return number


def read(connection: Connection, model: str, since: int) -> Changes:
    """What changed for a model after `since`, or all its live chunks when that cannot be told."""
    first, last = connection.execute(_POINT).one()
    if since == last:
        return Changes(last, [])
    if not first <= since <= last:
        live = select(chunks.c.namespace, chunks.c.id).where(chunks.c.model == model)
        rows = connection.execute(live)
        return Changes(last, [Change(row[0], row[1], True) for row in rows], reset=True)
    news = (
        select(changes.c.namespace, changes.c.chunk_id, changes.c.added)
        .where(changes.c.seq > since, changes.c.seq <= last, changes.c.model == model)
        .order_by(changes.c.seq)
    )
    return Changes(last, [Change(*row) for row in connection.execute(news)])


def removed(connection: Connection, model: str, since: int) -> tuple[int, list[Change] | None]:
    """The number of the last change, and a model's chunks that went after `since`.

    None instead of the list when that cannot be told. A chunk that went may be back.
    """
    first, last = connection.execute(_POINT).one()
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
    return int(connection.execute(_POINT).one().last)


def last_of(connection: Connection, model: str, namespace: str) -> int:
    """The number of a namespace's last change, 0 when it has had none."""
    own = select(func.max(changes.c.seq)).where(
        changes.c.model == model, changes.c.namespace == namespace
    )
    return int(connection.scalar(own) or 0)

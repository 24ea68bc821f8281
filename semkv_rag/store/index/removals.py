"""Statements about objects that are being deleted.

Deleting an object takes too long to keep all writers waiting. So a row here says that it is being
deleted, from before until after. A writer that promises a chunk asks whether its object was being deleted
since the writer last saw it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from sqlalchemy import (
    Connection,
    Text,
    bindparam,
    delete,
    exists,
    func,
    insert,
    literal,
    or_,
    select,
    union_all,
    update,
)

from semkv_rag.store.index.chunks import pieces
from semkv_rag.store.index.guard import refuse
from semkv_rag.store.index.schema import chunks, removals, states
from semkv_rag.store.index.send import send
from semkv_rag.store.records import ChunkKey

KEPT_S: Final = 3600.0
"""What was deleted is known for so long. Nobody takes as long between seeing and promising."""


def last(connection: Connection) -> int:
    """The number of the removal that ended last."""
    return int(connection.scalar(select(func.max(removals.c.number))) or 0)


def promised(connection: Connection, ids: Collection[str]) -> list[tuple[ChunkKey, int]]:
    """Chunks and states of these ids that the index promises, each with its ranks; a state has 0.

    One query, since it is asked under the writers' lock.
    """
    found: list[tuple[ChunkKey, int]] = []
    for piece in pieces(ids):
        asked = union_all(
            *(
                select(table.c.id, table.c.model, table.c.namespace, ranks).where(
                    table.c.id.in_(piece)
                )
                for table, ranks in ((chunks, chunks.c.ranks), (states, literal(0)))
            )
        )
        found += [(ChunkKey(*row[:3]), row[3]) for row in connection.execute(asked)]
    return found


def begin(connection: Connection, keys: Collection[str], now: float) -> None:
    """These are about to be deleted."""
    for piece in pieces(keys):
        send(connection, delete(removals).where(removals.c.key.in_(piece)))
        rows = [{"key": key, "number": None, "at": now} for key in piece]
        send(connection, insert(removals), rows)


def end(connection: Connection, keys: Iterable[str], now: float) -> None:
    """These are deleted."""
    ended_last = select(func.coalesce(func.max(removals.c.number), 0)).scalar_subquery()
    for piece in pieces(keys):
        ended = update(removals).where(removals.c.key.in_(piece))
        send(connection, ended.values(number=ended_last + 1, at=now))
    old = (removals.c.number < ended_last) & (removals.c.at < now - KEPT_S)
    send(connection, delete(removals).where(old))


def begin_unpromised(connection: Connection, ids: Mapping[str, str], now: float) -> None:
    """Those that no chunk or state promises are about to be deleted. Reads nothing.

    Args:
        ids: of the chunk or state, by key.
        now: tells these from others' (`begun`).
    """
    own = bindparam("own_key", type_=Text)
    free = ~or_(*(exists().where(table.c.id == bindparam("own_id")) for table in (chunks, states)))
    again = update(removals).where(removals.c.key == own, free).values(number=None, at=now)
    known = exists(select(removals.c.key).where(removals.c.key == own).correlate(None))
    row = select(own, literal(now)).where(free, ~known)
    rows = [{"own_key": key, "own_id": id_} for key, id_ in ids.items()]
    send(connection, again, rows)
    send(connection, insert(removals).from_select(["key", "at"], row), rows)


def begun(connection: Connection, keys: Iterable[str], now: float) -> set[str]:
    """Those of `keys` whose removal began with that `now`, and has not ended."""
    own = (removals.c.at == now) & removals.c.number.is_(None)
    return {
        key
        for piece in pieces(keys)
        for key in connection.scalars(select(removals.c.key).where(removals.c.key.in_(piece), own))
    }


def refuse_since(connection: Connection, keys: Collection[str], number: int) -> None:
    """Refuse the transaction where `since` would find one. Reads nothing."""
    for piece in pieces(keys):
        other = removals.alias()
        going = or_(other.c.number.is_(None), other.c.number > number)
        refuse(connection, exists(select(other.c.key).where(other.c.key.in_(piece), going)))


def since(connection: Connection, keys: Collection[str], number: int) -> set[str]:
    """Those of `keys` that are being deleted, or were since that removal."""
    going = or_(removals.c.number.is_(None), removals.c.number > number)
    found: set[str] = set()
    for piece in pieces(keys):
        found.update(
            connection.scalars(select(removals.c.key).where(removals.c.key.in_(piece), going))
        )
    return found


def stuck(connection: Connection, before: float) -> list[str]:
    """Those whose deletion began before that time and has not ended."""
    asked = select(removals.c.key).where(removals.c.number.is_(None), removals.c.at < before)
    return list(connection.scalars(asked.order_by(removals.c.key)))

"""Statements about pins: what is neither evicted nor expires.

A pin is a rule and not a mark on each chunk, so it holds for what is stored later, and nothing has to be
kept in step when documents change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    and_,
    delete,
    exists,
    false,
    func,
    insert,
    or_,
    select,
)

from semkv_rag.store.index.chunks import pieces
from semkv_rag.store.index.schema import chunks, pins, source_chunks, sources, states
from semkv_rag.store.records import Pin


def every(connection: Connection) -> list[Pin]:
    """All of them, in the order of their making."""
    rows = connection.execute(select(pins.c.model, pins.c.namespace, pins.c.source, pins.c.id))
    return [Pin(*row[:3]) for row in sorted(rows, key=lambda row: row.id)]


def put(connection: Connection, pin: Pin) -> None:
    """Add a pin, unless it is there."""
    if connection.execute(select(pins.c.id).where(_is(pin))).first() is None:
        row = {"model": pin.model, "namespace": pin.namespace, "source": pin.source}
        connection.execute(insert(pins), row)


def drop(connection: Connection, pin: Pin) -> bool:
    """Take a pin away; False when it was not there."""
    return connection.execute(delete(pins).where(_is(pin))).rowcount > 0


def drop_of_gone(connection: Connection, namespace: str, names: Collection[str]) -> None:
    """Take away the pins of those of some documents that are there no more."""
    there = exists().where(_names_source()).correlate(pins)
    named = (pins.c.namespace == namespace) & pins.c.source.in_(names)
    connection.execute(delete(pins).where(named, ~there))


def drop_of(connection: Connection, model: str | None, namespace: str | None) -> None:
    """Take away the pins within a model and a namespace; None is any."""
    unpinned = delete(pins)
    if model is not None:
        unpinned = unpinned.where(pins.c.model == model)
    if namespace is not None:
        unpinned = unpinned.where(pins.c.namespace == namespace)
    connection.execute(unpinned)


def chunk_pinned(connection: Connection) -> ColumnElement[bool]:
    """The condition that a row of `chunks` is pinned."""
    if not _any(connection):
        return false()
    listed = (
        select(source_chunks.c.source_id)
        .join(sources, sources.c.id == source_chunks.c.source_id)
        .join(pins, and_(_names_source(), pins.c.source.is_not(None)))
        .where(source_chunks.c.chunk_id == chunks.c.id)
    )
    return or_(_wide(chunks), exists(listed.correlate(chunks)))


def state_pinned(connection: Connection) -> ColumnElement[bool]:
    """The condition that a row of `states` is pinned."""
    return _wide(states) if _any(connection) else false()


def pinned_chunks(connection: Connection, ids: Iterable[str]) -> set[str]:
    """Those of `ids` that are stored and pinned."""
    condition = chunk_pinned(connection)
    return {
        id_
        for piece in pieces(ids)
        for id_ in connection.scalars(select(chunks.c.id).where(chunks.c.id.in_(piece), condition))
    }


def pinned_sources(connection: Connection) -> set[int]:
    """The ids of the rows of `sources` that are pinned, by themselves or with others."""
    if not _any(connection):
        return set()
    named = exists().where(_names_source(), pins.c.source.is_not(None)).correlate(sources)
    return set(connection.scalars(select(sources.c.id).where(or_(_wide(sources), named))))


def pinned_bytes(connection: Connection, namespace: str | None) -> int:
    """What the pinned chunks and states take; None is any namespace."""
    if not _any(connection):
        return 0
    total = 0
    for table, condition in (
        (chunks, chunk_pinned(connection)),
        (states, state_pinned(connection)),
    ):
        size = select(func.coalesce(func.sum(table.c.bytes), 0)).where(condition)
        if namespace is not None:
            size = size.where(table.c.namespace == namespace)
        total += int(connection.scalar(size) or 0)
    return total


def _any(connection: Connection) -> bool:
    return connection.execute(select(pins.c.id).limit(1)).first() is not None


def _wide(table: Table) -> ColumnElement[bool]:
    """The condition that a pin without a document takes a row of a table in."""
    return (
        exists()
        .where(
            pins.c.source.is_(None),
            or_(pins.c.model.is_(None), pins.c.model == table.c.model),
            or_(pins.c.namespace.is_(None), pins.c.namespace == table.c.namespace),
        )
        .correlate(table)
    )


def _names_source() -> ColumnElement[bool]:
    """The condition that a pin names a row of `sources`."""
    return and_(
        pins.c.source == sources.c.name,
        pins.c.namespace == sources.c.namespace,
        or_(pins.c.model.is_(None), pins.c.model == sources.c.model),
    )


def _is(pin: Pin) -> ColumnElement[bool]:
    given = (
        (pins.c.model, pin.model),
        (pins.c.namespace, pin.namespace),
        (pins.c.source, pin.source),
    )
    return and_(
        *(column.is_(None) if value is None else column == value for column, value in given)
    )

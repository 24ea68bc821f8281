"""Statements about sources: documents and the chunks they were split into."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from sqlalchemy import (
    Connection,
    ScalarSelect,
    Select,
    delete,
    exists,
    func,
    insert,
    literal,
    select,
    update,
)

from semkv_rag.store.index import pins
from semkv_rag.store.index.chunks import pieces
from semkv_rag.store.index.guard import refuse
from semkv_rag.store.index.schema import chunks, source_chunks, sources
from semkv_rag.store.index.send import send
from semkv_rag.store.records import SourceInfo


def find(
    connection: Connection,
    model: str | None = None,
    namespace: str | None = None,
    name: str | None = None,
) -> list[SourceInfo]:
    """The sources of a model, a namespace and a name, by name; None is any."""
    wanted = {"model": model, "namespace": namespace, "name": name}
    conditions = [
        sources.c[column] == value for column, value in wanted.items() if value is not None
    ]
    chunks_of: dict[int, list[str]] = {}
    listed = (
        select(source_chunks.c.source_id, source_chunks.c.chunk_id)
        .join(sources, sources.c.id == source_chunks.c.source_id)
        .where(*conditions)
        .order_by(source_chunks.c.source_id, source_chunks.c.position)
    )
    for source_id, chunk_id in connection.execute(listed):
        chunks_of.setdefault(source_id, []).append(chunk_id)
    pinned = pins.pinned_sources(connection)
    found = select(sources).where(*conditions).order_by(sources.c.name)
    return [
        SourceInfo(
            name=row.name,
            digest=row.digest,
            chunk_ids=tuple(chunks_of.get(row.id, ())),
            updated_at=row.updated_at,
            model=row.model,
            namespace=row.namespace,
            pinned=row.id in pinned,
        )
        for row in connection.execute(found)
    ]


def listing(
    connection: Connection, model: str, namespace: str, ids: Collection[str]
) -> dict[str, str]:
    """The first source by name that lists each of some chunks, by the chunk's id."""
    named = (
        select(source_chunks.c.chunk_id, func.min(sources.c.name))
        .join(sources, sources.c.id == source_chunks.c.source_id)
        .where(sources.c.model == model, sources.c.namespace == namespace)
        .group_by(source_chunks.c.chunk_id)
    )
    return {
        chunk_id: name
        for piece in pieces(ids)
        for chunk_id, name in connection.execute(named.where(source_chunks.c.chunk_id.in_(piece)))
    }


def there(connection: Connection, model: str, namespace: str, names: Collection[str]) -> int:
    """How many of some sources there are."""
    found = _scoped(select(func.count(sources.c.id)), model, namespace)
    return sum(
        int(connection.scalar(found.where(sources.c.name.in_(piece))) or 0)
        for piece in pieces(names)
    )


def replace(
    connection: Connection,
    model: str,
    namespace: str,
    name: str,
    digest: str,
    chunk_ids: Sequence[str],
) -> set[str]:
    """Put a source in place of the one of that name; the chunks that no source lists any more."""
    own = {"model": model, "namespace": namespace, "name": name}
    values = {"digest": digest, "updated_at": time.time()}
    row = [literal(value) for value in (own | values).values()]
    new = select(*row).where(~exists(select(sources.c.id).filter_by(**own)))
    send(connection, insert(sources).from_select([*own, *values], new))
    send(connection, update(sources).filter_by(**own).values(values))
    source_id = select(sources.c.id).filter_by(**own).scalar_subquery()
    listed_before = source_chunks.c.source_id == source_id
    before = set(connection.scalars(select(source_chunks.c.chunk_id).where(listed_before)))
    if before:
        send(connection, delete(source_chunks).where(listed_before))
    _list(connection, source_id, chunk_ids)
    return before - _listed(connection, before)


def add(
    connection: Connection,
    model: str,
    namespace: str,
    name: str,
    digest: str,
    chunk_ids: Sequence[str],
) -> None:
    """Put a source that is new; refused where there is one of that name. Reads nothing."""
    own = {"model": model, "namespace": namespace, "name": name}
    refuse(connection, exists(select(sources.c.id).filter_by(**own)))
    values = {"digest": digest, "updated_at": time.time()}
    send(connection, insert(sources).values(own | values).inline())
    _list(connection, select(sources.c.id).filter_by(**own).scalar_subquery(), chunk_ids)


def page(
    connection: Connection, model: str | None, namespace: str | None, limit: int
) -> list[tuple[str, str, str]]:
    """Model, namespace and name of at most `limit` sources; None is any."""
    listed = _scoped(select(sources.c.model, sources.c.namespace, sources.c.name), model, namespace)
    return [(row[0], row[1], row[2]) for row in connection.execute(listed.limit(limit))]


def owners(
    connection: Connection, model: str | None, namespace: str | None, names: Iterable[str]
) -> list[tuple[str, str]]:
    """The models and namespaces that have one of some documents; None is any."""
    held = _scoped(select(sources.c.model, sources.c.namespace).distinct(), model, namespace)
    return sorted(
        {
            (row[0], row[1])
            for piece in pieces(names)
            for row in connection.execute(held.where(sources.c.name.in_(piece)))
        }
    )


def count(connection: Connection, model: str | None, namespace: str | None) -> int:
    """How many sources there are; None is any."""
    return int(connection.scalar(_scoped(select(func.count(sources.c.id)), model, namespace)) or 0)


def own_chunks(
    connection: Connection,
    model: str,
    namespace: str,
    names: Collection[str],
    limit: int | None = None,
) -> list[str]:
    """At most `limit` of the stored chunks that only these sources list."""
    asked = (
        select(sources.c.id)
        .where(sources.c.model == model, sources.c.namespace == namespace)
        .where(sources.c.name.in_(names))
    )
    other = source_chunks.alias()
    shared = exists().where(
        other.c.chunk_id == source_chunks.c.chunk_id, other.c.source_id.not_in(asked)
    )
    own = (
        select(source_chunks.c.chunk_id)
        .distinct()
        .join(chunks, chunks.c.id == source_chunks.c.chunk_id)
        .where(source_chunks.c.source_id.in_(asked))
        .where(~shared)
    )
    return list(connection.scalars(own.limit(limit)))


def remove(connection: Connection, model: str, namespace: str, names: Collection[str]) -> int:
    """Remove those of some sources that are there, their pins, and not their chunks; how many."""
    there = _remove(connection, model, namespace, names)[0]
    pins.drop_of_gone(connection, namespace, names)
    return there


def _scoped(statement: Select[Any], model: str | None, namespace: str | None) -> Select[Any]:
    if model is not None:
        statement = statement.where(sources.c.model == model)
    if namespace is not None:
        statement = statement.where(sources.c.namespace == namespace)
    return statement


def _remove(
    connection: Connection, model: str, namespace: str, names: Collection[str]
) -> tuple[int, set[str]]:
    """Remove those of some sources that are there; how many, and the chunks that they listed."""
    there, before = 0, set[str]()
    for piece in pieces(names):
        which = (
            select(sources.c.id)
            .filter_by(model=model, namespace=namespace)
            .where(sources.c.name.in_(piece))
        )
        if not (ids := list(connection.scalars(which))):
            continue
        listed = source_chunks.c.source_id.in_(ids)
        before.update(connection.scalars(select(source_chunks.c.chunk_id).where(listed)))
        send(connection, delete(source_chunks).where(listed))
        send(connection, delete(sources).where(sources.c.id.in_(ids)))
        there += len(ids)
    return there, before


def _list(connection: Connection, source_id: ScalarSelect[int], chunk_ids: Sequence[str]) -> None:
    """Say of what chunks a source is made, in order."""
    listed = [
        {"position": position, "chunk_id": chunk_id} for position, chunk_id in enumerate(chunk_ids)
    ]
    if listed:
        send(connection, insert(source_chunks).values(source_id=source_id).inline(), listed)


def _listed(connection: Connection, ids: Collection[str]) -> set[str]:
    """Those of `ids` that a source lists. An id says of which model and namespace it is."""
    statement = select(source_chunks.c.chunk_id).distinct()
    found: set[str] = set()
    for piece in pieces(ids):
        found.update(connection.scalars(statement.where(source_chunks.c.chunk_id.in_(piece))))
    return found

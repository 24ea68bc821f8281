"""Statements about sources: documents and the chunks they were split into."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from sqlalchemy import Connection, delete, insert, select

from semkv_rag.store.index.chunks import pieces
from semkv_rag.store.index.schema import source_chunks, sources
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
    found = select(sources).where(*conditions).order_by(sources.c.name)
    return [
        SourceInfo(
            name=row.name,
            digest=row.digest,
            chunk_ids=tuple(chunks_of.get(row.id, ())),
            updated_at=row.updated_at,
            model=row.model,
            namespace=row.namespace,
        )
        for row in connection.execute(found)
    ]


def replace(
    connection: Connection,
    model: str,
    namespace: str,
    name: str,
    digest: str,
    chunk_ids: Sequence[str],
) -> set[str]:
    """Put a source in place of the one of that name; the chunks that no source lists any more."""
    _, before = _remove(connection, model, namespace, [name])
    row = {"model": model, "namespace": namespace, "name": name}
    values = {**row, "digest": digest, "updated_at": time.time()}
    source_id = connection.execute(insert(sources).values(values)).inserted_primary_key
    assert source_id is not None
    listed = [
        {"source_id": source_id[0], "position": position, "chunk_id": chunk_id}
        for position, chunk_id in enumerate(chunk_ids)
    ]
    if listed:
        connection.execute(insert(source_chunks), listed)
    return before - _listed(connection, before)


def remove(
    connection: Connection, model: str, namespace: str, names: Collection[str]
) -> tuple[int, set[str]]:
    """Remove sources; how many there were, and the chunks that no source lists any more."""
    there, before = _remove(connection, model, namespace, names)
    return there, before - _listed(connection, before)


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
        ids = list(connection.scalars(which))
        listed = source_chunks.c.source_id.in_(ids)
        before.update(connection.scalars(select(source_chunks.c.chunk_id).where(listed)))
        connection.execute(delete(source_chunks).where(listed))
        connection.execute(delete(sources).where(sources.c.id.in_(ids)))
        there += len(ids)
    return there, before


def _listed(connection: Connection, ids: Collection[str]) -> set[str]:
    """Those of `ids` that a source lists. An id says of which model and namespace it is."""
    statement = select(source_chunks.c.chunk_id).distinct()
    found: set[str] = set()
    for piece in pieces(ids):
        found.update(connection.scalars(statement.where(source_chunks.c.chunk_id.in_(piece))))
    return found

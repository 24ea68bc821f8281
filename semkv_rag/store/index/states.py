"""Statements about images' features."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    ScalarSelect,
    Select,
    delete,
    func,
    insert,
    select,
    true,
    tuple_,
    update,
)

from semkv_rag.store.index.chunks import PAGE, pieces, put_model
from semkv_rag.store.index.schema import states
from semkv_rag.store.index.send import send
from semkv_rag.store.records import NamespaceStats, StateRecord


def scope(model: str | None, namespace: str | None) -> ColumnElement[bool]:
    """The condition that a state is of a model and a namespace; None is any."""
    condition: ColumnElement[bool] = true()
    if model is not None:
        condition &= states.c.model == model
    if namespace is not None:
        condition &= states.c.namespace == namespace
    return condition


def put(connection: Connection, records: Sequence[StateRecord]) -> None:
    """Add states; one that is there is what its file is now."""
    for record in records:
        values = {
            "row_count": record.rows,
            "width": record.width,
            "dtype": record.dtype,
            "bytes": record.bytes,
            "created_at": record.created_at,
            "used_at": record.used_at,
        }
        changed = update(states).where(states.c.id == record.id).values(values)
        if connection.execute(changed).rowcount == 0:
            put_model(connection, record.model, None)
            own = {"id": record.id, "model": record.model, "namespace": record.namespace}
            connection.execute(insert(states), {**own, "key": record.key, **values})


def drop(connection: Connection, ids: Iterable[str]) -> None:
    """Remove states that are there."""
    for piece in pieces(ids):
        send(connection, delete(states).where(states.c.id.in_(piece)))


def present(connection: Connection, ids: Iterable[str]) -> set[str]:
    """Those of `ids` that the index promises."""
    return {
        id_
        for piece in pieces(ids)
        for id_ in connection.scalars(select(states.c.id).where(states.c.id.in_(piece)))
    }


def find(connection: Connection, ids: Iterable[str]) -> list[StateRecord]:
    """The records of those of `ids` that are there, in no order."""
    return [
        record
        for piece in pieces(ids)
        for record in _records(connection, select(states).where(states.c.id.in_(piece)))
    ]


def page(
    connection: Connection, after: str, model: str | None, namespace: str | None
) -> list[StateRecord]:
    """The next records in the order of their ids."""
    following = select(states).where(states.c.id > after, scope(model, namespace))
    return _records(connection, following.order_by(states.c.id).limit(PAGE))


def touch(connection: Connection, ids: Iterable[str], now: float) -> None:
    for piece in pieces(ids):
        send(connection, update(states).where(states.c.id.in_(piece)).values(used_at=now))


def total_bytes(namespace: str | None) -> ScalarSelect[int]:
    """A query's part: what states take."""
    size = select(func.coalesce(func.sum(states.c.bytes), 0)).where(scope(None, namespace))
    return size.scalar_subquery()


def least_recently_used(
    connection: Connection,
    condition: ColumnElement[bool],
    limit: int,
    after: tuple[float, str] | None = None,
) -> list[StateRecord]:
    """As `chunks.least_recently_used`."""
    oldest = select(states).where(condition).order_by(states.c.used_at, states.c.id)
    if after is not None:
        oldest = oldest.where(tuple_(states.c.used_at, states.c.id) > after)
    return _records(connection, oldest.limit(limit))


def with_states(
    connection: Connection, namespace: str | None, stats: Sequence[NamespaceStats]
) -> list[NamespaceStats]:
    """`stats` with the states counted in, and those of whom there is nothing else."""
    found = {(entry.model, entry.namespace): entry for entry in stats}
    counted = (
        select(states.c.model, states.c.namespace, func.count(), func.sum(states.c.bytes))
        .where(scope(None, namespace))
        .group_by(states.c.model, states.c.namespace)
    )
    for model, name, count, size in connection.execute(counted):
        entry = found.get((model, name), NamespaceStats(model, name, 0, 0, 0, 0))
        found[model, name] = replace(entry, states=count, bytes=entry.bytes + int(size))
    return [found[key] for key in sorted(found)]


def _records(connection: Connection, statement: Select[Any]) -> list[StateRecord]:
    return [StateRecord(*row) for row in connection.execute(statement)]

"""Statements about limits: what the store and its namespaces may hold, and for how long."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Double,
    Table,
    case,
    delete,
    false,
    func,
    insert,
    literal,
    select,
)

from semkv_rag.store.index.schema import limits
from semkv_rag.store.records import Limit

_STORE: Final = ""
"""How the table calls the whole store."""


def every(connection: Connection) -> list[Limit]:
    """All of them, the whole store's first."""
    return [_limit(*row) for row in connection.execute(select(limits).order_by(limits.c.namespace))]


def over(connection: Connection, namespaces: Collection[str]) -> list[Limit]:
    """The limits that some namespaces are under, the whole store's last.

    Args:
        namespaces: not thousands; they are one condition of a query.
    """
    which = limits.c.namespace.in_({*namespaces, _STORE})
    order = limits.c.namespace.desc()
    return [_limit(*row) for row in connection.execute(select(limits).where(which).order_by(order))]


def put(connection: Connection, limit: Limit) -> None:
    """Set a limit in place of the one that was; one without any number is none."""
    name = _STORE if limit.namespace is None else limit.namespace
    connection.execute(delete(limits).where(limits.c.namespace == name))
    if limit.max_bytes is not None or limit.ttl_s is not None:
        row = {"namespace": name, "max_bytes": limit.max_bytes, "ttl_s": limit.ttl_s}
        connection.execute(insert(limits), row)


def expired(
    connection: Connection, table: Table, now: float, instead: Limit | None = None
) -> ColumnElement[bool]:
    """The condition that a row of chunks or states was unused for longer than it may be.

    A namespace's own time to live stands before the store's.

    Args:
        instead: as if this were its scope's limit.
    """
    known = {limit.namespace: limit.ttl_s for limit in every(connection)}
    if instead is not None:
        known[instead.namespace] = instead.ttl_s
    there = [ttl_s for ttl_s in known.values() if ttl_s is not None]
    if not there:
        return false()
    own: ColumnElement[Any] = (
        select(limits.c.ttl_s).where(limits.c.namespace == table.c.namespace).scalar_subquery()
    )
    if instead is not None and instead.namespace is not None:
        own = case(
            (table.c.namespace == instead.namespace, literal(instead.ttl_s, Double)), else_=own
        )
    ttl = func.coalesce(own, literal(known.get(None), Double))
    # The first bound has the index on the time of use asked; NULL is not less than anything.
    return (table.c.used_at < now - min(there)) & (table.c.used_at < now - ttl)


def _limit(namespace: str, max_bytes: int | None, ttl_s: float | None) -> Limit:
    return Limit(None if namespace == _STORE else namespace, max_bytes, ttl_s)

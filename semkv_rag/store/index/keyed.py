"""Rows put under their key, many in one statement, whether or not there is one with that key.

SQLite and PostgreSQL have the same SQL for this, but SQLAlchemy has a construct for each.
"""

from __future__ import annotations

from functools import cache

from sqlalchemy import Connection, Insert, Table
from sqlalchemy.dialects import postgresql, sqlite


def insert_new(connection: Connection, table: Table) -> Insert:
    """Inserts a row unless there is one with its key."""
    return _insert_new(connection.dialect.name, table)


def insert_over(connection: Connection, table: Table) -> Insert:
    """Inserts a row, or puts it in the place of the one with its key."""
    return _insert_over(connection.dialect.name, table)


@cache
def _insert_new(dialect: str, table: Table) -> Insert:
    return _insert(dialect, table).on_conflict_do_nothing(index_elements=list(table.primary_key))


@cache
def _insert_over(dialect: str, table: Table) -> Insert:
    made = _insert(dialect, table)
    others = {
        column.name: made.excluded[column.name] for column in table.c if not column.primary_key
    }
    return made.on_conflict_do_update(index_elements=list(table.primary_key), set_=others)


def _insert(dialect: str, table: Table) -> sqlite.Insert | postgresql.Insert:
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)

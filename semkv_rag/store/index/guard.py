"""Conditions under which a transaction must not be committed.

Reading whether a condition holds takes a round trip, and all other writers wait meanwhile (`index.send`).
So each condition is a statement that fails where it holds. The caller then reads what happened and begins
anew.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, insert, literal, null, select
from sqlalchemy.exc import IntegrityError

from semkv_rag.errors import StoreError
from semkv_rag.store.index.schema import removals
from semkv_rag.store.index.send import send


class Refused(StoreError):
    """A condition of `refuse` held; nothing was written."""


def refuse(connection: Connection, condition: ColumnElement[bool]) -> None:
    """Where the condition holds now, the transaction fails with `Refused`: as its next answer is read, or
    it is committed.
    """
    # A row that the table does not take.
    row = select(literal(""), null()).where(condition)
    send(connection, insert(removals).from_select(["key", "at"], row))


def is_refusal(error: BaseException) -> bool:
    """Whether a statement failed because of `refuse`."""
    return is_null_in(error, "removals", "at")


def is_null_in(error: BaseException, table: str, column: str) -> bool:
    """Whether a statement failed because it left a column empty that must not be."""
    if not isinstance(error, IntegrityError):
        return False
    if (told := getattr(error.orig, "diag", None)) is not None:  # PostgreSQL, in whatever language
        return (told.table_name, told.column_name) == (table, column)
    return str(error.orig) == f"NOT NULL constraint failed: {table}.{column}"

"""Statements whose answers nobody reads.

While a write transaction holds the lock, every other writer waits. Each answer that is read takes a round
trip, for which two processes must get their turn on a busy machine. So PostgreSQL gets these statements
together with the next one whose answer is read, or with the commit. Write transactions therefore read
last or not at all: a condition can be part of a statement. SQLite has no round trips.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Executable

UNREAD: Final = "semkv_unread"
"""The execution option of such a statement."""


def send(
    connection: Connection,
    statement: Executable,
    rows: Sequence[Mapping[str, Any]] | Mapping[str, Any] | None = None,
) -> None:
    """Execute a statement without its answer; what is wrong with it may be raised later.

    Args:
        rows: the statement's parameters; of several, it is executed for each.
    """
    connection.execute(statement, rows, execution_options={UNREAD: True})

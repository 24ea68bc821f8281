"""What PostgreSQL needs beside SQLAlchemy's defaults, so that no server can hold its clients for long.

A server that is frozen, or whose machine is gone, says nothing. Its own timeouts do not help then, nor
do TCP's while the system answers for the server. So the client counts how long it has heard nothing,
gives up, and throws the connection away, because nobody knows what state it is in.

In write transactions, statements whose answers nobody reads are kept here until one's answer is read or
until the commit, and all of them go to the server as one query. So the server needs no turn of the
client's between them, which on a busy machine takes longer than they do. (In psycopg's pipeline mode it
needs one: each statement is sent by itself.)
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import psycopg
import sqlalchemy
from psycopg.abc import PQGen
from sqlalchemy import Dialect, Engine, event
from sqlalchemy.engine import ExceptionContext, ExecutionContext
from sqlalchemy.pool import ConnectionPoolEntry

from semkv_rag.store.index.send import UNREAD

Answer = TypeVar("Answer")

_LOCK_SHARE = 0.75
"""The share of the patience that a statement may wait for a lock. The server gives up before the client
does, and the connection stays good."""

_PLAIN_INSERT = re.compile(
    r"(INSERT INTO [^()]+\([^()]+\) VALUES )(\(.*\))( ON CONFLICT \([^()]+\) DO [^()]+)?", re.DOTALL
)
"""Many rows of such are one statement, which takes the server a fraction of the time."""


class Silence(psycopg.OperationalError):
    """The server sent nothing for as long as the connection's patience; the connection is closed."""


class Connection(psycopg.Connection[Any]):
    """A connection that gives up when the server is silent, whatever it is asked.

    Attributes:
        patience_s: how long the server may be silent.
        unsent: statements that wait for the next one whose answer is read, or for the commit; None
            outside of `gathering`.
    """

    patience_s: float
    unsent: list[str] | None = None

    def run_gathered(self, cursor: psycopg.Cursor[Any]) -> None:
        """Run what is unsent; the cursor then has the answer of the last statement."""
        assert self.unsent
        together = ";\n".join(self.unsent).encode(self.info.encoding)
        self.unsent.clear()
        cursor.execute(together, prepare=False)
        while cursor.nextset():
            pass

    def commit(self) -> None:
        if self.unsent:
            self.unsent.append("COMMIT")
            self.run_gathered(self.cursor())
        super().commit()

    def rollback(self) -> None:
        if self.unsent:
            self.unsent.clear()
        super().rollback()

    def wait(self, gen: PQGen[Answer], *args: Any, **kwargs: Any) -> Answer:
        """What psycopg waits for all answers with.

        Raises:
            Silence: there was none in time.
        """
        try:
            return super().wait(_until_silence(gen, self.patience_s), *args, **kwargs)
        except Silence:
            self.close()
            raise


def bound(engine: Engine, patience_s: float) -> None:
    """Bound all waiting on connections of `engine`; what the user's URL says goes before that.

    Connecting may take `patience_s` (`connect_timeout` of the URL), a silence likewise, and waiting for
    another session's lock somewhat less (`lock_timeout` in the URL's `options`, or the role's). A
    silence raises TimeoutError.
    """

    def connect(
        _dialect: Dialect, _entry: ConnectionPoolEntry, args: list[Any], options: dict[str, Any]
    ) -> Connection:
        if "PGCONNECT_TIMEOUT" not in os.environ:
            options.setdefault("connect_timeout", round(patience_s))
        made = Connection.connect(*args, **options)
        made.patience_s = patience_s
        made.autocommit = True
        made.execute(
            "SELECT set_config('lock_timeout', %s, false) WHERE current_setting('lock_timeout') = '0'",
            [f"{patience_s * _LOCK_SHARE * 1000:.0f}ms"],
        )
        made.autocommit = False
        return made

    event.listen(engine, "do_connect", connect)
    event.listen(engine, "handle_error", _give_up)
    event.listen(engine, "do_execute", partial(_execute, False))
    event.listen(engine, "do_executemany", partial(_execute, True))


@contextmanager
def gathering(connection: sqlalchemy.Connection) -> Iterator[None]:
    """A transaction whose statements go to the server when one's answer is read (`index.send`)."""
    made = connection.connection.driver_connection
    assert isinstance(made, Connection)
    made.unsent = []
    try:
        yield
    finally:
        made.unsent = None


def _execute(
    many: bool, cursor: Any, statement: str, parameters: Any, context: ExecutionContext | None
) -> bool:
    """Execute or keep a statement of a gathering transaction; False: the driver may execute it."""
    made = cursor.connection
    if not isinstance(made, Connection) or made.unsent is None:
        return False
    write_out = psycopg.ClientCursor(made).mogrify
    if context is not None and context.execution_options.get(UNREAD):
        rows = parameters if many else [parameters]
        if (plain := _PLAIN_INSERT.fullmatch(statement)) is not None:
            values = ", ".join(write_out(plain[2], row) for row in rows)
            made.unsent.append(plain[1] + values + (plain[3] or ""))
        else:
            made.unsent += [write_out(statement, row) for row in rows]
        return True
    if not made.unsent:
        return False
    if many:  # the driver counts the rows of all
        made.run_gathered(made.cursor())
        return False
    made.unsent.append(write_out(statement, parameters))
    made.run_gathered(cursor)
    return True


def _give_up(context: ExceptionContext) -> None:
    """No driver's error, for which SQLAlchemy would connect anew and wait once more."""
    if isinstance(context.original_exception, Silence):
        raise TimeoutError(str(context.original_exception))


def _until_silence(gen: PQGen[Answer], patience_s: float) -> Generator[Any, Any, Answer]:
    """`gen`, which psycopg resumes when something came and, with a false value, ten times a second."""
    try:
        wanted = next(gen)
        heard = time.monotonic()
        while True:
            ready = yield wanted
            now = time.monotonic()
            if ready:
                heard = now
            elif now - heard > patience_s:
                raise Silence(f"the database server was silent for {patience_s:g} s")
            wanted = gen.send(ready)
    except StopIteration as end:
        answer: Answer = end.value
        return answer

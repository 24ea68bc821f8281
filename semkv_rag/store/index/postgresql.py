"""What PostgreSQL needs beside SQLAlchemy's defaults, so that no server can hold its clients for long.

A server that is frozen, or whose machine is gone, says nothing. Its own timeouts do not help then, nor
do TCP's while the system answers for the server. So the client counts how long it has heard nothing,
gives up, and throws the connection away, because nobody knows what state it is in.

In write transactions, statements whose answers nobody reads are kept here until one's answer is read or
until the commit, and all of them go to the server at once (psycopg's pipeline mode).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
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
"""Of the patience, what a statement may wait for a lock: the server then says so before the client
gives up, and the connection stays good."""


class Silence(psycopg.OperationalError):
    """The server sent nothing for as long as the connection's patience; the connection is closed."""


class Connection(psycopg.Connection[Any]):
    """A connection that gives up when the server is silent, whatever it is asked.

    Attributes:
        patience_s: how long the server may be silent.
        pipeline_used: that of `pipelined`; None outside of it.
        unsent: each sends a statement; called before a statement whose answer is read, and before the
            commit.
    """

    patience_s: float
    pipeline_used: psycopg.Pipeline | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.unsent: list[Callable[[], object]] = []

    def send(self) -> None:
        """Send what is unsent; no answer is waited for."""
        unsent, self.unsent = self.unsent, []
        for one in unsent:
            one()

    def commit(self) -> None:
        self.send()
        super().commit()

    def rollback(self) -> None:
        self.unsent.clear()
        if self.pipeline_used is not None:
            # What came behind a failed statement was aborted. That it failed is what the caller reads.
            with suppress(psycopg.Error):
                self.pipeline_used.sync()
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
def pipelined(connection: sqlalchemy.Connection) -> Iterator[None]:
    """A transaction whose statements go to the server when one's answer is read (`index.send`).

    With a libpq older than 14 each goes by itself.
    """
    made = connection.connection.driver_connection
    if not isinstance(made, Connection) or not psycopg.capabilities.has_pipeline():
        yield
        return
    with made.pipeline() as made.pipeline_used:
        try:
            yield
        finally:
            made.pipeline_used = None


def _execute(
    many: bool, cursor: Any, statement: str, parameters: Any, context: ExecutionContext | None
) -> bool:
    """Execute a statement of a pipelined transaction; False: it is of another one."""
    made = cursor.connection
    if not isinstance(made, Connection) or made.pipeline_used is None:
        return False
    if context is not None and context.execution_options.get(UNREAD):
        # With a cursor of its own: this one is closed before.
        run = psycopg.Cursor.executemany if many else psycopg.Cursor.execute
        made.unsent.append(lambda: run(made.cursor(), statement, parameters))
        return True
    made.send()
    run_now = cursor.executemany if many else cursor.execute
    run_now(statement, parameters)
    made.pipeline_used.sync()
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

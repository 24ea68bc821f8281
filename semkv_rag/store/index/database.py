"""Connections to the index: opening it, migrating it, and transactions.

Used for every read and write of the store. Reads take about 0.1 ms with SQLite. Writers are
serialised: by BEGIN IMMEDIATE in SQLite, and everywhere by a lock on the feed's one row, which makes
the order of the changes that of their commits.

Requests wait for what they read here, so a read gives up after `READ_S`, and while the database does
not answer those that follow are refused at once (`Rest`). Reads have connections of their own: they
do not wait for writers of the same process either.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Final, TypeVar

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    create_engine,
    event,
    inspect,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import DisconnectionError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection

from semkv_rag.errors import MissingExtraError, StoreError, StoreVersionError
from semkv_rag.store.files.beneath import NotAFileError, open_file
from semkv_rag.store.index import feed, guard, schema, sqlite
from semkv_rag.store.index.reserve import Reserve
from semkv_rag.store.index.rest import Rest
from semkv_rag.store.index.send import send

Result = TypeVar("Result")

FREED: Final = 64
"""What is removed in one transaction: see `reserve.RESERVE_BYTES`."""

READ_S = 2.0
"""What a read waits at most: for a connection, for an answer, for another's lock."""

WRITE_S = 30.0
"""What a write waits at most, likewise. SQLite's writers wait for each other `sqlite.BUSY_TIMEOUT_S`."""

_FAILURES = (SQLAlchemyError, sqlite3.Error, OSError)
_MIGRATION_LOCK = 0x73656D6B76  # an advisory lock's number must only be the same for all of us


class Database:
    """The index behind a URL.

    Attributes:
        read_only: nothing is created or written.

    Args:
        url: a SQLAlchemy URL. For SQLite: of a file, in a folder that is there.
        read_only: see above.

    Raises:
        StoreError: it cannot be opened; read-only, also when it is not there or not up to date.
        StoreVersionError: a newer version wrote it.
        MissingExtraError: PostgreSQL's driver is not installed.
    """

    def __init__(self, url: str | URL, *, read_only: bool) -> None:
        self.read_only = read_only
        self._closed = False
        self._file: Path | None = None
        self._reserve: Reserve | None = None
        with self._errors("opened"):
            parsed = make_url(url)
            self._file = sqlite.database_file(parsed)
            if self._file is not None:
                quick = sqlite.engine(self._file, read_only=read_only, busy_s=READ_S)
                patient = sqlite.engine(self._file, read_only=read_only)
            else:
                quick, patient = _server_engine(parsed, READ_S), _server_engine(parsed, WRITE_S)
        self._engines = (quick, patient)
        for engine in self._engines:
            event.listen(engine, "connect", _remember_process)
            event.listen(engine, "checkout", _check_process)
        self._rest = Rest(READ_S)
        self._reader, self._scanner = _reader(quick), _reader(patient)
        self._writer = patient.execution_options(semkv_write="durable")
        self._lazy_writer = patient.execution_options(semkv_write="lazy")
        if self._file is not None and not read_only:
            self._reserve = Reserve(self._file)
        try:
            self._on_full_disk(self._open)
        except BaseException:
            self.close()
            raise
        self.keep_reserve()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that only reads, and sees one state of the index."""
        with (
            self._errors("read"),
            self._rest.asking(*_FAILURES),
            self._reader.connect() as connection,
        ):
            yield connection

    @contextmanager
    def scanning(self) -> Iterator[Connection]:
        """`reading` with a write's patience: for people, and for runs that no request waits for."""
        with self._errors("read"), self._scanner.connect() as connection:
            yield connection

    @contextmanager
    def writing(self, *, durable: bool = True, late: bool = False) -> Iterator[Connection]:
        """A transaction that writes, one at a time among all processes; keep it short.

        Args:
            durable: it is on disk when this returns (SQLite; others do as they are set up). False is
                for what may be lost in a power cut, or where others write for long: it does not wait
                for them as the others do.
            late: the lock is taken with the first answer that is read, or with the commit. For what is
                decided by nothing but such answers: not by files, nor by what was read before.
        """
        self.require_writing()
        writer = self._writer if durable else self._lazy_writer
        with self._errors("written"):
            if not durable:  # a request waits for it
                self._rest.check()
            with writer.connect() as connection, _gathering(connection), connection.begin():
                lock = select(schema.feed.c.last).with_for_update()
                if late:
                    send(connection, lock)
                else:
                    connection.execute(lock)
                yield connection

    def freeing(self, operation: Callable[[Connection], Result], *, late: bool = False) -> Result:
        """What `operation` returns in a write transaction that takes rows away; also on a full disk.

        Args:
            operation: called again when it failed for want of disk space. Of at most `FREED` chunks,
                so that the reserve is enough.
            late: as of `writing`.
        """

        def transaction() -> Result:
            with self.writing(late=late) as connection:
                return operation(connection)

        return self._on_full_disk(transaction)

    def keep_reserve(self) -> None:
        """Make sure that what `freeing` needs is there, if there is room now."""
        if self._reserve is not None:
            self._reserve.make()

    def require_writing(self) -> None:
        """Raise StoreError when this only reads."""
        if self.read_only:
            raise StoreError("the store is open for reading only")

    def create(self) -> None:
        """Make the index or bring it up to date; safe when several processes do so at once."""
        self.require_writing()
        with self._errors("created"), self._creation_lock():
            if self._file is not None:
                sqlite.create(self._file)
            with self._writer.begin() as connection:
                if connection.dialect.name == "postgresql":
                    connection.execute(
                        text("SELECT pg_advisory_xact_lock(:n)"), {"n": _MIGRATION_LOCK}
                    )
                _migrate(connection)

    def close(self) -> None:
        """Close the connections; what is asked afterwards raises StoreError."""
        self._closed = True
        for engine in self._engines:
            engine.dispose()

    def _open(self) -> None:
        if self.read_only or (self._file is None or self._file.exists()):
            with self.scanning() as connection:
                revision = _revision(connection)
            if revision == schema.REVISION:
                return
            if self.read_only:
                known = revision is None or revision < schema.REVISION
                raise (StoreError if known else StoreVersionError)(
                    f"the index is at revision {revision or 'none'} and this version reads"
                    f" {schema.REVISION}: " + ("open it for writing once" if known else "upgrade")
                )
        self.create()

    def _on_full_disk(self, operation: Callable[[], Result]) -> Result:
        try:
            return operation()
        except StoreError:
            if self._reserve is None or not self._reserve.is_needed() or not self._reserve.drop():
                raise
        assert self._file is not None
        sqlite.empty_log(self._file)
        try:
            return operation()
        finally:
            self.keep_reserve()

    def _creation_lock(self) -> AbstractContextManager[None]:
        return nullcontext() if self._file is None else _file_lock(self._file)

    @contextmanager
    def _errors(self, verb: str) -> Iterator[None]:
        if self._closed:
            raise StoreError("the store is closed")
        try:
            yield
        except _FAILURES as error:
            if guard.is_refusal(error):
                raise guard.Refused("others came first") from error
            if isinstance(error, NotAFileError):
                reason = f"its lock file {error.strerror}"
            elif self._file is not None and not self._file.exists():
                reason = f"{self._file.name} is gone; semkv verify --repair makes it from the files"
            elif feed.is_lost(error):
                reason = feed.LOST
            else:
                reason = str(getattr(error, "orig", None) or error)
            raise StoreError(f"the index cannot be {verb}: {reason}") from error


def _server_engine(url: URL, patience_s: float) -> Engine:
    try:
        made = create_engine(url, pool_pre_ping=True, pool_timeout=patience_s)
    except ModuleNotFoundError as error:
        if url.drivername in ("postgresql", "postgresql+psycopg"):
            raise MissingExtraError("psycopg", "postgresql") from error
        raise StoreError(f"the index needs the database driver {error.name}") from error
    if made.driver == "psycopg":
        # Imported here: the driver is an extra.
        from semkv_rag.store.index import postgresql

        postgresql.bound(made, patience_s)
    return made


def _gathering(connection: Connection) -> AbstractContextManager[None]:
    if connection.dialect.driver != "psycopg":
        return nullcontext()
    from semkv_rag.store.index import postgresql

    return postgresql.gathering(connection)


def _reader(engine: Engine) -> Engine:
    """`engine` for reads of several statements that see one state, as they do in SQLite."""
    if engine.dialect.name == "postgresql":
        return engine.execution_options(isolation_level="REPEATABLE READ")
    return engine


def _revision(connection: Connection) -> str | None:
    """The migration that the index is at, or None when it has no tables."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def _migrate(connection: Connection) -> None:
    """Run the migrations that are missing, in the connection's transaction."""
    revision = _revision(connection)
    if revision == schema.REVISION:
        return
    # Imported here: most opens find nothing to migrate, and Alembic is slow to import.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    folder = Path(__file__).parents[1] / "migrations"
    config = Config()
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if revision is not None and revision not in known:
        raise StoreVersionError(
            f"the index is at revision {revision}, written by a newer version of semkv-rag: this one"
            f" knows up to {schema.REVISION}"
        )
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


@contextmanager
def _file_lock(database: Path) -> Iterator[None]:
    handle = open_file(database.with_name(database.name + ".lock"), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remember_process(_connection: object, entry: ConnectionPoolEntry) -> None:
    entry.info["process"] = os.getpid()


def _check_process(
    _connection: object, entry: ConnectionPoolEntry, proxy: PoolProxiedConnection
) -> None:
    """A connection that came over a fork is the parent's: leave it and make another."""
    if entry.info["process"] != os.getpid():
        entry.dbapi_connection = proxy.dbapi_connection = None  # type: ignore[misc]
        raise DisconnectionError("the connection belongs to another process")

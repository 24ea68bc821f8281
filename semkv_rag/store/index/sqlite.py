"""What SQLite needs beside SQLAlchemy's defaults to be shared by processes that read and write.

* Write-ahead log: readers never wait. Writers take BEGIN IMMEDIATE, so that none fails half way.
* A connection never creates the file. When somebody deletes it, reads and writes say so.
* A deleted or replaced file is noticed at the next transaction: an open connection would go on in
  the file that has no name any more.
* What stands in the place of the database and of SQLite's own files is looked at before SQLite does:
  it would follow a link to any database, wait for a pipe, and delete any file that a journal names.
* Reading on a folder that cannot be written works, with or without the log's files beside it.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool

from semkv_rag.errors import StoreError
from semkv_rag.store.files.beneath import open_file

BUSY_TIMEOUT_S = 60.0
"""How long a writer waits for its turn."""

LAZY_S = 1.0
"""And one whose writing may be lost: a request may wait for it."""

_JOURNAL_MAGIC: Final = bytes.fromhex("d9d505f920a163d7")
"""The last bytes of a journal that names a super-journal."""

_SYNCHRONOUS = {"durable": "FULL", "lazy": "NORMAL"}


class _Connection(sqlite3.Connection):
    """A connection that knows which file it opened."""

    file: tuple[int, ...] | None = None
    immutable = False


def database_file(url: URL) -> Path | None:
    """The file of a SQLite URL; None for other databases.

    Raises:
        StoreError: SQLite in memory, which no other process could see.
    """
    if url.get_backend_name() != "sqlite":
        return None
    if url.database in (None, "", ":memory:"):
        raise StoreError("the index cannot be SQLite in memory: other processes must see it")
    return Path(url.database).absolute()


def engine(file: Path, *, read_only: bool, busy_s: float = BUSY_TIMEOUT_S) -> Engine:
    """An engine on `file`, which must be there when it is first used.

    Args:
        busy_s: how long it waits for another's lock, and for a connection.
    """
    made = create_engine(
        "sqlite+pysqlite://",
        creator=lambda: _connect(file, read_only=read_only, busy_s=busy_s),
        poolclass=QueuePool,
        pool_timeout=busy_s,
    )

    def check_file(connection: _Connection, _entry: ConnectionPoolEntry, _proxy: object) -> None:
        if _identity(file, connection.immutable) != connection.file:
            raise DisconnectionError("the index file was replaced")

    event.listen(made, "checkout", check_file)
    event.listen(made, "begin", partial(_begin, busy_s))
    return made


def create(file: Path) -> None:
    """Make an empty database in WAL mode when there is none. The caller holds the creation lock."""
    require_file(file)
    if not file.exists():
        # A log that was left beside a deleted database would be taken for the new one's.
        for suffix in ("-wal", "-shm"):
            file.with_name(file.name + suffix).unlink(missing_ok=True)
    with closing(sqlite3.connect(file, timeout=BUSY_TIMEOUT_S)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")


def empty_log(file: Path) -> None:
    """Give the space of the write-ahead log back, when nobody reads from it now."""
    with (
        suppress(sqlite3.Error),
        closing(_open(file, "mode=rw", 1.0, immutable=False)) as connection,
    ):
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def require_file(file: Path) -> None:
    """Look at what stands in the place of a database and of SQLite's own files, before it does.

    Raises:
        StoreError: a link, a pipe or the like; or a journal that has SQLite delete another file.
    """
    for suffix in ("", "-wal", "-shm", "-journal"):
        path = file.with_name(file.name + suffix)
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(path.lstat().st_mode):
                raise StoreError(f"{path} is a symbolic link or no file: remove it")
    # A transaction over several databases leaves one: SQLite then deletes the file that it names. Ours
    # are over one, and but for the making of a database they have no journal at all.
    path = file.with_name(file.name + "-journal")
    with suppress(FileNotFoundError), os.fdopen(open_file(path), "rb") as journal:
        journal.seek(max(0, os.fstat(journal.fileno()).st_size - len(_JOURNAL_MAGIC)))
        if journal.read() == _JOURNAL_MAGIC:
            raise StoreError(f"{path} names another file, and is none of this store's: remove it")


def _connect(file: Path, *, read_only: bool, busy_s: float) -> _Connection:
    if not read_only:
        return _open(file, "mode=rw", busy_s, immutable=False)
    connection = _open(file, "mode=ro", busy_s, immutable=False)
    try:
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 1")
    except sqlite3.OperationalError:
        connection.close()
        # The log needs files that cannot be made in a folder that cannot be written. Where nobody can
        # write, the database stands still, unless the folder is writable elsewhere: see `_identity`.
        if os.access(file.parent, os.W_OK):
            raise
        connection = _open(file, "immutable=1", busy_s, immutable=True)
    return connection


def _open(file: Path, options: str, busy_s: float, *, immutable: bool) -> _Connection:
    require_file(file)
    connection = sqlite3.connect(
        f"file:{quote(str(file))}?{options}",
        uri=True,
        timeout=busy_s,
        isolation_level=None,  # transactions are begun below
        check_same_thread=False,  # the pool hands a connection to one thread at a time
        factory=_Connection,
    )
    connection.execute("PRAGMA foreign_keys=ON")
    connection.immutable = immutable
    connection.file = _identity(file, immutable)
    return connection


def _identity(file: Path, immutable: bool) -> tuple[int, ...] | None:
    """What must stay the same for a connection to be used again.

    SQLite does not look whether an immutable file changed, so its size and time count there.
    """
    try:
        stat = os.stat(file)  # noqa: PTH116 - asked before every transaction: the plain call
    except OSError:
        return None
    found = (stat.st_dev, stat.st_ino)
    return (*found, stat.st_size, stat.st_mtime_ns) if immutable else found


def _begin(busy_s: float, connection: Connection) -> None:
    write: Any = connection.get_execution_options().get("semkv_write")
    if write is None:
        connection.exec_driver_sql("BEGIN")
        return
    connection.exec_driver_sql(f"PRAGMA synchronous={_SYNCHRONOUS[write]}")
    if write == "durable":
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        return
    _wait_at_most(min(busy_s, LAZY_S), connection)
    try:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    finally:
        _wait_at_most(busy_s, connection)


def _wait_at_most(busy_s: float, connection: Connection) -> None:
    connection.exec_driver_sql(f"PRAGMA busy_timeout={round(busy_s * 1000)}")

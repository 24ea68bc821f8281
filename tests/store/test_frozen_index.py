"""An index that is frozen, locked, gone, or never answers: a request waits seconds for it, and once."""

from __future__ import annotations

import socket
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import text

from semkv_rag.errors import StoreError
from semkv_rag.store import KVStore
from semkv_rag.store.index import database, rest, sqlite
from semkv_rag.store.index.database import READ_S, Database
from semkv_rag.store.records import Changes, Pin
from tests.store import made
from workbench.postgres import PostgresServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

BUDGET_S = 2 * READ_S + 1
"""What a read may take at most here: its bound, and a slow machine."""

AT_ONCE_S = READ_S / 2


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgresServer]:
    with PostgresServer() as started:
        yield started


@pytest.fixture
def url(postgresql: PostgresServer) -> Iterator[str]:
    with postgresql.schema() as made_url:
        yield made_url


@pytest.fixture
def store(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[KVStore]:
    """One that gives up writing as soon as reading, and asks a silent database again after a second."""
    monkeypatch.setattr(database, "WRITE_S", READ_S)
    monkeypatch.setattr(rest, "REST_S", 1.0)
    with KVStore(tmp_path / "store", index_url=url) as opened:
        made.put(opened, 1)
        read(opened)  # both of its connections are there
        yield opened


@contextmanager
def fails(within_s: float, match: str) -> Iterator[None]:
    began = time.monotonic()
    with pytest.raises(StoreError, match=match):
        yield
    assert time.monotonic() - began < within_s


def read(store: KVStore) -> Changes:
    """What a request asks first."""
    return store.changes(made.MODEL, 0)


def write(store: KVStore) -> None:
    store.lifecycle.pin(Pin(namespace="default"))


def works_again(store: KVStore) -> None:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            read(store)
            return
        except StoreError:
            time.sleep(0.1)
    read(store)


def test_a_frozen_server_is_waited_for_once(store: KVStore, postgresql: PostgresServer) -> None:
    with postgresql.frozen():
        with fails(BUDGET_S, "cannot be read: the database server was silent"):
            read(store)
        for _ in range(20):
            with fails(AT_ONCE_S, "cannot be read: the database did not answer"):
                read(store)
        with fails(AT_ONCE_S, "cannot be written: the database did not answer"):
            store.touch([])
    works_again(store)
    made.put(store, 2)
    assert len(read(store).entries) == 2


def test_while_one_asks_again_the_others_do_not_wait(
    store: KVStore, postgresql: PostgresServer
) -> None:
    def fail() -> None:
        with fails(BUDGET_S, "silent|connection timeout"):
            read(store)

    with postgresql.frozen(), ThreadPoolExecutor() as others:
        fail()
        time.sleep(1.1)
        asking = others.submit(fail)
        time.sleep(0.2)
        with fails(AT_ONCE_S, "did not answer"):
            read(store)
        assert not asking.done()
        asking.result()


def test_a_server_that_freezes_in_a_transaction(url: str, postgresql: PostgresServer) -> None:
    index = Database(url, read_only=False)
    with (
        fails(BUDGET_S, "silent"),
        index.reading() as connection,
        postgresql.frozen(),
    ):
        connection.execute(text("SELECT 1"))
    index.close()


def test_who_is_patient_waits_until_the_server_goes_on(
    tmp_path: Path, url: str, postgresql: PostgresServer
) -> None:
    """Runs for a corpus or a study, and whoever lists, limits or writes: no request waits for them."""
    with KVStore(tmp_path / "store", index_url=url) as store, ThreadPoolExecutor() as others:
        id_ = made.put(store, 1)
        with postgresql.frozen():
            with fails(BUDGET_S, "silent|connection timeout"):
                read(store)  # a request's, after which the server is left alone
            asking = [
                others.submit(store.get, made.MODEL, "default", [id_], patient=True),
                others.submit(store.tokens, made.MODEL, "default", [id_], patient=True),
                others.submit(store.sources),
                others.submit(store.lifecycle.room, "default"),
                others.submit(write, store),
            ]
            time.sleep(READ_S + 1)
            assert not any(one.done() for one in asking)
        found, tokens, sources, room, _ = (one.result(10) for one in asking)
        assert (list(found), list(tokens), sources, room) == ([id_], [id_], [], None)


def test_a_frozen_server_fails_a_write(store: KVStore, postgresql: PostgresServer) -> None:
    with postgresql.frozen(), fails(BUDGET_S, "cannot be written: the database server was silent"):
        write(store)
    write(store)


def test_opening_a_store_on_a_frozen_server(
    store: KVStore, postgresql: PostgresServer, tmp_path: Path
) -> None:
    with postgresql.frozen(), fails(BUDGET_S, "cannot be read: .*timeout"):
        KVStore(tmp_path / "store", index_url=store.index_url)


def test_a_server_that_accepts_and_never_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "WRITE_S", READ_S)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with fails(BUDGET_S, "timeout"):
            KVStore(tmp_path, index_url=f"postgresql+psycopg://me@127.0.0.1:{port}/x")
    with fails(AT_ONCE_S, "refused"):
        KVStore(tmp_path, index_url=f"postgresql+psycopg://me@127.0.0.1:{port}/x")


def test_a_server_that_was_killed_and_started_again(
    store: KVStore, postgresql: PostgresServer
) -> None:
    postgresql.kill()
    try:
        with fails(AT_ONCE_S, "cannot be read"):
            read(store)
    finally:
        postgresql.start()
    # Who was refused at once asks again at once.
    assert len(read(store).entries) == 1
    made.put(store, 2)


def test_connections_that_the_server_ended_are_made_anew(
    store: KVStore, postgresql: PostgresServer
) -> None:
    with postgresql.connect() as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        )
    assert len(read(store).entries) == 1
    made.put(store, 2)


def test_a_lock_on_all_that_another_session_holds(
    store: KVStore, postgresql: PostgresServer
) -> None:
    with postgresql.connect() as other:
        other.execute("SET search_path = " + store.index_url.rpartition("%3D")[2])
        with other.transaction():
            other.execute("LOCK TABLE feed IN ACCESS EXCLUSIVE MODE")
            with fails(BUDGET_S, "cannot be read: .*lock timeout"):
                read(store)
            with fails(AT_ONCE_S, "cannot be read: the database did not answer"):
                read(store)
    works_again(store)


def test_a_writer_that_holds_its_turn_stops_writers_only(
    store: KVStore, postgresql: PostgresServer
) -> None:
    with postgresql.connect() as other:
        other.execute("SET search_path = " + store.index_url.rpartition("%3D")[2])
        with other.transaction():
            other.execute("SELECT last FROM feed FOR UPDATE")
            with fails(BUDGET_S, "cannot be written: .*lock timeout"):
                write(store)
            assert read(store)


@contextmanager
def turn_taken(store: KVStore) -> Iterator[None]:
    """Another writer has its turn and does not end."""
    other = Database(store.index_url, read_only=False)
    with other.writing():
        yield
    other.close()


def test_writers_that_wait_do_not_stop_readers(tmp_path: Path, index_url: str | None) -> None:
    """More of them in one process than a pool has connections."""
    with KVStore(tmp_path / "store", index_url=index_url) as store:
        read(store)
        with ThreadPoolExecutor(20) as others, turn_taken(store):
            waiting = [others.submit(write, store) for _ in range(20)]
            time.sleep(0.3)
            began = time.monotonic()
            assert read(store)
            assert time.monotonic() - began < AT_ONCE_S
        for writer in waiting:
            writer.result()


def test_an_engine_that_starts_again_waits_for_no_writer(
    tmp_path: Path, index_url: str | None
) -> None:
    """It says what its model is, which is known."""
    with KVStore(tmp_path / "store", index_url=index_url) as store:
        store.add_model("m", {"name": "a"})
        store.add_model("m", {"name": "b"})
        with turn_taken(store):
            began = time.monotonic()
            store.add_model("m", {"name": "b"})
            assert time.monotonic() - began < AT_ONCE_S
        assert [dict(one.description) for one in store.models()] == [{"name": "b"}]


def test_a_long_answer_is_no_silence(url: str) -> None:
    index = Database(url, read_only=False)
    statement = text("SELECT pg_sleep(:s), repeat('x', 100000) FROM generate_series(1, 8)")
    with index.reading() as connection:
        began = time.monotonic()
        assert len(connection.execute(statement, {"s": READ_S / 6}).all()) == 8
        assert time.monotonic() - began > READ_S
    index.close()


def test_what_the_url_says_goes_before_our_bounds(postgresql: PostgresServer) -> None:
    with postgresql.schema() as url:
        asked = url.replace("options=", "connect_timeout=17&options=-clock_timeout%3D123+")
        for index, wanted in (
            (Database(url, read_only=False), ("2", "1500ms")),
            (Database(asked, read_only=False), ("17", "123ms")),
        ):
            with index.reading() as connection:
                driver = connection.connection.driver_connection
                assert driver is not None
                timeout = driver.info.get_parameters()["connect_timeout"]
                locks = connection.execute(text("SHOW lock_timeout")).scalar()
            assert (timeout, locks) == wanted
            index.close()


@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
def test_a_file_that_another_program_has_for_itself(
    tmp_path: Path, journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers do not wait at all with the log that the store sets up, and not for long without."""
    monkeypatch.setattr(rest, "REST_S", 1.0)
    with KVStore(tmp_path) as store:
        made.put(store, 1)
    with closing(sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)) as other:
        assert other.execute(f"PRAGMA journal_mode={journal}").fetchone() == (journal.lower(),)
        with KVStore(tmp_path) as store:
            other.execute("BEGIN EXCLUSIVE")
            if journal == "DELETE":
                with fails(BUDGET_S, "cannot be read: database is locked"):
                    read(store)
                with fails(AT_ONCE_S, "cannot be read: the database did not answer"):
                    read(store)
            else:
                began = time.monotonic()
                assert read(store)
                assert time.monotonic() - began < AT_ONCE_S
            other.execute("COMMIT")
            works_again(store)


def test_what_may_be_lost_does_not_wait_long_for_another_writer(tmp_path: Path) -> None:
    """A request waits for it; what must not be lost waits for its turn."""
    with KVStore(tmp_path) as store, ThreadPoolExecutor(1) as thread:
        id_ = made.put(store, 1)
        with closing(sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with fails(sqlite.LAZY_S + BUDGET_S, "database is locked"):
                store.prompts.count_sighting(made.MODEL, "default", "key")
            removing = thread.submit(store.remove, made.MODEL, "default", [id_])
            time.sleep(2 * sqlite.LAZY_S)
            assert not removing.done()
            other.execute("COMMIT")
        removing.result(30)
        assert not store.get(made.MODEL, "default", [id_])
        assert store.prompts.count_sighting(made.MODEL, "default", "key") == 1

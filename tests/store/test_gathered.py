"""Write transactions on PostgreSQL: when they take the writers' lock, and what goes wrong in them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import insert, select, text, update

from semkv_rag.errors import StoreError
from semkv_rag.store.index import schema
from semkv_rag.store.index.database import Database
from semkv_rag.store.index.keyed import insert_new, insert_over
from semkv_rag.store.index.send import send
from workbench import postgres

pytestmark = pytest.mark.slow

MODEL = {"fingerprint": "m", "description": "{}", "created_at": 1.0}


@pytest.fixture
def url() -> Iterator[str]:
    with postgres.shared().schema() as made:
        yield made


@pytest.fixture
def index(url: str) -> Iterator[Database]:
    opened = Database(url, read_only=False)
    yield opened
    opened.close()


def is_locked(index: Database) -> bool:
    with index.scanning() as other:
        skipping = text("SELECT last FROM feed FOR UPDATE SKIP LOCKED")
        return other.execute(skipping).first() is None


def models(index: Database) -> list[str]:
    with index.reading() as connection:
        return list(connection.scalars(select(schema.models.c.fingerprint)))


def test_the_lock_is_taken_at_once(index: Database) -> None:
    with index.writing():
        assert is_locked(index)
    assert not is_locked(index)


def test_a_late_transaction_takes_it_with_the_first_answer(index: Database) -> None:
    with index.writing(late=True) as connection:
        send(connection, insert(schema.models), MODEL)
        time.sleep(0.1)
        assert not is_locked(index)
        assert connection.scalars(select(schema.models.c.fingerprint)).all() == ["m"]
        assert is_locked(index)
        assert models(index) == []
    assert models(index) == ["m"]
    assert not is_locked(index)


def test_a_late_transaction_that_reads_nothing_is_committed_whole(index: Database) -> None:
    with index.writing(late=True) as connection:
        send(connection, insert(schema.models), [MODEL, MODEL | {"fingerprint": "n"}])
        assert not is_locked(index)
    assert models(index) == ["m", "n"]


def test_rows_that_are_there_already(index: Database) -> None:
    """Many in one statement: what is there stays, or gives way."""
    with index.writing(late=True) as connection:
        send(connection, insert(schema.models), MODEL)
        news = [MODEL | {"description": "(new)"}, MODEL | {"fingerprint": "n"}]
        send(connection, insert_new(connection, schema.models), news)
    with index.reading() as connection:
        rows = dict(
            connection.execute(select(*schema.models.c["fingerprint", "description"])).all()
        )
    assert rows == {"m": "{}", "n": "{}"}
    with index.writing(late=True) as connection:
        send(connection, insert_over(connection, schema.models), news)
    with index.reading() as connection:
        rows = dict(
            connection.execute(select(*schema.models.c["fingerprint", "description"])).all()
        )
    assert rows == {"m": "(new)", "n": "{}"}


def test_one_that_its_caller_gives_up_leaves_nothing(index: Database) -> None:
    def give_up() -> None:
        with index.writing(late=True) as connection:
            send(connection, insert(schema.models), MODEL)
            raise KeyError

    with pytest.raises(KeyError):
        give_up()
    assert models(index) == []
    with index.writing(late=True) as connection:
        send(connection, insert(schema.models), MODEL | {"fingerprint": "n"})
    assert models(index) == ["n"]


@pytest.mark.parametrize("read", [False, True])
def test_a_statement_that_fails_says_why(index: Database, read: bool) -> None:
    def fail() -> None:
        with index.writing(late=True) as connection:
            send(connection, insert(schema.models), MODEL | {"description": None})
            for number in range(20):  # all of these are aborted
                send(connection, insert(schema.models), MODEL | {"fingerprint": f"{number}"})
            if read:
                connection.execute(select(schema.models.c.fingerprint))

    with pytest.raises(StoreError, match="cannot be written: null value in column"):
        fail()
    assert models(index) == []
    with index.writing() as connection:
        send(connection, insert(schema.models), MODEL)
    assert models(index) == ["m"]


def test_values_are_what_was_given(index: Database) -> None:
    """They are written into the query, not sent beside it."""
    odd = "it's 100 % 'so' \\ -- ; %s %(x)s :x \u00e9"
    with index.writing(late=True) as connection:
        send(connection, insert(schema.models), MODEL | {"description": odd, "created_at": 0.1})
    with index.reading() as connection:
        found = connection.execute(select(schema.models.c.description, schema.models.c.created_at))
        assert found.all() == [(odd, 0.1)]


def test_many_rows_behind_what_is_unsent(index: Database) -> None:
    with index.writing(late=True) as connection:
        send(connection, insert(schema.models), MODEL)
        rows = [MODEL | {"fingerprint": name} for name in ("n", "o")]
        connection.execute(insert(schema.models), rows)
        send(connection, insert(schema.models), MODEL | {"fingerprint": "p"})
        changed = update(schema.models).values(created_at=2.0)
        assert connection.execute(changed).rowcount == 4
    assert models(index) == ["m", "n", "o", "p"]


def test_the_server_is_sent_one_query(index: Database) -> None:
    """So it needs no turn of the client's while others wait for the lock."""
    with index.writing(late=True) as connection:
        sent = connection.connection.driver_connection
        assert isinstance(sent, psycopg.Connection)
        trace = sent.pgconn
        assert trace.transaction_status == psycopg.pq.TransactionStatus.IDLE
        send(connection, insert(schema.models), [MODEL, MODEL | {"fingerprint": "n"}])
        assert trace.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert trace.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert models(index) == ["m", "n"]

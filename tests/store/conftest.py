"""Stores on the index databases that can be had: SQLite, and PostgreSQL where a URL names one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

from semkv_rag.store import KVStore

POSTGRES_URL = os.environ.get("SEMKV_TEST_POSTGRES_URL")


@pytest.fixture(params=["sqlite", "postgresql"] if POSTGRES_URL else ["sqlite"])
def index_url(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """A fresh index: None for the SQLite file in the store, or a PostgreSQL schema of its own."""
    if request.param == "sqlite":
        yield None
        return
    assert POSTGRES_URL
    schema = f"semkv_{secrets.token_hex(8)}"
    engine = create_engine(POSTGRES_URL, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE SCHEMA {schema}"))
    url = make_url(POSTGRES_URL).update_query_dict({"options": f"-csearch_path={schema}"})
    yield url.render_as_string(hide_password=False)
    with engine.connect() as connection:
        connection.execute(text(f"DROP SCHEMA {schema} CASCADE"))
    engine.dispose()


@pytest.fixture
def store(tmp_path: Path, index_url: str | None) -> Iterator[KVStore]:
    with KVStore(tmp_path / "store", index_url=index_url) as opened:
        yield opened

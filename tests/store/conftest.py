"""Stores on both kinds of index database, SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from semkv_rag.store import KVStore
from tests.store.shared import Shared, environment, shared_store
from workbench import azure, postgres, s3


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def index_url(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """A fresh index: None for the SQLite file in the store, or a PostgreSQL schema of its own."""
    if request.param == "sqlite":
        yield None
        return
    with postgres.shared().schema() as url:
        yield url


@pytest.fixture
def store(tmp_path: Path, index_url: str | None) -> Iterator[KVStore]:
    with KVStore(tmp_path / "store", index_url=index_url) as opened:
        yield opened


@pytest.fixture(params=["s3", pytest.param("azure", marks=pytest.mark.soak)])
def shared(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Shared]:
    """A store whose files are in an object store and whose index is on PostgreSQL."""
    if request.param == "azure" and azure.program() is None:
        pytest.skip("Azurite could not be fetched: npm is missing, or fetches nothing")
    if request.param == "azure":
        variables, bucket = azure.shared().environment, f"az://{azure.shared().container()}"
    else:
        variables, bucket = environment(s3.shared().endpoint), f"s3://{s3.shared().bucket()}"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with shared_store(tmp_path, bucket) as opened:
        yield opened

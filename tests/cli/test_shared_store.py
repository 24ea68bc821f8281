"""The commands on a store whose files are in an object store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from semkv_rag.store import ChunkKey
from tests.cli.conftest import Semkv
from tests.store import made
from tests.store.shared import Shared, environment, shared_store
from workbench import s3

pytestmark = pytest.mark.slow  # an object store and a database serve these


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    """With one document, of two chunks."""
    for name, value in environment(s3.shared().endpoint).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SEMKV_CACHE_DIR", str(tmp_path / "cache"))
    with shared_store(tmp_path) as shared:
        with shared.open("writer") as store:
            headers = [made.header(seed) for seed in range(2)]
            for header in headers:
                store.write_chunk(header, made.layers(header))
            ids = [header.id for header in headers]
            store.add([ChunkKey(id_, made.MODEL, "default") for id_ in ids])
            store.put_source(made.MODEL, "default", "a document", "digest", ids)
        yield shared


def test_it_is_listed_checked_and_emptied(semkv: Semkv, shared: Shared) -> None:
    where = ("--store", shared.url, "--index-url", shared.index_url)
    assert "a document" in semkv("ls", *where).out
    told = semkv("info", *where, "--json")
    assert told.data["root"] == shared.url
    assert "semkv-test" not in told.out
    assert semkv("verify", *where).code == 0
    assert "the headers of 2 chunks are right" in semkv("doctor", *where, "--json").out
    assert semkv("rm", "a document", *where, "--yes").code == 0
    with shared.open("writer") as store:
        assert list(store.chunks()) == []
        assert list(store._contents.files.objects.list("chunks")) == []  # type: ignore[attr-defined]


def test_without_an_index_it_is_said_what_is_missing(semkv: Semkv, shared: Shared) -> None:
    outcome = semkv("ls", "--store", shared.url)
    assert outcome.code != 0
    assert "index_url" in outcome.err

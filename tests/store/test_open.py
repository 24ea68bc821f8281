"""Opening stores: new, old, newer, read-only, unreadable, and several at once."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine

from semkv_rag.errors import StoreError, StoreVersionError
from semkv_rag.store import KVStore
from semkv_rag.store.index import schema, sqlite
from tests.store import made


def execute(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "index.sqlite")) as connection, connection:
        connection.execute(statement)


def test_opened_again_it_is_the_same(tmp_path: Path) -> None:
    with KVStore(tmp_path / "deep" / "store") as store:
        id_ = made.put(store, 1)
    with KVStore(tmp_path / "deep" / "store") as store:
        assert store.get(made.MODEL, "default", [id_])
        assert not store.read_only


def test_the_migrations_make_the_tables_of_the_schema(store: KVStore) -> None:
    engine = create_engine(store.index_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, schema.metadata) == []
        assert context.get_current_revision() == schema.REVISION
    engine.dispose()


def test_a_newer_store_is_refused(tmp_path: Path) -> None:
    KVStore(tmp_path).close()
    execute(tmp_path, "UPDATE alembic_version SET version_num = '9999'")
    for read_only in (False, True):
        with pytest.raises(StoreVersionError, match="9999"):
            KVStore(tmp_path, read_only=read_only)


def test_an_index_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.sqlite").write_bytes(b"not a database, but long enough" * 100)
    with pytest.raises(StoreError, match="not a database"):
        KVStore(tmp_path)


def test_places_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for root, url in (
        (tmp_path / "file", None),
        (tmp_path / "a", "sqlite://"),
        (tmp_path / "a", "no url"),
        (tmp_path / "a", "unheard-of://host/name"),
        (tmp_path / "a", "mssql+pymssql://host/name"),
        (tmp_path / "a", f"sqlite:///{tmp_path}/none/index.sqlite"),
        (tmp_path / "a", "postgresql+psycopg://nobody@127.0.0.1:1/none"),
    ):
        with pytest.raises(StoreError):
            KVStore(root, index_url=url)


def test_a_root_with_a_name_that_needs_quoting(tmp_path: Path) -> None:
    with KVStore(tmp_path / "50% of #1? ü & co") as store:
        id_ = made.put(store, 1)
        assert store.get(made.MODEL, "default", [id_])
    assert (tmp_path / "50% of #1? ü & co" / "index.sqlite").exists()


def test_the_index_can_stand_elsewhere(tmp_path: Path) -> None:
    with KVStore(tmp_path / "a", index_url=f"sqlite:///{tmp_path / 'mine.db'}") as store:
        made.put(store, 1)
    assert (tmp_path / "mine.db").exists()
    assert not (tmp_path / "a" / "index.sqlite").exists()


def test_a_forked_child_uses_the_store_it_came_with(store: KVStore) -> None:
    id_ = made.put(store, 1)
    child = os.fork()
    if child == 0:
        try:
            made.put(store, 2)
            os._exit(0 if store.get(made.MODEL, "default", [id_]) else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(store.chunks())) == 2


@pytest.fixture(params=["asked for", "mounted", "mounted after a crash"])
def read_only(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[KVStore, str]]:
    """A store that can only be read, and the chunk in it."""
    folder = tmp_path / "store"
    with KVStore(tmp_path / "original") as original:
        id_ = made.put(original, 1)
        if request.param == "mounted after a crash":  # the log holds what the database does not
            shutil.copytree(original.root, folder)
    if request.param != "mounted after a crash":
        original.root.rename(folder)
    if request.param == "asked for":
        with KVStore(folder, read_only=True) as store:
            yield store, id_
        return
    place = tmp_path / "place"
    place.mkdir()
    mount, unmount = shutil.which("mount"), shutil.which("umount")
    if not mount or not unmount or os.geteuid() != 0:
        pytest.skip("only root can mount")
    bind = subprocess.run([mount, "--bind", str(folder), str(place)], capture_output=True)
    if bind.returncode:
        pytest.skip("a folder cannot be mounted here")
    try:
        subprocess.run([mount, "-o", "remount,ro,bind", str(place)], check=True)
        with KVStore(place) as store:
            yield store, id_
    finally:
        subprocess.run([unmount, "--lazy", str(place)], check=True)


def test_a_store_that_can_only_be_read_is_read(read_only: tuple[KVStore, str]) -> None:
    store, id_ = read_only
    assert store.read_only
    assert store.get(made.MODEL, "default", [id_]).keys() == {id_}
    assert store.tokens(made.MODEL, "default", [id_]).keys() == {id_}
    assert len(store.changes(made.MODEL, 0).entries) == 1
    assert store.verify().ok
    store.touch([id_])
    for write in (
        lambda: store.remove(made.MODEL, "default", [id_]),
        lambda: store.evict(0),
        lambda: store.add_model("m", {}),
        lambda: store.put_source(made.MODEL, "default", "a", "1", []),
        lambda: store.verify(repair=True),
        lambda: store.rebuild_index(),
    ):
        with pytest.raises(StoreError, match="reading only"):
            write()
    assert store.get(made.MODEL, "default", [id_]).keys() == {id_}


def test_a_reader_of_a_mounted_store_sees_what_is_written_elsewhere(tmp_path: Path) -> None:
    """The reader falls back to a mode in which SQLite itself would not look for changes."""
    with KVStore(tmp_path) as store:
        made.put(store, 1)
    connection = sqlite._open(tmp_path / "index.sqlite", "immutable=1", 0, immutable=True)
    assert connection.file == sqlite._identity(tmp_path / "index.sqlite", True)
    with KVStore(tmp_path) as store:
        made.put(store, 2)
    assert connection.file != sqlite._identity(tmp_path / "index.sqlite", True)
    connection.close()


def test_read_only_needs_a_store_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="gone"):
        KVStore(tmp_path / "none", read_only=True)
    assert not (tmp_path / "none").exists()
    (tmp_path / "empty").mkdir()
    sqlite3.connect(tmp_path / "empty" / "index.sqlite").close()
    with pytest.raises(StoreError, match="revision none"):
        KVStore(tmp_path / "empty", read_only=True)

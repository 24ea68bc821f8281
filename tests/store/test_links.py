"""Symbolic links in a store's folder lead nobody to files elsewhere, whoever put them there."""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch

from semkv_rag.errors import ChunkFileError, StateFileError, StoreError
from semkv_rag.store import ChunkFile, KVStore, StateFile
from semkv_rag.store.identity import store_identity
from tests.store import made

pytestmark = pytest.mark.slow  # many small ones: seconds, all in all
KEY = "ab" * 32
SECRET = "a line of a file that is nobody's business"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text(SECRET)
    return path


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def make_old(path: Path) -> None:
    os.utime(path, (time.time() - 7200, time.time() - 7200))


def test_a_link_in_a_chunk_files_place_is_not_read(store: KVStore, tmp_path: Path) -> None:
    id_ = made.put(store, 1)
    path = store.path(made.MODEL, "default", id_)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(ChunkFileError, match="is a symbolic link"):
        ChunkFile(path, model=made.MODEL)
    assert "is a symbolic link" in store.verify(repair=True).problems[0].text
    assert store.add([made.ChunkKey(id_, made.MODEL, "default")]) == set()
    assert not path.is_symlink()
    assert elsewhere.exists()
    assert store.verify().notices == store.verify().problems == ()


def test_a_link_in_a_state_files_place_is_not_read(store: KVStore, tmp_path: Path) -> None:
    store.states.put(made.MODEL, "default", KEY, torch.rand(4, 8))
    path = store.states.path(made.MODEL, "default", KEY)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(StateFileError, match="is a symbolic link"):
        StateFile(path, model=made.MODEL)
    store.verify(repair=True)
    assert list(store.states.records()) == []
    assert elsewhere.exists()
    assert not path.is_symlink()


def link_a_folder(store: KVStore, id_: str, up: int, elsewhere: Path) -> Path:
    """Put a link in the place of the folder that is `up` above a chunk's file, and files behind it."""
    path = store.path(made.MODEL, "default", id_)
    folder = path.parents[up]
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere, target_is_directory=True)
    (path.parent / "mine.safetensors").write_text(SECRET)
    old = path.parent / ".mine.safetensors.1.tmp"
    old.write_text(SECRET)
    make_old(old)
    return folder


@pytest.mark.parametrize("up", range(4), ids=["aa", "namespace", "model", "chunks"])
def test_nothing_behind_a_linked_folder_is_touched(store: KVStore, tmp_path: Path, up: int) -> None:
    id_ = made.put(store, 1)
    elsewhere = tmp_path / "elsewhere"
    folder = link_a_folder(store, id_, up, elsewhere)
    before = snapshot(elsewhere)
    with pytest.raises(ChunkFileError, match="reached through"):
        ChunkFile(store.path(made.MODEL, "default", id_), model=made.MODEL)
    with pytest.raises(OSError, match="symbolic link"):
        made.write(store, made.header(1))
    report = store.verify()
    assert "reached through" in report.problems[0].text
    assert "symbolic link" in report.notices[0].text
    store.verify(repair=True)
    assert snapshot(elsewhere) == before
    assert not folder.is_symlink()
    again = store.verify()
    assert (again.problems, again.notices) == ((), ())
    assert made.put(store, 1) == id_


@pytest.mark.parametrize("up", range(4), ids=["aa", "namespace", "model", "chunks"])
@pytest.mark.parametrize("how", ["evict", "remove", "remove_source", "put_source"])
def test_removing_deletes_nothing_behind_a_linked_folder(
    store: KVStore, tmp_path: Path, up: int, how: str
) -> None:
    id_ = made.put(store, 1)
    store.put_source(made.MODEL, "default", "doc", "d", [id_])
    elsewhere = tmp_path / "elsewhere"
    link_a_folder(store, id_, up, elsewhere)
    before = snapshot(elsewhere)
    if how == "evict":
        store.evict(0)
    elif how == "remove":
        store.remove(made.MODEL, "default", [id_])
    elif how == "remove_source":
        store.remove_source(made.MODEL, "default", "doc")
    else:
        store.put_source(made.MODEL, "default", "doc", "e", [])
    assert list(store.chunks()) == []
    assert snapshot(elsewhere) == before


@pytest.mark.parametrize("name", ["x.safetensors", ".x.safetensors.1.tmp"])
def test_links_among_the_files_are_not_followed(store: KVStore, victim: Path, name: str) -> None:
    folder = store.path(made.MODEL, "default", made.put(store, 1)).parent
    for target in (victim, victim.parent / "none"):
        link = folder / name
        link.symlink_to(target)
        os.utime(link, (1, 1), follow_symlinks=False)
        store.verify(repair=True)
        assert not link.is_symlink()
    assert victim.read_text() == SECRET
    assert not (victim.parent / "none").exists()


def test_the_lock_file_empties_and_makes_nothing(tmp_path: Path, victim: Path) -> None:
    for number, target in enumerate([victim, tmp_path / "none"]):
        root = tmp_path / str(number)
        root.mkdir()
        (root / "index.sqlite.lock").symlink_to(target)
        with pytest.raises(StoreError, match="symbolic link"):
            KVStore(root)
        assert not (tmp_path / "none").exists()
    assert victim.read_text() == SECRET


def test_the_index_is_not_anothers_database(tmp_path: Path, victim: Path) -> None:
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE mine (text)")
    for number, target in enumerate([victim, other, tmp_path / "none"]):
        before = target.read_bytes() if target.exists() else None
        root = tmp_path / str(number)
        root.mkdir()
        (root / "index.sqlite").symlink_to(target)
        for read_only in (False, True):
            with pytest.raises(StoreError, match="symbolic link"):
                KVStore(root, read_only=read_only)
        assert (target.read_bytes() if target.exists() else None) == before


@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal"])
def test_the_logs_files_are_not_anothers(tmp_path: Path, victim: Path, suffix: str) -> None:
    root = tmp_path / "store"
    with KVStore(root) as store:
        made.put(store, 1)
    (root / f"index.sqlite{suffix}").symlink_to(victim)
    with suppress(StoreError), KVStore(root) as store:
        made.put(store, 2)
        store.evict(0)
    assert victim.read_text() == SECRET


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
def test_a_pipe_in_the_place_of_sqlites_files(tmp_path: Path, suffix: str) -> None:
    with KVStore(tmp_path) as store:
        made.put(store, 1)
    path = tmp_path / f"index.sqlite{suffix}"
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    for read_only in (False, True):
        with pytest.raises(StoreError, match="no file"):
            KVStore(tmp_path, read_only=read_only)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_journal_deletes_no_file_elsewhere(tmp_path: Path, victim: Path, read_only: bool) -> None:
    """A transaction over several databases leaves a journal that names a file, which SQLite deletes."""
    root = tmp_path / "store"
    with KVStore(root) as store:
        made.put(store, 1)
    magic = bytes.fromhex("d9d505f920a163d7")
    pages = (root / "index.sqlite").stat().st_size // 4096
    start = (magic + struct.pack(">IIIII", 0, 0, pages, 512, 4096)).ljust(512, b"\0")
    name = str(victim).encode()
    end = struct.pack(">I", (1 << 30) // 4096 + 1) + name
    journal = root / "index.sqlite-journal"
    journal.write_bytes(start + end + struct.pack(">II", len(name), sum(name)) + magic)
    with pytest.raises(StoreError, match="names another file"):
        KVStore(root, read_only=read_only)
    assert victim.read_text() == SECRET
    journal.unlink()
    with KVStore(root, read_only=read_only) as store:
        assert store.verify().ok


def test_an_index_that_became_a_link_is_not_followed(tmp_path: Path) -> None:
    with KVStore(tmp_path / "a") as theirs:
        made.put(theirs, 1)
    with KVStore(tmp_path / "b") as store:
        (tmp_path / "b" / "index.sqlite").unlink()
        (tmp_path / "b" / "index.sqlite").symlink_to(tmp_path / "a" / "index.sqlite")
        with pytest.raises(StoreError, match="symbolic link"):
            list(store.chunks())
        with pytest.raises(StoreError, match="symbolic link"):
            store.rebuild_index()


def test_the_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with KVStore(tmp_path / "link" / "store") as store:
        id_ = made.put(store, 1)
        store.states.put(made.MODEL, "default", KEY, torch.rand(4, 8))
        assert len(store_identity(store.root)) == 32
        assert store.verify().ok
    (tmp_path / "other").symlink_to(tmp_path / "real" / "store")
    with KVStore(tmp_path / "other") as store:
        assert store.evict(0)[0] == id_
    assert list((tmp_path / "real").rglob("*.safetensors")) == []


@pytest.mark.parametrize(
    "content",
    ["", SECRET, "ab" * 1000, "AB" * 16, "ab" * 16 + "\n"],
    ids=["nothing", "text", "long", "capitals", "line"],
)
def test_what_is_no_name_is_not_published(store: KVStore, content: str) -> None:
    (store.root / "store.id").write_text(content)
    published = store_identity(store.root)
    assert published == store_identity(store.root)
    assert len(published) == 32
    assert content != published
    assert [notice.path for notice in store.verify(repair=True).notices] == ["store.id"]
    assert store_identity(store.root) != published
    assert store.verify().notices == ()


def test_no_files_text_is_published_through_a_link(store: KVStore, tmp_path: Path) -> None:
    token = "0123456789abcdef" * 2  # a secret may look like a name
    (tmp_path / "secret").write_text(token)
    for target in (tmp_path / "secret", tmp_path / "none", Path("/dev/zero"), tmp_path):
        (store.root / "store.id").symlink_to(target)
        published = store_identity(store.root)
        assert published != token
        assert len(published) == 32
        store.verify(repair=True)
        assert not (store.root / "store.id").is_symlink()
    assert (tmp_path / "secret").read_text() == token
    assert not (tmp_path / "none").exists()


def test_a_pipe_in_the_names_place_makes_nobody_wait(store: KVStore) -> None:
    os.mkfifo(store.root / "store.id")
    assert len(store_identity(store.root)) == 32
    shutil.rmtree(store.root)

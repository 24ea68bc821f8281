"""Shelves begin with a window file, catch up in the background, and take no file's word for anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from semkv_rag.connector.scheduler import shelf as its
from semkv_rag.connector.scheduler.catalogue import Catalogue
from semkv_rag.connector.scheduler.shelf import Shelf
from semkv_rag.errors import StoreError
from semkv_rag.reuse import TokenArray
from semkv_rag.store import KVStore
from semkv_rag.store.files.paths import window_path
from semkv_rag.store.files.window_file import WindowFile
from semkv_rag.store.index import feed
from tests.store import made
from workbench.settings import ROOT

SOON_S = 60
CHUNKS = 25


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is worth it from 20 chunks on."""
    monkeypatch.setattr(its, "WORTH_A_FILE", 20)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with KVStore(tmp_path / "store") as store:
        yield store


@pytest.fixture
def ids(store: KVStore) -> list[str]:
    return [made.put(store, seed) for seed in range(CHUNKS)]


class Opened:
    """A catalogue, as an engine opens it."""

    def __init__(self, store: KVStore) -> None:
        self.catalogue = Catalogue(store)
        self.catalogue.load(made.MODEL)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.catalogue.close()

    @property
    def shelf(self) -> Shelf:
        (queue,) = self.catalogue._queues.values()
        return queue.shelf

    def found(self, seed: int, namespace: str = "default") -> list[str]:
        prompt: TokenArray = made.header(seed).tokens
        spans = self.catalogue.find(made.MODEL, namespace, prompt).result(SOON_S)
        return [span.chunk_id for span in spans]

    def settle(self) -> None:
        until(lambda: not self.shelf._working)


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON_S
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def path(store: KVStore, namespace: str = "default") -> Path:
    return window_path(store.root, made.MODEL, namespace)


def write(store: KVStore) -> None:
    """Have a catalogue write the file."""
    with Opened(store) as opened:
        opened.settle()
    assert path(store).exists()


class Asked:
    """Which chunks' tokens a store is asked for."""

    def __init__(self, store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ids: list[str] = []
        read = store.tokens

        def tokens(model: str, namespace: str, wanted: list[str]) -> Any:
            self.ids += wanted
            return read(model, namespace, wanted)

        monkeypatch.setattr(store, "tokens", tokens)


def test_opening_with_a_file_reads_no_tokens(
    store: KVStore, ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store)
    asked = Asked(store, monkeypatch)
    with Opened(store) as opened:
        assert asked.ids == []
        for seed in (0, 7, CHUNKS - 1):
            assert opened.found(seed) == [ids[seed]]
        assert set(asked.ids) == {ids[0], ids[7], ids[CHUNKS - 1]}


def test_small_stores_have_no_file(store: KVStore) -> None:
    id_ = made.put(store, 1)
    with Opened(store) as opened:
        assert opened.found(1) == [id_]
        opened.settle()
    assert not (store.root / "catalogue").exists()


def test_what_changed_since_the_file_was_written(store: KVStore, ids: list[str]) -> None:
    write(store)
    new = made.put(store, 100)
    store.remove(made.MODEL, "default", ids[:2])
    back = made.put(store, 1)
    with Opened(store) as opened:
        assert opened.found(100) == [new]
        assert opened.found(0) == []
        assert opened.found(1) == [back]
        assert opened.found(5) == [ids[5]]
        store.remove(made.MODEL, "default", [ids[5]])
        assert opened.found(5) == []


def test_changes_that_cannot_be_told_any_more(
    store: KVStore, ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store)
    monkeypatch.setattr(feed, "_KEPT", 3)
    store.remove(made.MODEL, "default", ids[:5])
    new = [made.put(store, seed) for seed in range(200, 210)]
    asked = Asked(store, monkeypatch)
    with Opened(store) as opened:
        assert set(asked.ids) == set(new), "only what the file does not have is read"
        assert opened.found(0) == []
        assert opened.found(6) == [ids[6]]
        assert opened.found(205) == [new[5]]


def test_an_index_that_was_made_again(store: KVStore, ids: list[str]) -> None:
    write(store)
    store.close()
    for file in store.root.glob("index.sqlite*"):
        file.unlink()
    with KVStore(store.root) as again:
        again.rebuild_index()
        with Opened(again) as opened:
            assert opened.found(3) == [ids[3]]


def test_the_file_is_written_anew_when_enough_came(store: KVStore, ids: list[str]) -> None:
    write(store)
    with WindowFile(path(store), made.MODEL, "default") as file:
        first = file.last_change
    new = [made.put(store, seed) for seed in range(300, 322)]
    with Opened(store) as opened:
        opened.settle()
        assert opened.found(310) == [new[10]]
        assert opened.found(4) == [ids[4]]
        assert opened.shelf._index is not None
        assert opened.shelf._index.beside_base == 0
    with WindowFile(path(store), made.MODEL, "default") as file:
        assert file.last_change > first


def test_a_bad_chunk_stays_forgotten_when_the_file_is_written(
    store: KVStore, ids: list[str]
) -> None:
    write(store)
    with Opened(store) as opened:
        assert opened.found(2) == [ids[2]]
        opened.catalogue.forget(made.MODEL, "default", [ids[2]])
        assert opened.found(2) == []
        for seed in range(400, 425):
            made.put(store, seed)
        opened.found(400)
        opened.settle()
        assert opened.shelf._index is not None
        assert opened.shelf._index.beside_base <= 1
        assert opened.found(2) == []


def test_a_namespace_that_is_emptied_keeps_no_file(store: KVStore, ids: list[str]) -> None:
    write(store)
    with Opened(store) as opened:
        store.remove(made.MODEL, "default", ids)
        assert opened.found(3) == []
    assert not path(store).exists()


def test_what_is_not_read_yet_is_said_and_then_found(
    store: KVStore, ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(its, "TAKEN_AT_ONCE", 5)
    monkeypatch.setattr(its, "TAKEN_BY_A_REQUEST", 5)
    catalogue = Catalogue(store)
    opened = Opened.__new__(Opened)
    opened.catalogue = catalogue
    work: list[Callable[[], None]] = []
    monkeypatch.setattr(catalogue._background, "submit", work.append)
    with pytest.raises(StoreError, match="20 of its chunks are still to be taken in"):
        opened.found(999)
    there = [seed for seed in range(CHUNKS) if ids[seed] not in opened.shelf._pending]
    assert opened.found(there[0]) == [ids[there[0]]], "matched against what is there"
    assert len(work) == 1
    work[0]()
    for seed in range(CHUNKS):
        assert opened.found(seed) == [ids[seed]]
    assert opened.found(999) == []
    assert path(store).exists()
    catalogue.close()


def test_a_store_that_is_only_read_has_no_file_written(store: KVStore, ids: list[str]) -> None:
    with KVStore(store.root, read_only=True) as reading, Opened(reading) as opened:
        opened.settle()
        assert opened.found(3) == [ids[3]]
    assert not path(store).exists()
    write(store)
    with KVStore(store.root, read_only=True) as reading, Opened(reading) as opened:
        assert opened.found(3) == [ids[3]]


def garbage(file: Path) -> None:
    file.write_bytes(os.urandom(5000))


def torn(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-10] ^= 1
    file.write_bytes(data)


def link(file: Path) -> None:
    file.rename(file.with_name("other"))
    file.symlink_to(file.with_name("other"))


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("damage", [garbage, torn, flipped, link, pipe, folder])
def test_a_file_that_cannot_be_used_costs_nothing_but_time(
    store: KVStore, ids: list[str], damage: Callable[[Path], None]
) -> None:
    write(store)
    damage(path(store))
    with Opened(store) as opened:
        assert [opened.found(seed) for seed in range(CHUNKS)] == [[id_] for id_ in ids]
        opened.settle()
    if damage is not folder:  # nobody removes that for us
        with WindowFile(path(store), made.MODEL, "default") as file:
            file.verify()


def test_a_file_that_is_cut_while_it_is_used(store: KVStore, ids: list[str]) -> None:
    write(store)
    with Opened(store) as opened:
        os.truncate(path(store), 700)
        with pytest.raises(StoreError, match="window file"):
            opened.found(3)
    with Opened(store) as opened:
        assert opened.found(3) == [ids[3]]


def test_another_namespaces_file_is_refused(store: KVStore, ids: list[str]) -> None:
    write(store)
    theirs = [made.put(store, seed, namespace="b") for seed in range(50, 53)]
    path(store, "b").parent.mkdir(parents=True)
    shutil.copy(path(store), path(store, "b"))
    catalogue = Catalogue(store)
    catalogue.load(made.MODEL)
    for seed, expected in ((3, []), (51, [theirs[1]])):
        spans = catalogue.find(made.MODEL, "b", made.header(seed).tokens).result(SOON_S)
        assert [span.chunk_id for span in spans] == expected
    catalogue.close()


BUILDER = """
import sys
from semkv_rag.store import KVStore
from tests.connector.test_shelf import Opened, its
its.WORTH_A_FILE = 20
with KVStore(sys.argv[1]) as store:
    print("ready", flush=True)
    sys.stdin.readline()
    with Opened(store) as opened:
        opened.settle()
        print(*opened.found(3))
"""


@pytest.mark.slow
def test_processes_that_write_the_file_at_once(store: KVStore, ids: list[str]) -> None:
    command = [sys.executable, "-c", BUILDER, str(store.root)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    builders = [subprocess.Popen(command, **pipes) for _ in range(3)]  # type: ignore[call-overload]
    for builder in builders:
        assert builder.stdout.readline() == "ready\n"
    for builder in builders:
        builder.stdin.write("go\n")
        builder.stdin.flush()
    assert [builder.communicate(timeout=SOON_S)[0] for builder in builders] == [f"{ids[3]}\n"] * 3
    assert [builder.returncode for builder in builders] == [0, 0, 0]
    assert [file.name for file in path(store).parent.iterdir()] == ["windows.safetensors"]
    with Opened(store) as opened:
        assert opened.shelf._index is not None
        assert opened.shelf._index.beside_base == 0
        assert [opened.found(seed) for seed in range(CHUNKS)] == [[id_] for id_ in ids]

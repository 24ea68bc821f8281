"""Window files: whole or not there, and refused when anything was done to them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from semkv_rag.errors import StoreError, StoreVersionError
from semkv_rag.reuse import ChunkIndex
from semkv_rag.reuse.base import ENTRIES, LENGTHS, SECTIONS, Base
from semkv_rag.store import KVStore
from semkv_rag.store.files.paths import window_path
from semkv_rag.store.files.window_file import WindowFile, write_windows
from tests.store import made
from tests.store.forging import forge, forge_tensor
from tests.store.made import MODEL
from workbench.settings import ROOT


def sections(chunks: int = 50) -> Mapping[str, NDArray[Any]]:
    """The sections of some chunks' file."""
    random = np.random.default_rng(5)
    index = ChunkIndex(lambda ids: {})
    index.add(
        (random.bytes(32).hex(), random.integers(0, 50_000, 60, dtype=np.int32))
        for _ in range(chunks)
    )
    arrays = index.pack()()
    assert arrays is not None
    return arrays


@pytest.fixture
def path(tmp_path: Path) -> Path:
    KVStore(tmp_path / "store").close()
    path = window_path(tmp_path / "store", MODEL, "default")
    write_windows(path, MODEL, "default", 77, sections())
    return path


def test_what_was_written_is_read(path: Path) -> None:
    with WindowFile(path, MODEL, "default") as file:
        file.verify()
        assert file.last_change == 77
        for name, array in sections().items():
            assert bytes(file.load(name)) == array.tobytes()
            assert file.read(name, 8, 4) == array.tobytes()[8:12]
        assert len(Base(file, 8)) == 50
        for offset, count in ((-8, 8), (0, 1 << 40), (file.size(LENGTHS) - 1, 2)):
            with pytest.raises(StoreError, match="no such place"):
                file.read(LENGTHS, offset, count)


def test_files_are_another_namespaces_and_another_models(path: Path) -> None:
    for model, namespace in ((MODEL, "other"), ("f" * 64, "default")):
        with pytest.raises(StoreError, match="another model or namespace"):
            WindowFile(path, model, namespace)


def test_paths_keep_namespaces_apart(tmp_path: Path) -> None:
    paths = {window_path(tmp_path, MODEL, name) for name in ("a", "b", "../a", "a/b")}
    assert len(paths) == 4
    assert all(path.is_relative_to(tmp_path / "catalogue") for path in paths)


@pytest.mark.parametrize("cut", [0, 5, 100, 3000, -1])
def test_a_torn_file_is_refused(path: Path, cut: int) -> None:
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(StoreError):
        WindowFile(path, MODEL, "default")


@pytest.mark.parametrize("name", SECTIONS)
def test_a_flipped_bit_is_found(path: Path, name: str) -> None:
    with WindowFile(path, MODEL, "default") as file:
        place = file._data_begin + file._entries[name].begin
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with WindowFile(path, MODEL, "default") as file, pytest.raises(StoreError, match=name):
        file.verify()


def test_a_forged_header_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    changes: list[Any] = [
        lambda document: document.pop(ENTRIES),
        lambda document: document.update({"more": document[ENTRIES]}),
        lambda document: document["__metadata__"].pop("last_change"),
        lambda document: document["__metadata__"].update(last_change="soon"),
        lambda document: document["__metadata__"].update(format="semkv.chunk"),
        lambda document: document[ENTRIES].update(dtype="I8"),
        lambda document: document[ENTRIES].update(data_offsets=[8, 16]),
    ]
    for change in changes:
        path.write_bytes(whole)
        forge(path, change)
        with pytest.raises(StoreError):
            WindowFile(path, MODEL, "default")
    path.write_bytes(whole)
    forge(path, lambda document: document["__metadata__"].update(format_version="2"))
    with pytest.raises(StoreVersionError, match="newer"):
        WindowFile(path, MODEL, "default")


def test_a_forged_section_is_refused_by_its_numbers(path: Path) -> None:
    with WindowFile(path, MODEL, "default") as file:
        size = file.size(LENGTHS)
    forge_tensor(path, LENGTHS, torch.full((size,), 255, dtype=torch.uint8))
    with WindowFile(path, MODEL, "default") as file:
        file.verify()
        with pytest.raises(ValueError, match="chunks"):
            Base(file, 8)


def test_nothing_but_a_file_in_its_place_is_opened(path: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(elsewhere)
    with pytest.raises(StoreError, match="symbolic link"):
        WindowFile(path, MODEL, "default")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(StoreError, match="not a file"):
        WindowFile(path, MODEL, "default")


def test_no_link_on_the_way_is_followed(path: Path, tmp_path: Path) -> None:
    catalogue = path.parents[3]
    catalogue.rename(tmp_path / "elsewhere")
    catalogue.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="symbolic link"):
        WindowFile(path, MODEL, "default")
    with KVStore(tmp_path / "store") as store:
        store.verify(repair=True)
    assert not catalogue.exists()
    assert (tmp_path / "elsewhere").exists()


def test_an_open_file_stays_what_it_was(path: Path) -> None:
    with WindowFile(path, MODEL, "default") as file:
        before = file.read(ENTRIES, 0, 64)
        write_windows(path, MODEL, "default", 78, sections(9))
        assert file.read(ENTRIES, 0, 64) == before
        file._file.close()
        with pytest.raises(StoreError, match="cannot be read"):
            file.read(ENTRIES, 0, 64)


def test_a_file_that_is_cut_while_open_is_an_error_in_words(path: Path) -> None:
    with WindowFile(path, MODEL, "default") as file:
        os.truncate(path, 600)
        with pytest.raises(StoreError, match="torn"):
            file.read(SECTIONS[-1], 0, 8)


WRITER = """
import sys
from pathlib import Path
from semkv_rag.store.files.window_file import write_windows
from tests.store.made import MODEL
from tests.store.test_window_file import sections
arrays = {chunks: sections(chunks) for chunks in (2000, 3000)}
for number in range(10**6):
    chunks = 2000 + 1000 * (number % 2)
    write_windows(Path(sys.argv[1]), MODEL, "default", chunks, arrays[chunks])
    print(number, flush=True)
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_the_file_whole(path: Path) -> None:
    for written in (1, 2, 4):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            for _ in range(written):
                writer.stdout.readline()
            writer.kill()
        with WindowFile(path, MODEL, "default") as file:
            file.verify()
            assert len(Base(file, 8)) == file.last_change


def test_it_goes_with_the_last_chunk_that_is_removed_by_name(store: KVStore) -> None:
    for namespace in ("a", "b"):
        made.put(store, 1, namespace=namespace)
        made.put(store, 2, namespace=namespace)
        write_windows(window_path(store.root, MODEL, namespace), MODEL, namespace, 77, sections())
    there = [window_path(store.root, MODEL, namespace) for namespace in ("a", "b")]
    store.lifecycle.remove(None, "a")
    assert [path.exists() for path in there] == [False, True]
    ids = [record.id for record in store.chunks(MODEL, "b")]
    for name, id_ in zip(("first", "second"), ids, strict=True):
        store.put_source(MODEL, "b", name, "1", [id_])
    store.remove_source(MODEL, "b", "first")
    assert there[1].exists()
    store.remove_source(MODEL, "b", "second")
    assert not there[1].exists()

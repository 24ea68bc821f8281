"""Files that somebody forged stop no run: they are found, and what is sound is taken in."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from xxhash import xxh3_64

from semkv_rag.errors import ChunkFileError, StateFileError
from semkv_rag.store import ChunkFile, KVStore, StateFile, chunk_id, state_id
from semkv_rag.store.files import state_file
from semkv_rag.store.files.tensor_writer import write_tensors
from tests.store import made
from tests.store.forging import forge

pytestmark = pytest.mark.slow  # many small ones: seconds, all in all
KEY = "ab" * 32
MIB = 1 << 20

HEADERS: list[dict[str, str]] = [
    {"namespace": ""},
    {"namespace": "a\nb"},
    {"namespace": "a" * 200},
    {"namespace": "\ud800"},
    {"model": "../../../tmp"},
    {"model": ""},
    {"model": "m" * 5000},
    {"model": "\ud800"},
    {"model": "a\0b"},
    {"created_at": "nan"},
    {"created_at": "inf"},
    {"created_at": "-1"},
]
CHUNK_HEADERS: list[dict[str, str]] = [
    {"kind": "novel"},
    {"kind": "k" * 1_000_000},
    {"world_size": "1000000000"},
    {"world_size": "1025"},
    {"world_size": "9" * 4000},
    {"world_size": "0"},
    {"world_size": "-1"},
    {"rank": "7"},
    {"rank": "-1"},
]


def with_right_id(fields: dict[str, str]) -> Callable[[dict[str, dict[str, Any]]], None]:
    header = made.header(2)

    def change(document: dict[str, dict[str, Any]]) -> None:
        metadata = document["__metadata__"]
        metadata.update(fields)
        try:
            owner = metadata["model"], metadata["namespace"]
            if metadata["format"] == "semkv.state":
                metadata["id"] = state_id(*owner, metadata["key"])
            else:
                metadata["id"] = chunk_id(*owner, header.context, header.tokens)
        except UnicodeEncodeError:
            pass  # it has no id

    return change


def name(fields: dict[str, str]) -> str:
    ((field, value),) = fields.items()
    return f"{field} {ascii(value)[:12]}"


def assert_clean(store: KVStore) -> None:
    again = store.verify()
    assert (again.problems, again.notices) == ((), ())


@pytest.mark.parametrize("fields", HEADERS + CHUNK_HEADERS, ids=name)
def test_a_forged_chunk_stops_no_run(store: KVStore, fields: dict[str, str]) -> None:
    sound = [made.write(store, made.header(seed)).id for seed in (1, 3)]
    forged = made.write(store, made.header(2))
    path = store.path(forged.model, forged.namespace, forged.id)
    forge(path, with_right_id(fields))
    with pytest.raises(ChunkFileError):
        ChunkFile(path, model=None)
    assert store.add([forged]) == set()
    report = store.verify(repair=True)
    assert sorted(notice.kind for notice in report.notices) == ["debris", "orphan", "orphan"]
    assert all(finding.text.isprintable() for finding in report.notices)
    assert {record.id for record in store.chunks()} == set(sound)
    assert_clean(store)


def test_tensors_in_another_order_are_refused(store: KVStore) -> None:
    """Layers are read several at a time, as they follow each other."""
    key = made.write(store, made.header(2))
    path = store.path(key.model, key.namespace, key.id)

    def swap(document: dict[str, dict[str, Any]]) -> None:
        metadata = document["__metadata__"]
        names = ("xxh3:0000.k", "xxh3:0001.v")
        metadata.update(zip(names, [metadata[name] for name in reversed(names)], strict=True))
        entries = {name.replace("0000.k", "-"): entry for name, entry in document.items()}
        entries = {name.replace("0001.v", "0000.k"): entry for name, entry in entries.items()}
        entries = {name.replace("-", "0001.v"): entry for name, entry in entries.items()}
        document.clear()
        document.update(entries)

    forge(path, swap)
    with pytest.raises(ChunkFileError, match="its tensors are not those of 2 layers"):
        ChunkFile(path, model=None)


@pytest.mark.parametrize("fields", HEADERS, ids=name)
def test_a_forged_state_stops_no_run(store: KVStore, fields: dict[str, str]) -> None:
    sound = made.write(store, made.header(1)).id
    store.states.put(made.MODEL, "default", KEY, torch.rand(4, 8))
    path = store.states.path(made.MODEL, "default", KEY)
    forge(path, with_right_id(fields))
    with pytest.raises(StateFileError):
        StateFile(path, model=None)
    assert not store.verify(repair=True).ok
    assert {record.id for record in store.chunks()} == {sound}
    assert list(store.states.records()) == []
    assert_clean(store)


def test_names_that_are_none(store: KVStore) -> None:
    sound = made.write(store, made.header(1))
    folder = store.path(sound.model, sound.namespace, sound.id).parent
    names = [b"\xff\xfe.r0.safetensors", b"a\nb.safetensors", b"\x1b[2J.safetensors", b"n" * 200]
    for bad in names:
        (folder / os.fsdecode(bad + b".safetensors")).write_bytes(b"x")
    report = store.verify(repair=True)
    assert all((finding.path + finding.text).isprintable() for finding in report.notices)
    assert [record.id for record in store.chunks()] == [sound.id]
    assert len(list(folder.iterdir())) == 1
    assert_clean(store)


def test_a_folder_and_a_pipe_in_files_places(store: KVStore) -> None:
    sound = made.write(store, made.header(1)).id
    promised = made.put(store, 2)
    folder, pipe = (store.path(made.MODEL, "default", id_) for id_ in ("ab" * 32, promised))
    folder.mkdir(parents=True)
    (folder / "mine").write_text("mine")
    pipe.unlink()
    os.mkfifo(pipe)
    report = store.verify(repair=True)
    assert [problem.text.split(" ", 3)[3] for problem in report.problems] == ["is not a file"]
    assert [record.id for record in store.chunks()] == [sound]
    assert not pipe.exists()
    assert (folder / "mine").exists(), "a folder is nothing of ours"
    again = store.verify()
    assert again.ok
    assert [notice.path for notice in again.notices] == [str(folder.relative_to(store.root))]


def test_a_tensor_that_is_larger_than_its_file_allows(tmp_path: Path) -> None:
    """A sparse file is as large as it likes, so tokens, which are read at once, have a bound."""
    header = made.header(1)
    path = tmp_path / "c.safetensors"
    count = 1 << 28
    made.write_chunk(path, header, made.layers(header))

    def change(document: dict[str, dict[str, Any]]) -> None:
        document["context"]["shape"] = [count]
        offset = 0
        for entry in list(document.values())[1:]:
            length = entry["data_offsets"][1] - entry["data_offsets"][0]
            if entry is document["context"]:
                length = 4 * count
            entry["data_offsets"] = [offset, offset + length]
            offset += length

    forge(path, change)
    data = path.read_bytes()
    os.truncate(path, 8 + int.from_bytes(data[:8], "little") + 4 * count + 16 * 4 + 4 * 256)
    began = time.monotonic()
    with pytest.raises(ChunkFileError, match="context does not fit"):
        ChunkFile(path, model=None)
    assert time.monotonic() - began < 1


@pytest.mark.slow
def test_verifying_takes_little_memory(tmp_path: Path) -> None:
    size = 512 * MIB
    path = tmp_path / "s.safetensors"
    metadata = {
        "id": state_id(made.MODEL, "default", KEY),
        "model": made.MODEL,
        "namespace": "default",
        "key": KEY,
        "dtype": "bfloat16",
        "created_at": "1.0",
    }
    state = {"state": torch.zeros(1, 8, dtype=torch.bfloat16)}
    write_tensors(path, state_file.FORMAT, metadata, state)
    hasher = xxh3_64()
    for _ in range(size // MIB):
        hasher.update(bytes(MIB))

    def change(document: dict[str, dict[str, Any]]) -> None:
        document["__metadata__"]["xxh3:state"] = hasher.hexdigest()
        document["state"].update(shape=[size // 16, 8], data_offsets=[0, size])

    forge(path, change)
    os.truncate(path, 8 + int.from_bytes(path.read_bytes()[:8], "little") + size)
    child = os.fork()
    if child == 0:
        try:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with StateFile(path, model=None) as file:
                file.verify()
            used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            os._exit(0 if used * 1024 < size // 2 else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0

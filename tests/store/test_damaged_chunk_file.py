"""Whatever was done to a chunk file, reading it is a ChunkFileError in words, and nothing worse."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from semkv_rag.errors import ChunkFileError, StoreVersionError
from semkv_rag.store import ChunkFile, write_chunk
from tests.store import made
from tests.store.forging import PREFIX, forge

HEADER = made.header(1, tokens=8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "chunk.safetensors"
    write_chunk(path, HEADER, made.layers(HEADER), made.sensitivity(HEADER))
    return path


def read_all(path: Path) -> None:
    with ChunkFile(path, model=made.MODEL, chunk_id=HEADER.id) as file:
        file.verify()


def test_one_bit_flipped_in_any_byte(path: Path) -> None:
    data = path.read_bytes()
    bit = random.Random(0)
    with path.open("r+b", buffering=0) as file:
        for offset, byte in enumerate(data):
            file.seek(offset)
            file.write(bytes([byte ^ 1 << bit.randrange(8)]))
            with pytest.raises(ChunkFileError, match=r"chunk file chunk\.safetensors"):
                read_all(path)
            file.seek(offset)
            file.write(bytes([byte]))
    read_all(path)


def test_truncated_at_any_byte(path: Path) -> None:
    size = path.stat().st_size
    for length in reversed(range(size)):
        os.truncate(path, length)
        with pytest.raises(ChunkFileError, match="torn"):
            read_all(path)


def test_grown(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ChunkFileError, match="torn"):
        read_all(path)


def test_truncated_while_open(path: Path) -> None:
    with ChunkFile(path, model=made.MODEL) as file:
        os.truncate(path, path.stat().st_size - 10)
        file.layer(1)
        with pytest.raises(ChunkFileError, match="torn"):
            file.sensitivity()


def test_altered_while_open(path: Path) -> None:
    with ChunkFile(path, model=made.MODEL) as file:
        with path.open("r+b") as other:
            other.seek(-1, os.SEEK_END)
            other.write(b"\x55")
        file.layer(1)
        with pytest.raises(ChunkFileError, match="sensitivity"):
            file.sensitivity()


def test_missing(path: Path) -> None:
    path.unlink()
    with pytest.raises(ChunkFileError, match="missing"):
        read_all(path)


def test_a_folder_a_pipe_or_a_circle_of_links_in_its_place(path: Path) -> None:
    path.unlink()
    path.mkdir()
    with pytest.raises(ChunkFileError, match="not a file"):
        read_all(path)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(ChunkFileError, match="not a file"):
        read_all(path)
    path.unlink()
    path.symlink_to(path.name)
    with pytest.raises(ChunkFileError):
        read_all(path)


def test_another_model_or_chunk(path: Path) -> None:
    with pytest.raises(ChunkFileError, match="another model"):
        ChunkFile(path, model="another")
    with pytest.raises(ChunkFileError, match="another chunk"):
        ChunkFile(path, model=made.MODEL, chunk_id=made.header(2).id)
    with ChunkFile(path, model=None) as file, pytest.raises(ChunkFileError, match="no layer 2"):
        file.layer(2)


@pytest.mark.parametrize("length", [0, 1, 4 << 20, 1 << 40, (1 << 64) - 1])
def test_a_length_prefix_that_promises_anything(path: Path, length: int) -> None:
    with path.open("r+b") as file:
        file.write(length.to_bytes(8, "little"))
    os.truncate(path, 1 << 40)  # sparse: what would be read or allocated is there, in a way
    with pytest.raises(ChunkFileError):
        read_all(path)


@pytest.mark.parametrize(
    "tail",
    [b"[" * 1_000_000, b'0":' + b"9" * 1_000_000 + b"}", b'","a":' + b"[" * 100_000, b"\xff" * 99],
    ids=["nested", "digits", "nested deep", "not text"],
)
def test_a_json_bomb_with_the_right_checksum(path: Path, tail: bytes) -> None:
    header = PREFIX + xxh3_64_hexdigest(tail).encode() + tail
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ChunkFileError, match="understood"):
        read_all(path)


def _set(name: str, value: object) -> Callable[[dict[str, dict[str, object]]], None]:
    return lambda document: document["__metadata__"].update({name: value})


def _tensor(name: str, field: str, value: object) -> Callable[[dict[str, dict[str, object]]], None]:
    return lambda document: document[name].update({field: value})


@pytest.mark.parametrize(
    "change",
    [
        _set("format", "somebody else's"),
        _set("id", "0" * 64),
        _set("namespace", "another"),
        _set("layers", "1"),
        _set("layers", "many"),
        _set("layers", "1000000000"),
        _set("rank", None),
        _set("dtype", "float32"),
        _set("dtype", "nn"),
        _set("dtype", ["bfloat16"]),
        _set("created_at", "noon"),
        _set("xxh3:0000.k", "0" * 16),
        _tensor("0000.k", "dtype", "F16"),
        _tensor("0000.k", "dtype", "F99"),
        _tensor("0000.k", "shape", [8, 4, 4]),
        _tensor("0000.k", "shape", [8, -2, -4]),
        _tensor("0000.k", "shape", [1, 16, 4]),
        _tensor("0000.k", "shape", 8),
        _tensor("0000.k", "data_offsets", [0, 1 << 62]),
        _tensor("0000.k", "data_offsets", [-64, 64]),
        _tensor("tokens", "shape", []),
        _tensor("tokens", "shape", [4, 2]),
        lambda document: document.pop("context"),
        lambda document: document.update({"0002.k": document["0000.k"]}),
        lambda document: document.update({"0000.k": document["0000.v"]}),
        lambda document: document["__metadata__"].pop("kind"),
    ],
)
def test_a_forged_header(
    path: Path, change: Callable[[dict[str, dict[str, object]]], None]
) -> None:
    forge(path, lambda document: None)
    read_all(path)
    forge(path, change)
    with pytest.raises(ChunkFileError):
        read_all(path)


def test_a_newer_format_is_told_apart(path: Path) -> None:
    forge(path, _set("format_version", "4"))
    with pytest.raises(StoreVersionError, match="newer"):
        read_all(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300), st.integers(0, 3000), st.integers(0, 300))
def test_anything_spliced_in(path: Path, piece: bytes, offset: int, cut: int) -> None:
    original = path.read_bytes()
    spliced = original[:offset] + piece + original[offset + cut :]
    if spliced == original:
        return
    try:
        path.write_bytes(spliced)
        with pytest.raises(ChunkFileError):
            read_all(path)
    finally:
        path.write_bytes(original)

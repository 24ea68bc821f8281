"""Damaged and forged files give their content or a StoreError, in time. `tests/soak` has many more."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_hexdigest

from semkv_rag.errors import ChunkFileError, StoreVersionError
from semkv_rag.store import ChunkFile, KVStore, write_chunk
from tests.store import made
from tests.store.forging import forge
from tests.store.fuzzing import LONGEST_MESSAGE, fuzz, repair_a_store, sound_files

HEADER = made.header(1)
INFINITY = float("inf")
LONG = "a" * 100_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "chunk.safetensors"
    write_chunk(path, HEADER, made.layers(HEADER), made.sensitivity(HEADER))
    return path


@pytest.mark.slow
def test_damaged_and_forged_files(tmp_path: Path) -> None:
    outcome = fuzz(range(800), tmp_path)
    assert outcome.faults == []
    assert outcome.total("refused") > 400
    assert outcome.total("forged") and outcome.total("same"), "some are sound"


@pytest.mark.slow
def test_a_store_of_damaged_and_forged_files_is_repaired(tmp_path: Path, store: KVStore) -> None:
    assert repair_a_store(store, range(10), sound_files(tmp_path)) > 50


@pytest.mark.parametrize(
    "fields",
    [
        {"shape": [INFINITY, 2, 4]},
        {"shape": [16.0, 2, 4]},
        {"shape": ["16", "2", "4"]},
        {"shape": "16"},
        {"data_offsets": [0, INFINITY]},
        {"data_offsets": [INFINITY, -INFINITY]},
    ],
    ids=str,
)
def test_sizes_that_are_none(path: Path, fields: dict[str, Any]) -> None:
    forge(path, lambda document: document["0000.k"].update(fields))
    with pytest.raises(ChunkFileError, match="cannot be used"):
        ChunkFile(path, model=None)


@pytest.mark.parametrize("side", [1 << 31, 1 << 62, 1 << 63, 1 << 200])
def test_a_tensor_of_nothing_that_is_too_long(path: Path, side: int) -> None:
    """Its size is 0, which is what its place in the file says, too."""

    def change(document: dict[str, dict[str, Any]]) -> None:
        begin, _ = document["0001.v"]["data_offsets"]
        document["0001.v"].update(shape=[16, 0, side], data_offsets=[begin, begin])
        document["__metadata__"]["xxh3:0001.v"] = xxh3_64_hexdigest(b"")

    forge(path, change)
    os.truncate(path, path.stat().st_size - 16 * 2 * 4 * 2)
    with pytest.raises(ChunkFileError, match="cannot be used"):
        ChunkFile(path, model=None)


@pytest.mark.parametrize("field", ["format", "kind", "namespace", "model", "created_at", "layers"])
def test_what_stands_in_a_file_makes_no_endless_error(path: Path, field: str) -> None:
    forge(path, lambda document: document["__metadata__"].update({field: LONG}))
    with pytest.raises(ChunkFileError) as error:
        ChunkFile(path, model=None)
    assert len(str(error.value)) <= LONGEST_MESSAGE


def test_a_newer_format_makes_no_endless_error(path: Path) -> None:
    forge(path, lambda document: document["__metadata__"].update(format_version="9" * 4000))
    with pytest.raises(StoreVersionError) as error:
        ChunkFile(path, model=None)
    assert len(str(error.value)) <= LONGEST_MESSAGE

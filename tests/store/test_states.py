"""Images' features: files and rows in step, faults in words, evicted and mended as chunks are."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from semkv_rag.errors import StateFileError, StoreError
from semkv_rag.store import KVStore, StateFile, StoredStates
from semkv_rag.store.files import state_file
from semkv_rag.store.files.tensor_writer import write_tensors
from tests.store import made

KEY = "ab" * 32
OTHER = "cd" * 32


def state(seed: int = 0, rows: int = 4, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.rand(rows, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def states(store: KVStore) -> StoredStates:
    return store.states


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_put_and_load(states: StoredStates, dtype: torch.dtype) -> None:
    written = state(1, dtype=dtype)
    size = states.put(made.MODEL, "default", KEY, written)
    loaded = states.load(made.MODEL, "default", KEY)
    assert loaded is not None
    assert loaded.dtype is dtype
    assert torch.equal(loaded, written)
    path = states.path(made.MODEL, "default", KEY)
    assert path.stat().st_size == size
    assert torch.equal(load_file(path)["state"], written), "any reader of safetensors reads it"
    (record,) = states.records()
    assert (record.model, record.namespace, record.key) == (made.MODEL, "default", KEY)
    assert (record.rows, record.width, record.bytes) == (4, 8, size)
    assert states.has(made.MODEL, "default", KEY)


def test_a_later_state_takes_the_place_of_the_first(states: StoredStates) -> None:
    states.put(made.MODEL, "default", KEY, state(1))
    states.put(made.MODEL, "default", KEY, state(2, rows=5))
    loaded = states.load(made.MODEL, "default", KEY)
    assert loaded is not None
    assert torch.equal(loaded, state(2, rows=5))
    (record,) = states.records()
    assert record.rows == 5


def test_nobody_elses(states: StoredStates) -> None:
    states.put(made.MODEL, "mine", KEY, state())
    assert states.load(made.MODEL, "theirs", KEY) is None
    assert states.load("f" * 64, "mine", KEY) is None
    assert states.load(made.MODEL, "mine", OTHER) is None
    assert list(states.records(namespace="theirs")) == []


@pytest.mark.parametrize(
    "key", ["../../evil", "/etc/passwd", "AB" * 32, "ab", "a" * 5000, "\0" * 64]
)
def test_a_key_cannot_lead_elsewhere(states: StoredStates, key: str) -> None:
    with pytest.raises(StoreError, match="64 hex digits"):
        states.load(made.MODEL, "default", key)
    with pytest.raises(StoreError, match="64 hex digits"):
        states.put(made.MODEL, "default", key, state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_no_number(states: StoredStates, dtype: torch.dtype, bad: float) -> None:
    for row in (0, 33, 66):
        spoilt = state(rows=67, dtype=dtype)
        spoilt[row, row % 8] = bad
        with pytest.raises(StoreError, match="NaN or infinity"):
            states.put(made.MODEL, "default", KEY, spoilt)


@pytest.mark.parametrize(
    "bad",
    [
        torch.full((4, 8), float("nan")),
        torch.full((4, 8), float("inf")),
        torch.zeros(4, 8, 1),
        torch.zeros(0, 8),
        torch.zeros(4, 8, dtype=torch.int8),
    ],
    ids=["nan", "inf", "three axes", "empty", "integers"],
)
def test_what_is_no_state_is_not_stored(states: StoredStates, bad: torch.Tensor) -> None:
    with pytest.raises(StoreError):
        states.put(made.MODEL, "default", KEY, bad)
    assert list(states.records()) == []
    assert list(states.root.rglob("*.safetensors*")) == []


def test_one_bit_flipped_in_any_byte(states: StoredStates) -> None:
    states.put(made.MODEL, "default", KEY, state())
    path = states.path(made.MODEL, "default", KEY)
    data = path.read_bytes()
    bit = random.Random(0)
    for offset, byte in enumerate(data):
        path.write_bytes(data[:offset] + bytes([byte ^ 1 << bit.randrange(8)]) + data[offset + 1 :])
        with pytest.raises(StateFileError, match="state file"):
            states.load(made.MODEL, "default", KEY)


def test_truncated_at_any_byte_and_grown(states: StoredStates) -> None:
    states.put(made.MODEL, "default", KEY, state())
    path = states.path(made.MODEL, "default", KEY)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(StateFileError, match="torn"):
            states.load(made.MODEL, "default", KEY)
    path.write_bytes(data + b"\0")
    with pytest.raises(StateFileError, match="torn"):
        states.load(made.MODEL, "default", KEY)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"other": torch.zeros(4, 8)},
        {"state": torch.zeros(4)},
        {"state": torch.zeros(4, 8).int()},
    ],
    ids=["none", "another name", "one axis", "integers"],
)
def test_a_file_with_other_tensors(states: StoredStates, tensors: dict[str, torch.Tensor]) -> None:
    states.put(made.MODEL, "default", KEY, state())
    forge(states, tensors)
    with pytest.raises(StateFileError):
        states.load(made.MODEL, "default", KEY)


def forge(states: StoredStates, tensors: dict[str, torch.Tensor]) -> None:
    """Write a file as somebody does who knows the format."""
    path = states.path(made.MODEL, "default", KEY)
    metadata = {
        "id": path.name.split(".")[0],
        "model": made.MODEL,
        "namespace": "default",
        "key": KEY,
        "dtype": "float32",
        "created_at": "1.0",
    }
    write_tensors(path, state_file.FORMAT, metadata, tensors)


def test_anothers_file_under_this_name(states: StoredStates) -> None:
    states.put("f" * 64, "default", KEY, state())
    states.put(made.MODEL, "default", OTHER, state())
    path = states.path(made.MODEL, "default", KEY)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(states.path("f" * 64, "default", KEY).read_bytes())
    with pytest.raises(StateFileError, match="another model"):
        states.load(made.MODEL, "default", KEY)
    path.write_bytes(states.path(made.MODEL, "default", OTHER).read_bytes())
    with pytest.raises(StateFileError, match="another image"):
        states.load(made.MODEL, "default", KEY)
    path.write_bytes(b"")
    path.unlink()
    path.mkdir()
    with pytest.raises(StateFileError, match="not a file"):
        states.load(made.MODEL, "default", KEY)


def test_a_chunk_file_is_no_state_file(store: KVStore) -> None:
    id_ = made.put(store, 1)
    with pytest.raises(StateFileError, match="format"):
        StateFile(store.path(made.MODEL, "default", id_), model=None)


def test_chunks_and_states_are_evicted_as_one(store: KVStore) -> None:
    chunks = [made.put(store, seed, created_at=float(seed)) for seed in range(3)]
    for key in (KEY, OTHER):
        store.states.put(made.MODEL, "default", key, state())
    store.touch(chunks[:1])
    first, second = sorted(store.states.records(), key=lambda record: record.used_at)
    total = sum(entry.bytes for entry in store.stats())
    assert store.evict(total - 1) == [chunks[1]]
    assert store.evict(0, kind="state", namespace="other") == []
    assert store.evict(first.bytes, kind="state") == [first.id]
    store.states.touch([second.id])
    assert store.evict(0) == [chunks[2], chunks[0], second.id]
    assert list(store.root.rglob("*.safetensors*")) == []


def test_prompts_are_evicted_without_touching_states(store: KVStore) -> None:
    store.states.put(made.MODEL, "default", KEY, state())
    assert store.evict(0, kind="prompt") == []


def test_counts(store: KVStore) -> None:
    made.put(store, 1)
    store.states.put(made.MODEL, "default", KEY, state())
    size = store.states.put(made.MODEL, "only states", KEY, state())
    mine, theirs = store.stats()
    assert (mine.chunks, mine.states) == (1, 1)
    assert (theirs.namespace, theirs.chunks, theirs.states) == ("only states", 0, 1)
    assert theirs.bytes == size
    assert store.stats("only states") == [theirs]


def test_removed(store: KVStore) -> None:
    store.states.put(made.MODEL, "mine", KEY, state())
    store.states.put(made.MODEL, "theirs", KEY, state())
    mine = [record.id for record in store.states.records(namespace="mine")]
    assert store.states.remove([*mine, "0" * 64]) == 1
    assert store.states.load(made.MODEL, "mine", KEY) is None
    assert store.states.load(made.MODEL, "theirs", KEY) is not None
    assert store.verify().notices == ()


def test_missing_and_damaged_files_are_found_and_mended(store: KVStore) -> None:
    store.states.put(made.MODEL, "default", KEY, state())
    store.states.put(made.MODEL, "default", OTHER, state())
    store.states.path(made.MODEL, "default", KEY).unlink()
    damaged = store.states.path(made.MODEL, "default", OTHER)
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    report = store.verify()
    assert sorted(problem.kind for problem in report.problems) == ["damaged", "missing"]
    assert report.states == 2
    store.verify(repair=True)
    assert list(store.states.records()) == []
    assert not damaged.exists()
    assert store.verify().ok


def test_unknown_files_are_taken_in(store: KVStore) -> None:
    path = store.states.path(made.MODEL, "default", KEY)
    state_file.write_state(path, made.MODEL, "default", KEY, state())
    astray = path.with_name(f"{'0' * 64}.safetensors")
    astray.write_bytes(path.read_bytes())
    report = store.verify(repair=True)
    assert sorted(notice.kind for notice in report.notices) == ["debris", "orphan"]
    assert not astray.exists()
    assert [record.key for record in store.states.records()] == [KEY]
    assert store.verify().notices == ()


def test_a_lost_index_is_made_again(tmp_path: Path) -> None:
    with KVStore(tmp_path) as store:
        store.states.put(made.MODEL, "default", KEY, state())
        before = list(store.states.records())
    for file in tmp_path.glob("index.sqlite*"):
        file.unlink()
    with KVStore(tmp_path) as store:
        store.rebuild_index()
        assert list(store.states.records()) == before


def test_temporary_files_go_once_they_are_old(store: KVStore) -> None:
    store.states.put(made.MODEL, "default", KEY, state())
    path = store.states.path(made.MODEL, "default", KEY)
    old = path.with_name(f".{path.name}.1.tmp")
    old.write_bytes(b"half")
    os.utime(old, (1, 1))
    assert [notice.kind for notice in store.verify().notices] == ["debris"]
    assert not old.exists()


def test_reading_only(tmp_path: Path) -> None:
    with KVStore(tmp_path) as store:
        store.states.put(made.MODEL, "default", KEY, state())
    with KVStore(tmp_path, read_only=True) as store:
        assert store.states.load(made.MODEL, "default", KEY) is not None
        store.states.touch(record.id for record in store.states.records())
        with pytest.raises(StoreError, match="reading only"):
            store.states.put(made.MODEL, "default", OTHER, state())
        assert len(list(store.root.rglob("*.safetensors"))) == 1

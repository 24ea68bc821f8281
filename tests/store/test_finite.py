"""NaN and infinity are neither written nor read: one in a chunk's KV would spread over an answer."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from semkv_rag.errors import ChunkFileError, StateFileError, StoreError
from semkv_rag.store import ChunkFile, KVStore, write_chunk
from semkv_rag.store.files import finite, tensor_file
from semkv_rag.store.files.finite import is_finite, raw_bytes
from tests.store import made
from tests.store.forging import forge_tensor

FLOATS = [
    torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
KEY = "ab" * 32


def bad_values(dtype: torch.dtype) -> list[float]:
    if dtype is torch.float8_e4m3fn:
        return [float("nan")]  # it has no infinity
    return [float("nan"), float("inf"), float("-inf")]


def all_numbers(tensor: torch.Tensor) -> bool:
    return is_finite(tensor, raw_bytes(tensor))


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def spoilt(like: torch.Tensor, value: float, place: int) -> torch.Tensor:
    numbers = like.float().flatten()
    numbers[place] = value
    return numbers.view(like.shape).to(like.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS[1:], ids=name)
def test_every_bit_pattern_is_judged_as_torch_does(dtype: torch.dtype) -> None:
    width = 8 * dtype.itemsize
    integers = torch.int8 if width == 8 else torch.int16
    patterns = torch.arange(-(1 << width - 1), 1 << width - 1).to(integers).view(dtype)
    expected = torch.isfinite(patterns.float())
    assert all_numbers(patterns[expected].contiguous())
    for pattern, number in zip(patterns.split(1), expected.tolist(), strict=True):
        assert all_numbers(pattern) == number


def test_float32_at_the_edges() -> None:
    largest = torch.finfo(torch.float32).max
    assert all_numbers(torch.tensor([largest, -largest, 1e-45, -0.0])), "its sum is a number"
    assert all_numbers(torch.full((100,), largest)), "its sum is infinite"
    for code in (0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF):
        for sign in (0, -(1 << 31)):
            bad = torch.full((100,), largest)
            bad[7] = torch.tensor(code + sign, dtype=torch.int32).view(torch.float32)
            assert not all_numbers(bad)


def test_integers_are_numbers_whatever_their_bits() -> None:
    for dtype in (torch.int8, torch.uint8, torch.int32):
        assert all_numbers(torch.full((4,), -1).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_a_chunk_is_not_written(tmp_path: Path, dtype: torch.dtype) -> None:
    header = made.header(1, dtype=name(dtype), tokens=33)
    for value in bad_values(dtype):
        for layer, part, place in ((0, 0, 0), (1, 1, 33 * 8 - 1), (1, 0, 77)):
            layers = [list(pair) for pair in made.layers(header)]
            layers[layer][part] = spoilt(layers[layer][part], value, place)
            with pytest.raises(StoreError, match=f"000{layer}.{'kv'[part]} holds NaN or infinity"):
                write_chunk(tmp_path / "c.safetensors", header, [(k, v) for k, v in layers])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_a_chunk_with_right_checksums_is_not_read(tmp_path: Path, dtype: torch.dtype) -> None:
    header = made.header(1, dtype=name(dtype))
    path = tmp_path / "c.safetensors"
    for value in bad_values(dtype):
        layers = made.layers(header)
        write_chunk(path, header, layers)
        forge_tensor(path, "0001.v", layers[1][1])
        with ChunkFile(path, model=made.MODEL) as file:
            file.verify()
        forge_tensor(path, "0001.v", spoilt(layers[1][1], value, 50))
        with ChunkFile(path, model=made.MODEL) as file:
            file.layer(0)
            with pytest.raises(ChunkFileError, match=r"holds NaN or infinity in 0001\.v"):
                file.layer(1)
            with pytest.raises(ChunkFileError, match="NaN"):
                file.verify()


def test_a_state_with_right_checksums_is_not_read(store: KVStore) -> None:
    state = torch.rand(4, 8)
    store.states.put(made.MODEL, "default", KEY, state)
    forge_tensor(
        store.states.path(made.MODEL, "default", KEY), "state", spoilt(state, float("nan"), 3)
    )
    with pytest.raises(StateFileError, match="NaN"):
        store.states.load(made.MODEL, "default", KEY)


def test_verify_finds_and_drops_it(store: KVStore) -> None:
    id_ = made.put(store, 1)
    path = store.path(made.MODEL, "default", id_)
    forge_tensor(path, "0000.k", spoilt(made.layers(made.header(1))[0][0], float("inf"), 9))
    state = torch.rand(4, 8)
    store.states.put(made.MODEL, "default", KEY, state)
    forge_tensor(
        store.states.path(made.MODEL, "default", KEY), "state", spoilt(state, float("-inf"), 31)
    )
    report = store.verify(repair=True)
    assert [problem.kind for problem in report.problems] == ["damaged"] * 2
    assert all("NaN or infinity" in problem.text for problem in report.problems)
    again = store.verify()
    assert (again.problems, again.notices) == ((), ())
    assert list(store.root.rglob("*.safetensors")) == []


def test_large_numbers_are_numbers(store: KVStore) -> None:
    """Which are too large depends on the queries that they meet, which the store does not know."""
    header = made.header(1)
    layers = made.layers(header)
    layers[0] = (torch.full_like(layers[0][0], torch.finfo(torch.bfloat16).max), layers[0][1])
    path = store.path(made.MODEL, "default", header.id)
    write_chunk(path, header, layers)
    with ChunkFile(path, model=made.MODEL) as file:
        assert torch.equal(file.layer(0)[0], layers[0][0])


class Looks:
    """Counts how often tensors of files are looked through, and lets files be known after a moment."""

    MOMENT_S = 0.05

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(tensor_file, "is_finite", self._look)
        monkeypatch.setattr(finite, "SETTLED_NS", int(self.MOMENT_S / 2 * 1e9))

    def _look(self, tensor: torch.Tensor, content: memoryview) -> bool:
        self.count += 1
        return is_finite(tensor, content)

    def taken_by(self, read: Callable[[], object]) -> int:
        time.sleep(self.MOMENT_S)
        before = self.count
        read()
        return self.count - before


def read_all(path: Path) -> None:
    with ChunkFile(path, model=made.MODEL) as file:
        for index in range(file.header.layers):
            file.layer(index)


def test_a_file_is_looked_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = made.header(1)
    looks, path = Looks(monkeypatch), tmp_path / "c.safetensors"
    write_chunk(path, header, made.layers(header))
    assert looks.taken_by(lambda: read_all(path)) == 2 * header.layers + 2
    assert looks.taken_by(lambda: read_all(path)) == 0
    path.rename(tmp_path / "other.safetensors")
    write_chunk(path, header, made.layers(header))
    assert looks.taken_by(lambda: read_all(path)) == 2 * header.layers + 2, "another file"


def test_a_file_that_was_just_written_is_not_known_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = made.header(1)
    looks, path = Looks(monkeypatch), tmp_path / "c.safetensors"
    monkeypatch.setattr(finite, "SETTLED_NS", int(60e9))
    write_chunk(path, header, made.layers(header))
    for _ in range(2):
        assert looks.taken_by(lambda: read_all(path)) == 2 * header.layers + 2


@pytest.mark.parametrize("in_place", [True, False])
def test_a_known_file_that_is_altered_is_looked_through_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    header = made.header(1)
    looks, path, forged = Looks(monkeypatch), tmp_path / "c.safetensors", tmp_path / "forged"
    layers = made.layers(header)
    write_chunk(path, header, layers)
    looks.taken_by(lambda: read_all(path))
    assert looks.taken_by(lambda: read_all(path)) == 0
    times = path.stat()
    shutil.copyfile(path, forged)
    forge_tensor(forged, "0001.v", spoilt(layers[1][1], float("nan"), 50))
    if in_place:
        path.write_bytes(forged.read_bytes())
    else:
        forged.replace(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    time.sleep(looks.MOMENT_S)
    with ChunkFile(path, model=made.MODEL) as file:
        with pytest.raises(ChunkFileError, match=r"holds NaN or infinity in 0001\.v"):
            file.layer(1)
        with pytest.raises(ChunkFileError, match=r"holds NaN"):
            file.layer(1)


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "FILES_KNOWN", 3)
    known = finite.KnownFinite()
    for number in range(3):
        known.add((number,), 1)
    known.add((0,), 4)
    assert known.of((0,)) == 5
    known.add((3,), 1)
    assert [known.of((number,)) for number in range(4)] == [5, 0, 1, 1]

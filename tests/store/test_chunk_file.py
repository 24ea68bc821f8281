"""Writing chunk files and reading them back."""

from __future__ import annotations

import resource
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from semkv_rag.errors import ChunkFileError, StoreError
from semkv_rag.store import ChunkFile, ChunkHeader, chunk_id, write_chunk
from semkv_rag.store.files import header as header_module
from semkv_rag.store.files.header import FORMAT
from tests.store import made

DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("context", [0, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_is_read(tmp_path: Path, dtype: str, context: int) -> None:
    header = made.header(1, dtype=dtype, context=context, namespace="Mandant – 1", world_size=2)
    written = made.layers(header)
    path = tmp_path / "a" / "b" / "chunk.safetensors"
    assert write_chunk(path, header, written) == path.stat().st_size
    with ChunkFile(path, model=made.MODEL, chunk_id=header.id) as file:
        read = [file.layer(index) for index in range(header.layers)]
        file.verify()
    for field in ("id", "model", "namespace", "kind", "dtype", "layers", "rank", "world_size"):
        assert getattr(file.header, field) == getattr(header, field)
    assert file.header.created_at == header.created_at
    assert file.header.base == context
    np.testing.assert_array_equal(file.header.tokens, header.tokens)
    np.testing.assert_array_equal(file.header.context, header.context)
    for pair, original in zip(read, written, strict=True):
        for tensor, expected in zip(pair, original, strict=True):
            assert tensor.dtype == expected.dtype
            assert torch.equal(bits(tensor), bits(expected))


def test_sensitivity_goes_with_it_or_not(tmp_path: Path) -> None:
    header, path = made.header(1), tmp_path / "chunk.safetensors"
    write_chunk(path, header, made.layers(header))
    with ChunkFile(path, model=made.MODEL) as file:
        assert file.sensitivity() is None
    given = made.sensitivity(header)
    write_chunk(path, header, made.layers(header), given)
    with ChunkFile(path, model=made.MODEL) as file:
        read = file.sensitivity()
        file.verify()
        assert torch.equal(bits(file.layer(1)[1]), bits(made.layers(header)[1][1]))
    assert read is not None and torch.equal(read, given)


@pytest.mark.parametrize("wrong", [torch.zeros(2, 15), torch.zeros(3, 16), torch.zeros(2, 16)])
def test_a_sensitivity_that_does_not_fit_is_refused(tmp_path: Path, wrong: torch.Tensor) -> None:
    header = made.header(1)
    given = wrong if wrong.shape == (2, 16) else wrong.to(torch.uint8)
    with pytest.raises(StoreError, match="sensitivity"):
        write_chunk(tmp_path / "chunk.safetensors", header, made.layers(header), given)


def test_a_file_of_format_1_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header, path = made.header(1), tmp_path / "chunk.safetensors"
    with monkeypatch.context() as older:
        older.setattr(header_module, "PLAIN_FORMAT", replace(FORMAT, version=1))
        write_chunk(path, header, made.layers(header))
    assert b'"format_version":"1"' in path.read_bytes()
    with ChunkFile(path, model=made.MODEL) as file:
        file.verify()
        assert file.sensitivity() is None


def test_is_a_safetensors_file_layer_by_layer(tmp_path: Path) -> None:
    header = made.header(1)
    written = made.layers(header)
    path = tmp_path / "chunk.safetensors"
    write_chunk(path, header, written)
    tensors = load_file(path)
    assert torch.equal(bits(tensors["0001.v"]), bits(written[1][1]))
    assert tensors["tokens"].tolist() == header.tokens.tolist()
    with safe_open(path, "pt") as file:
        assert file.metadata()["id"] == header.id
        stored = [name for name in file.offset_keys() if name[0].isdigit()]
    assert stored == ["0000.k", "0000.v", "0001.k", "0001.v"]


def test_takes_slices_and_transposed_views(tmp_path: Path) -> None:
    """What capture hands over is cut from a whole batch's KV."""
    header = made.header(1)
    batch = torch.randn(100, 4, 8).to(torch.bfloat16)
    views = [(batch[5:21, :2], batch[5:21, 2:]), (batch[5:21].transpose(1, 2), batch[5:21])]
    path = tmp_path / "chunk.safetensors"
    write_chunk(path, header, views)
    with ChunkFile(path, model=made.MODEL) as file:
        assert torch.equal(file.layer(0)[1], batch[5:21, 2:])
        assert torch.equal(file.layer(1)[0], batch[5:21].transpose(1, 2))


def test_tensors_outlive_the_file(tmp_path: Path) -> None:
    header = made.header(1)
    written = made.layers(header)
    path = tmp_path / "chunk.safetensors"
    write_chunk(path, header, written)
    with ChunkFile(path, model=made.MODEL) as file:
        key, _ = file.layer(0)
    path.write_bytes(b"")
    assert torch.equal(key, written[0][0])
    with pytest.raises(ChunkFileError, match="cannot be read"):
        file.layer(0)


def test_an_open_file_is_read_as_it_was_when_it_is_replaced(tmp_path: Path) -> None:
    header = made.header(1)
    path = tmp_path / "chunk.safetensors"
    first = made.layers(header, seed=1)
    write_chunk(path, header, first)
    with ChunkFile(path, model=made.MODEL) as file:
        write_chunk(path, header, made.layers(header, seed=2))
        assert torch.equal(file.layer(1)[1], first[1][1])
        path.unlink()
        file.verify()


def test_handles_are_closed(tmp_path: Path) -> None:
    header = made.header(1)
    path = tmp_path / "chunk.safetensors"
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"none of ours, but long enough")
    before = open_files()
    for _ in range(3):
        write_chunk(path, header, made.layers(header))
        with ChunkFile(path, model=made.MODEL) as file:
            file.verify()
        for wrong in (path, other):
            with pytest.raises(ChunkFileError):
                ChunkFile(wrong, model="another")
    assert open_files() == before


def test_a_full_disk_is_an_oserror_and_leaves_nothing(tmp_path: Path) -> None:
    header = made.header(1, tokens=2000)
    path = tmp_path / "chunk.safetensors"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_chunk(path, header, made.layers(header))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_refuses_what_does_not_fit_together(tmp_path: Path) -> None:
    header = made.header(1)
    good = made.layers(header)
    key, value = good[0]

    def changed(**fields: object) -> ChunkHeader:
        values = {name: getattr(header, name) for name in ChunkHeader.__dataclass_fields__}
        return ChunkHeader(**{**values, **fields})

    wrong = [
        (header, good[:1]),
        (header, [good[0], (key, value[:-1])]),
        (header, [good[0], (key, value.float())]),
        (header, [good[0], (key, value.flatten(1))]),
        (changed(id="0" * 64), good),
        (changed(kind="novel"), good),
        (changed(rank=1), good),
        (changed(dtype="float32"), good),
        (changed(layers=0), []),
    ]
    for case in wrong:
        with pytest.raises(StoreError):
            write_chunk(tmp_path / "chunk.safetensors", *case)
    assert list(tmp_path.iterdir()) == []


def test_the_content_address_tells_its_parts_apart() -> None:
    one, two = np.array([1], np.int32), np.array([1, 1], np.int32)
    addresses = {
        chunk_id("m", "n", one, two),
        chunk_id("m", "n", two, one),
        chunk_id("mn", "", one, two),
        chunk_id("m", "n2", one, two),
        chunk_id("m", "n", two[:0], np.array([1, 1, 1], np.int32)),
    }
    assert len(addresses) == 5
    assert chunk_id("m", "n", one, two) == chunk_id("m", "n", one.copy(), two.astype(np.int64))
